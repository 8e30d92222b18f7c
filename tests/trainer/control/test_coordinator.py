"""The coordinator, which makes the controller's decisions: events in, commands and effects out."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest

from roostream.errors import ConfigError
from roostream.runtime.bucket_map import BucketMap
from roostream.runtime.log_rate_limit import LogRateLimit
from roostream.runtime.manifest import Manifest, Restorable
from trainer.control.coordinator import Coordinator
from trainer.control.types import Claim, CoordinatorConfig, Discard, Key, Link, Retire, State

CONFIG = CoordinatorConfig(
    schema="ff",
    seed=0,
    num_shards=2,
    num_buckets=64,
    num_partitions=4,
    kafka={"cluster_id": "c"},
    commit_interval_s=10,
)
SHARD_0, SHARD_1, WORKER = Key("shard", 0), Key("shard", 1), Key("worker", 0)
EVERYONE = (SHARD_0, SHARD_1, WORKER)
ANSWERS: dict[tuple[str, str], dict[str, Any]] = {
    ("worker", "cut"): {
        "offsets": {"samples": {0: 5, 1: 6}},
        "watermark_ms": 77,
        "step": 3,
        "model": {"width": 8},
        "time_ms": 9,
    },
    ("worker", "write"): {
        "own": {"name": "workers/00000001-1-0.safetensors", "bytes": 5, "checksum": "cd"},
        "id_files": [{"name": "workers/00000001-1-0-ids.safetensors", "bytes": 6, "checksum": "ef"}],
        "dedupe": 4,
        "metrics": {},
        "dense": {"name": "dense/00000001-1.safetensors", "bytes": 9, "checksum": "ab"},
    },
    ("shard", "write"): {"segments": [{"name": "s"}], "rows_end": {0: 10, 1: 11}},
}


class CoordinatorHarness:
    """A coordinator with a fake clock, and members that answer every command."""

    def __init__(self, config: CoordinatorConfig = CONFIG) -> None:
        self.now_s = 0.0
        self.coordinator = Coordinator(config, log_rate_limit=LogRateLimit(lambda: self.now_s))
        self.sessions = dict.fromkeys(EVERYONE, 1)
        self.incarnations = dict.fromkeys(EVERYONE, 0)
        self.reports: dict[Key, dict[str, Any]] = {key: {} for key in EVERYONE}
        self.received: list[tuple[Key, str]] = []

    def claim(self, incarnation: int, last: Restorable | None = None, next_seq: int = 1) -> None:
        (claim,) = self.coordinator.take_effects()
        assert isinstance(claim, Claim)
        self.coordinator.claimed(incarnation, last, next_seq, self.now_s)

    def beat(self, key: Key, results: tuple[dict[str, Any], ...] = ()) -> None:
        self.coordinator.beat(
            key, self.sessions[key], self.incarnations[key], results, self.reports[key], self.now_s
        )

    def answer(self, key: Key, **override: Any) -> None:
        """Answer all commands of `key`. `override`: fields of the answers."""
        for command in self.coordinator.commands(key):
            self.received.append((key, command["kind"]))
            if command["kind"] == "restore":
                self.incarnations[key] = command["incarnation"]
            answer = {"ok": True, **ANSWERS.get((key.role, command["kind"]), {}), **override}
            self.beat(key, ({"id": command["id"], **answer},))

    def round(self, *keys: Key) -> None:
        for key in keys or EVERYONE:
            self.beat(key)
        for key in keys or EVERYONE:
            self.answer(key)

    def to(self, state: State) -> None:
        for _ in range(20):
            if self.coordinator.state is state:
                return
            for key in EVERYONE:
                self.answer(key)
                if self.coordinator.state is state:
                    return
        raise AssertionError(f"{self.coordinator.state}, not {state}")

    def running(self) -> CoordinatorHarness:
        self.claim(self.coordinator.incarnation + 1, self.coordinator.last, self.coordinator.seq + 1)
        self.round()
        self.to(State.RUNNING)
        self.round()
        return self

    def cutting(self) -> CoordinatorHarness:
        self.running()
        self.reports[WORKER] = {"step": 3}
        for _ in range(10):
            self.now_s += 1
            self.round_without_answers()
        assert self.coordinator.state is State.CUTTING
        return self

    def round_without_answers(self) -> None:
        for key in EVERYONE:
            self.beat(key)

    def link(self, outcome: str = "linked") -> Manifest:
        (link,) = self.coordinator.take_effects()
        assert isinstance(link, Link)
        self.coordinator.linked(outcome, self.now_s)
        return link.manifest

    def committed(self) -> CoordinatorHarness:
        self.cutting().to(State.LINKING)
        self.link()
        self.to(State.RUNNING)
        self.coordinator.take_effects()
        return self


def test_a_commit_keeps_the_restored_bucket_map() -> None:
    harness = CoordinatorHarness().committed()
    assert harness.coordinator.last and harness.coordinator.last.manifest.bucket_map is None
    swapped = BucketMap(1 - BucketMap.modulo(64, 2).owner_B, 2, 5)
    moved = dataclasses.replace(harness.coordinator.last.manifest, bucket_map=swapped)
    harness.coordinator.last = Restorable(moved, moved.checksum)
    harness.reports[WORKER] = {"step": 9}
    for _ in range(11):
        harness.now_s += 1
        harness.round_without_answers()
    harness.to(State.LINKING)
    manifest = harness.link()
    assert manifest.owners == swapped and manifest.previous == {"seq": 1, "checksum": moved.checksum}


def test_the_duration_of_each_commit_phase_is_reported() -> None:
    harness = CoordinatorHarness().cutting()
    for seconds, state in ((0.125, State.FREEZING), (0.25, State.WRITING), (0.5, State.LINKING)):
        harness.now_s += seconds
        harness.to(state)
    assert harness.coordinator.phases_s == {}, "no commit is complete yet"
    harness.now_s += 1
    harness.link()
    assert harness.coordinator.phases_s == {"cut": 0.125, "freeze": 0.25, "write": 0.5, "link": 1}
    assert (harness.coordinator.paused_s, harness.coordinator.commit_s) == (0.375, 1.875)


def test_a_commit_sends_its_commands_in_the_documented_order() -> None:
    harness = CoordinatorHarness().cutting()
    harness.received.clear()
    harness.to(State.LINKING)
    manifest = harness.link()
    assert " ".join(kind for _, kind in harness.received) == "cut freeze freeze resume write write write"
    assert (manifest.seq, manifest.incarnation, manifest.step, manifest.watermark_ms) == (1, 1, 3, 77)
    assert manifest.offsets == {("samples", 0): 5, ("samples", 1): 6} and manifest.rows_end == {0: 10, 1: 11}
    assert manifest.shards == {i: {"segments": [{"name": "s"}]} for i in (0, 1)}
    assert manifest.workers[0].dedupe == 4 and manifest.dense.name == "dense/00000001-1.safetensors"
    assert manifest.previous == {"seq": 0, "checksum": ""}
    assert harness.coordinator.state is State.COMMITTING and harness.coordinator.seq == 1
    assert harness.coordinator.take_effects() == [Retire()]
    harness.to(State.RUNNING)
    assert [kind for _, kind in harness.received[-3:]] == ["commit"] * 3


def test_an_idle_loop_writes_nothing() -> None:
    harness = CoordinatorHarness().committed()
    for _ in range(30):
        harness.now_s += 1
        harness.round()
    assert harness.coordinator.state is State.RUNNING and harness.coordinator.num_commits == 1


def in_state(state: State) -> CoordinatorHarness:
    harness = CoordinatorHarness()
    if state is State.RESTORING:
        harness.claim(1)
        harness.round_without_answers()
    elif state is State.RUNNING:
        harness.running()
    elif state is State.COMMITTING:
        harness.cutting().to(State.LINKING)
        harness.link()
    elif state is State.ABORTING:
        harness.cutting().to(State.LINKING)
        harness.link("exists")
    else:
        harness.cutting().to(state)
    assert harness.coordinator.state is state
    return harness


def test_a_broken_worker_starts_a_new_incarnation_once() -> None:
    harness = CoordinatorHarness().running()
    harness.reports[WORKER] = {"broken": "shard 0 is away"}
    harness.beat(WORKER)
    assert harness.coordinator.state is State.CLAIMING
    harness.claim(2)
    harness.beat(WORKER)
    assert harness.coordinator.state is State.RESTORING, (
        "a report of the previous incarnation must change nothing"
    )


LIMITS_S = {State.RESTORING: 600, State.COMMITTING: 60, State.ABORTING: 60, State.RUNNING: 60}


@pytest.mark.parametrize("state", LIMITS_S)
def test_every_state_ends_if_a_member_sends_heartbeats_but_hangs(state: State) -> None:
    harness = in_state(State.RESTORING if state is State.RUNNING else state)
    if state is State.RUNNING:  # START hangs
        for key in EVERYONE:
            for command in harness.coordinator.commands(key):
                harness.incarnations[key] = 1
                harness.beat(key, ({"id": command["id"], "ok": True},))
    assert harness.coordinator.state is state and harness.coordinator.commands(WORKER)
    harness.coordinator.take_effects()
    for second in range(LIMITS_S[state]):
        assert harness.coordinator.state is state, second
        harness.now_s += 1
        harness.round_without_answers()
    assert harness.coordinator.state is State.CLAIMING and " s in state " in harness.coordinator.reason
    assert "worker 0" in harness.coordinator.reason


def test_the_time_limit_of_a_restore_doubles_at_each_retry() -> None:
    harness = CoordinatorHarness()
    for tries, limit_s in enumerate((600, 1200, 2400), 1):
        harness.claim(tries)
        harness.now_s += 1
        harness.round_without_answers()
        assert harness.coordinator.state is State.RESTORING
        for _ in range(limit_s - 1):
            harness.now_s += 1
            harness.round_without_answers()
        assert harness.coordinator.state is State.RESTORING
        harness.now_s += 1
        harness.round_without_answers()
        assert harness.coordinator.state is State.CLAIMING


def refuse_a_commit(harness: CoordinatorHarness, **refusal: Any) -> None:
    """Start a commit in which shard 0 refuses FREEZE."""
    harness.coordinator.want_commit()
    harness.reports[WORKER] = {"step": 3}
    harness.round_without_answers()
    harness.answer(WORKER)
    (freeze,) = harness.coordinator.commands(SHARD_0)
    harness.beat(SHARD_0, ({"id": freeze["id"], "ok": False, **refusal},))


def test_three_aborts_in_a_row_start_a_new_incarnation() -> None:
    harness = CoordinatorHarness().running()
    for _ in range(2):
        refuse_a_commit(harness, error="expected commit 7 to be aborted")
        assert harness.coordinator.state is State.ABORTING
        harness.to(State.RUNNING)
    refuse_a_commit(harness, error="expected commit 7 to be aborted")
    assert harness.coordinator.state is State.CLAIMING and "3 commits in a row" in harness.coordinator.reason
    assert "expected commit 7 to be aborted" in harness.coordinator.reason
    harness.running()
    for _ in range(2):
        refuse_a_commit(harness, error="again")
        assert harness.coordinator.state is State.ABORTING, "a new incarnation must restart the count"
        harness.to(State.RUNNING)


def test_a_commit_resets_the_count_of_aborts() -> None:
    harness = CoordinatorHarness().running()
    for _ in range(5):
        refuse_a_commit(harness, error="no")
        harness.to(State.RUNNING)
        harness.reports[WORKER] = {"step": harness.reports[WORKER]["step"] + 1}
        harness.coordinator.want_commit()
        harness.round_without_answers()
        harness.to(State.LINKING)
        harness.link()
        harness.to(State.RUNNING)
        harness.coordinator.take_effects()
        harness.coordinator.last = None
        assert harness.coordinator.abort_reason == ""
    assert harness.coordinator.num_rollbacks == 0 and harness.coordinator.num_aborts == 5


def test_aborts_for_a_full_disk_cause_no_rollback() -> None:
    harness = CoordinatorHarness().running()
    for _ in range(10):
        refuse_a_commit(harness, error="No space left on device", away=True)
        assert harness.coordinator.state is State.ABORTING
        harness.to(State.RUNNING)
    assert harness.coordinator.num_rollbacks == 0 and harness.coordinator.num_aborts == 10
    assert "No space left on device" in harness.coordinator.abort_reason


def test_files_of_an_aborted_commit_are_deleted_once_all_writers_are_done() -> None:
    harness = CoordinatorHarness().cutting()
    harness.to(State.WRITING)
    harness.coordinator.take_effects()
    (write,) = [one for one in harness.coordinator.commands(SHARD_0) if one["kind"] == "write"]
    harness.beat(SHARD_0, ({"id": write["id"], "ok": False, "error": "no space left", "away": True},))
    assert harness.coordinator.state is State.ABORTING and harness.coordinator.take_effects() == []
    harness.to(State.RUNNING)
    (discard,) = harness.coordinator.take_effects()
    assert isinstance(discard, Discard) and set(discard.names) == {
        "dense/00000001-1.safetensors",
        "workers/00000001-1-0.safetensors",
        "workers/00000001-1-0-ids.safetensors",
        "segments/0-1-1",
        "segments/1-1-1",
    }


def test_files_of_a_commit_are_kept_if_its_manifest_may_still_appear() -> None:
    harness = CoordinatorHarness().cutting()
    harness.to(State.LINKING)
    harness.coordinator.take_effects()
    harness.coordinator.linked("away: no answer", harness.now_s)
    assert harness.coordinator.state is State.ABORTING
    harness.to(State.RUNNING)
    assert harness.coordinator.take_effects() == []


def test_aborts_for_an_absent_store_are_logged_once_a_minute_and_so_is_their_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    harness = CoordinatorHarness().running()
    for _ in range(50):
        refuse_a_commit(harness, error="the store is away", away=True)
        harness.to(State.RUNNING)
        harness.now_s += 2
    aborted = [line for line in caplog.messages if "aborted" in line]
    assert len(aborted) == 2 and " more like it" in aborted[-1], aborted
    caplog.clear()
    harness.coordinator.want_commit()
    harness.round_without_answers()
    harness.to(State.LINKING)
    harness.link()
    (line,) = (line for line in caplog.messages if "aborted" in line)
    assert "50 were aborted" in line
    harness.to(State.RUNNING)
    harness.coordinator.last = None  # as if the worker had trained since the commit
    refuse_a_commit(harness, error="the store is away", away=True)
    assert "is aborted: shard 0 refused" in caplog.messages[-1], "a new outage must be logged at once"


def test_a_shard_that_is_no_longer_ready_starts_a_new_incarnation() -> None:
    harness = CoordinatorHarness().running()
    harness.reports[SHARD_0] = {"ready": True}
    harness.beat(SHARD_0)
    assert harness.coordinator.state is State.RUNNING
    harness.reports[SHARD_0] = {"ready": False}
    harness.beat(SHARD_0)
    assert harness.coordinator.state is State.CLAIMING and "ready" in harness.coordinator.reason


def test_a_refused_restore_is_retried_after_a_pause() -> None:
    harness = in_state(State.RESTORING)
    (restore,) = harness.coordinator.commands(WORKER)
    harness.beat(WORKER, ({"id": restore["id"], "ok": False, "error": "Kafka is away"},))
    harness.answer(SHARD_0)
    harness.answer(SHARD_1)
    harness.claim(2)
    harness.round_without_answers()
    assert harness.coordinator.state is State.GATHERING
    harness.now_s += 1
    harness.round_without_answers()
    assert harness.coordinator.state is State.RESTORING


def test_refused_restores_are_repeated_ever_later_until_a_member_restarts() -> None:
    harness, pauses_s = in_state(State.RESTORING), []

    def refuse(next_incarnation: int) -> None:
        (restore,) = harness.coordinator.commands(SHARD_0)
        harness.answer(SHARD_1)
        harness.beat(SHARD_0, ({"id": restore["id"], "ok": False, "error": "another schema"},))
        harness.claim(next_incarnation)

    for incarnation in range(2, 9):
        refuse(incarnation)
        since_s = harness.now_s
        while harness.coordinator.state is not State.RESTORING:
            harness.now_s += 0.5
            harness.round_without_answers()
        pauses_s.append(harness.now_s - since_s)
    assert pauses_s == [1, 2, 4, 8, 15, 15, 15]
    refuse(9)
    harness.now_s += 4  # without a beat: the process has ended
    harness.sessions[SHARD_0] += 1
    harness.round_without_answers()
    assert harness.coordinator.state is State.RESTORING


def test_a_member_of_a_later_incarnation_fences_this_controller() -> None:
    harness = CoordinatorHarness().running()
    harness.incarnations[SHARD_0] = 9
    harness.beat(SHARD_0)
    assert (
        harness.coordinator.state is State.FENCED
        and "shard 0 is at incarnation 9" in harness.coordinator.reason
    )
    harness.now_s += 60
    harness.coordinator.tick(harness.now_s)
    assert harness.coordinator.state is State.FENCED and harness.coordinator.take_effects() == []


def test_a_foreign_member_is_rejected() -> None:
    harness = CoordinatorHarness()
    with pytest.raises(ConfigError, match=r"expected shards 0\.\.1 and workers 0\.\.3, got shard 2"):
        harness.coordinator.beat(Key("shard", 2), 1, 0, (), {}, 0.0)


def test_a_second_process_of_a_member_is_refused_until_the_first_is_silent() -> None:
    harness = CoordinatorHarness().running()

    def beat(session: int, process: str) -> str:
        return harness.coordinator.beat(
            WORKER, session, harness.incarnations[WORKER], (), {}, harness.now_s, process
        )

    assert beat(1, "pid 1 on a") == ""
    for _ in range(20):
        harness.now_s += 0.5
        harness.round_without_answers()
        refused = beat(2, "pid 2 on b")
        assert refused.startswith("two processes run as worker 0") and "pid 2 on b" in refused
    assert harness.coordinator.state is State.RUNNING and harness.coordinator.incarnation == 1
    assert harness.coordinator.membership.rivals(harness.now_s) == [refused]
    for _ in range(2):
        harness.now_s += 1.5
        for key in (SHARD_0, SHARD_1):
            harness.beat(key)
    assert beat(2, "pid 2 on b") == "" and harness.coordinator.state is State.CLAIMING
    assert beat(1, "pid 1 on a"), (
        "the first process was silent for too long, and another process has replaced it"
    )


def test_a_member_that_leaves_is_replaced_at_once() -> None:
    harness = CoordinatorHarness().running()
    harness.reports[WORKER] = {"leaving": True}
    harness.beat(WORKER)
    harness.sessions[WORKER], harness.reports[WORKER] = 2, {}
    harness.beat(WORKER)
    assert harness.coordinator.members[WORKER].session == 2


def test_a_command_whose_progress_is_reported_is_never_late() -> None:
    harness = in_state(State.RESTORING)
    for key in (SHARD_1, WORKER):
        harness.answer(key)
    for second in range(2000):
        harness.now_s += 1
        harness.reports[SHARD_0] = {"progress": second // 100}
        harness.round_without_answers()
        assert harness.coordinator.state is State.RESTORING
    for _ in range(600):
        harness.now_s += 1
        harness.round_without_answers()
    assert (
        harness.coordinator.state is State.CLAIMING and "shard 0 did not answer" in harness.coordinator.reason
    )


def test_a_refused_restore_does_not_end_the_restore_of_a_large_shard() -> None:
    harness = in_state(State.RESTORING)
    for second in range(120):
        harness.now_s += 1
        harness.reports[SHARD_0] = {"progress": second}
        harness.round_without_answers()
        if second == 10:
            harness.answer(SHARD_1, ok=False, away=True, error="expected the controller's schema")
            harness.answer(WORKER)
        assert harness.coordinator.state is State.RESTORING and harness.coordinator.incarnation == 1
    harness.answer(SHARD_0)
    assert (
        harness.coordinator.state is State.CLAIMING
        and "shard 1 refused restore" in harness.coordinator.reason
    )


def test_a_restore_that_is_refused_at_once_waits_for_the_first_progress_of_a_large_shard() -> None:
    harness = in_state(State.RESTORING)
    harness.answer(SHARD_1, ok=False, away=True, error="expected the controller's schema")
    harness.answer(WORKER)
    for second in range(60):
        assert harness.coordinator.state is State.RESTORING and harness.coordinator.incarnation == 1
        harness.now_s += 1
        harness.reports[SHARD_0] = {"progress": second // 5}
        harness.round_without_answers()
    for _ in range(20):  # shard 0 makes no progress
        harness.now_s += 1
        harness.round_without_answers()
    assert (
        harness.coordinator.state is State.CLAIMING
        and "shard 1 refused restore" in harness.coordinator.reason
    )


def test_the_controller_tells_shards_how_many_commits_it_keeps() -> None:
    stack = CoordinatorHarness(dataclasses.replace(CONFIG, keep_commits=50))
    stack.claim(1)
    stack.round_without_answers()
    (restore,) = stack.coordinator.commands(SHARD_0)
    assert (restore["kind"], restore["keep_commits"]) == ("restore", 50)
