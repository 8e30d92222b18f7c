"""The controller's decisions, event by event."""

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
from trainer.control.types import Claim, CoordinatorConfig, Key, Link, Retire, State

FACTS = CoordinatorConfig(
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


class Group:
    """A coordinator, members that answer what they are asked, and a clock."""

    def __init__(self, facts: CoordinatorConfig = FACTS) -> None:
        self.now_s = 0.0
        self.it = Coordinator(facts, log_rate_limit=LogRateLimit(lambda: self.now_s))
        self.sessions = dict.fromkeys(EVERYONE, 1)
        self.incarnations = dict.fromkeys(EVERYONE, 0)
        self.reports: dict[Key, dict[str, Any]] = {key: {} for key in EVERYONE}
        self.asked: list[tuple[Key, str]] = []

    def claim(self, incarnation: int, last: Restorable | None = None, next_seq: int = 1) -> None:
        (claim,) = self.it.take_effects()
        assert isinstance(claim, Claim)
        self.it.claimed(incarnation, last, next_seq, self.now_s)

    def beat(self, key: Key, results: tuple[dict[str, Any], ...] = ()) -> None:
        self.it.beat(key, self.sessions[key], self.incarnations[key], results, self.reports[key], self.now_s)

    def answer(self, key: Key, **override: Any) -> None:
        """Answer everything asked of `key`."""
        for command in self.it.commands(key):
            self.asked.append((key, command["kind"]))
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
            if self.it.state is state:
                return
            for key in EVERYONE:
                self.answer(key)
                if self.it.state is state:
                    return
        raise AssertionError(f"{self.it.state}, not {state}")

    def running(self) -> Group:
        self.claim(self.it.incarnation + 1, self.it.last, self.it.seq + 1)
        self.round()
        self.to(State.RUNNING)
        self.round()
        return self

    def cutting(self) -> Group:
        self.running()
        self.reports[WORKER] = {"step": 3}
        for _ in range(10):
            self.now_s += 1
            self.round_without_answers()
        assert self.it.state is State.CUTTING
        return self

    def round_without_answers(self) -> None:
        for key in EVERYONE:
            self.beat(key)

    def link(self, outcome: str = "linked") -> Manifest:
        (link,) = self.it.take_effects()
        assert isinstance(link, Link)
        self.it.linked(outcome, self.now_s)
        return link.manifest

    def committed(self) -> Group:
        self.cutting().to(State.LINKING)
        self.link()
        self.to(State.RUNNING)
        self.it.take_effects()
        return self


def test_a_commit_keeps_the_restored_bucket_map() -> None:
    group = Group().committed()
    assert group.it.last and group.it.last.manifest.bucket_map is None
    turned = BucketMap(1 - BucketMap.modulo(64, 2).owner_B, 2, 5)
    moved = dataclasses.replace(group.it.last.manifest, bucket_map=turned)
    group.it.last = Restorable(moved, moved.checksum)
    group.reports[WORKER] = {"step": 9}
    for _ in range(11):
        group.now_s += 1
        group.round_without_answers()
    group.to(State.LINKING)
    manifest = group.link()
    assert manifest.owners == turned and manifest.previous == {"seq": 1, "checksum": moved.checksum}


def test_the_duration_of_each_commit_phase_is_reported() -> None:
    group = Group().cutting()
    for seconds, state in ((0.125, State.FREEZING), (0.25, State.WRITING), (0.5, State.LINKING)):
        group.now_s += seconds
        group.to(state)
    assert group.it.phases_s == {}, "none was yet"
    group.now_s += 1
    group.link()
    assert group.it.phases_s == {"cut": 0.125, "freeze": 0.25, "write": 0.5, "link": 1}
    assert (group.it.paused_s, group.it.commit_s) == (0.375, 1.875)


def test_a_commit_sends_its_commands_in_the_documented_order() -> None:
    group = Group().cutting()
    group.asked.clear()
    group.to(State.LINKING)
    manifest = group.link()
    assert " ".join(kind for _, kind in group.asked) == "cut freeze freeze resume write write write"
    assert (manifest.seq, manifest.incarnation, manifest.step, manifest.watermark_ms) == (1, 1, 3, 77)
    assert manifest.offsets == {("samples", 0): 5, ("samples", 1): 6} and manifest.rows_end == {0: 10, 1: 11}
    assert manifest.shards == {i: {"segments": [{"name": "s"}]} for i in (0, 1)}
    assert manifest.workers[0].dedupe == 4 and manifest.dense.name == "dense/00000001-1.safetensors"
    assert manifest.previous == {"seq": 0, "checksum": ""}
    assert group.it.state is State.COMMITTING and group.it.seq == 1
    assert group.it.take_effects() == [Retire()]
    group.to(State.RUNNING)
    assert [kind for _, kind in group.asked[-3:]] == ["commit"] * 3


def test_an_idle_loop_writes_nothing() -> None:
    group = Group().committed()
    for _ in range(30):
        group.now_s += 1
        group.round()
    assert group.it.state is State.RUNNING and group.it.num_commits == 1


def in_state(state: State) -> Group:
    group = Group()
    if state is State.RESTORING:
        group.claim(1)
        group.round_without_answers()
    elif state is State.RUNNING:
        group.running()
    elif state is State.COMMITTING:
        group.cutting().to(State.LINKING)
        group.link()
    elif state is State.ABORTING:
        group.cutting().to(State.LINKING)
        group.link("exists")
    else:
        group.cutting().to(state)
    assert group.it.state is state
    return group


def test_a_broken_worker_begins_a_new_incarnation_once() -> None:
    group = Group().running()
    group.reports[WORKER] = {"broken": "shard 0 is away"}
    group.beat(WORKER)
    assert group.it.state is State.CLAIMING
    group.claim(2)
    group.beat(WORKER)
    assert group.it.state is State.RESTORING, "what it says of the incarnation before changes nothing"


LIMITS_S = {State.RESTORING: 600, State.COMMITTING: 60, State.ABORTING: 60, State.RUNNING: 60}


@pytest.mark.parametrize("state", LIMITS_S)
def test_every_state_ends_if_a_member_beats_but_hangs(state: State) -> None:
    group = in_state(State.RESTORING if state is State.RUNNING else state)
    if state is State.RUNNING:  # START hangs
        for key in EVERYONE:
            for command in group.it.commands(key):
                group.incarnations[key] = 1
                group.beat(key, ({"id": command["id"], "ok": True},))
    assert group.it.state is state and group.it.commands(WORKER)
    group.it.take_effects()
    for second in range(LIMITS_S[state]):
        assert group.it.state is state, second
        group.now_s += 1
        group.round_without_answers()
    assert group.it.state is State.CLAIMING and " s in state " in group.it.reason
    assert "worker 0" in group.it.reason


def test_the_time_limit_of_a_restore_doubles_at_each_retry() -> None:
    group = Group()
    for tries, limit_s in enumerate((600, 1200, 2400), 1):
        group.claim(tries)
        group.now_s += 1
        group.round_without_answers()
        assert group.it.state is State.RESTORING
        for _ in range(limit_s - 1):
            group.now_s += 1
            group.round_without_answers()
        assert group.it.state is State.RESTORING
        group.now_s += 1
        group.round_without_answers()
        assert group.it.state is State.CLAIMING


def refuse_a_commit(group: Group, **refusal: Any) -> None:
    """The next commit gets as far as FREEZE, which shard 0 refuses."""
    group.it.want_commit()
    group.reports[WORKER] = {"step": 3}
    group.round_without_answers()
    group.answer(WORKER)
    (freeze,) = group.it.commands(SHARD_0)
    group.beat(SHARD_0, ({"id": freeze["id"], "ok": False, **refusal},))


def test_three_aborts_in_a_row_begin_a_new_incarnation() -> None:
    group = Group().running()
    for _ in range(2):
        refuse_a_commit(group, error="expected commit 7 to be aborted")
        assert group.it.state is State.ABORTING
        group.to(State.RUNNING)
    refuse_a_commit(group, error="expected commit 7 to be aborted")
    assert group.it.state is State.CLAIMING and "3 commits in a row" in group.it.reason
    assert "expected commit 7 to be aborted" in group.it.reason
    group.running()
    for _ in range(2):
        refuse_a_commit(group, error="again")
        assert group.it.state is State.ABORTING, "they are counted anew"
        group.to(State.RUNNING)


def test_a_commit_resets_the_count_of_aborts() -> None:
    group = Group().running()
    for _ in range(5):
        refuse_a_commit(group, error="no")
        group.to(State.RUNNING)
        group.reports[WORKER] = {"step": group.reports[WORKER]["step"] + 1}
        group.it.want_commit()
        group.round_without_answers()
        group.to(State.LINKING)
        group.link()
        group.to(State.RUNNING)
        group.it.take_effects()
        group.it.last = None
        assert group.it.abort_reason == ""
    assert group.it.num_rollbacks == 0 and group.it.num_aborts == 5


def test_aborts_for_a_full_disk_cause_no_rollback() -> None:
    group = Group().running()
    for _ in range(10):
        refuse_a_commit(group, error="No space left on device", away=True)
        assert group.it.state is State.ABORTING
        group.to(State.RUNNING)
    assert group.it.num_rollbacks == 0 and group.it.num_aborts == 10
    assert "No space left on device" in group.it.abort_reason


def test_aborts_for_an_absent_store_are_logged_once_a_minute_and_so_is_their_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    group = Group().running()
    for _ in range(50):
        refuse_a_commit(group, error="the store is away", away=True)
        group.to(State.RUNNING)
        group.now_s += 2
    aborted = [line for line in caplog.messages if "aborted" in line]
    assert len(aborted) == 2 and " more like it" in aborted[-1], aborted
    caplog.clear()
    group.it.want_commit()
    group.round_without_answers()
    group.to(State.LINKING)
    group.link()
    (line,) = (line for line in caplog.messages if "aborted" in line)
    assert "50 were aborted" in line
    group.to(State.RUNNING)
    group.it.last = None  # the worker has trained since
    refuse_a_commit(group, error="the store is away", away=True)
    assert "is aborted: shard 0 refused" in caplog.messages[-1], "another outage is logged at once"


def test_a_shard_that_is_no_longer_ready_begins_a_new_incarnation() -> None:
    group = Group().running()
    group.reports[SHARD_0] = {"ready": True}
    group.beat(SHARD_0)
    assert group.it.state is State.RUNNING
    group.reports[SHARD_0] = {"ready": False}
    group.beat(SHARD_0)
    assert group.it.state is State.CLAIMING and "ready" in group.it.reason


def test_a_refused_restore_is_retried_after_a_pause() -> None:
    group = in_state(State.RESTORING)
    (restore,) = group.it.commands(WORKER)
    group.beat(WORKER, ({"id": restore["id"], "ok": False, "error": "Kafka is away"},))
    group.answer(SHARD_0)
    group.answer(SHARD_1)
    group.claim(2)
    group.round_without_answers()
    assert group.it.state is State.GATHERING
    group.now_s += 1
    group.round_without_answers()
    assert group.it.state is State.RESTORING


def test_a_member_of_a_later_incarnation_fences_this_controller() -> None:
    group = Group().running()
    group.incarnations[SHARD_0] = 9
    group.beat(SHARD_0)
    assert group.it.state is State.FENCED and "shard 0 is at incarnation 9" in group.it.reason
    group.now_s += 60
    group.it.tick(group.now_s)
    assert group.it.state is State.FENCED and group.it.take_effects() == []


def test_a_foreign_member_is_rejected() -> None:
    group = Group()
    with pytest.raises(ConfigError, match=r"expected shards 0\.\.1 and workers 0\.\.3, got shard 2"):
        group.it.beat(Key("shard", 2), 1, 0, (), {}, 0.0)


def test_a_second_process_of_a_member_is_refused_until_the_first_is_silent() -> None:
    group = Group().running()

    def beat(session: int, process: str) -> str:
        return group.it.beat(WORKER, session, group.incarnations[WORKER], (), {}, group.now_s, process)

    assert beat(1, "pid 1 on a") == ""
    for _ in range(20):
        group.now_s += 0.5
        group.round_without_answers()
        refused = beat(2, "pid 2 on b")
        assert refused.startswith("two processes run as worker 0") and "pid 2 on b" in refused
    assert group.it.state is State.RUNNING and group.it.incarnation == 1
    assert group.it.membership.rivals(group.now_s) == [refused]
    for _ in range(2):
        group.now_s += 1.5
        for key in (SHARD_0, SHARD_1):
            group.beat(key)
    assert beat(2, "pid 2 on b") == "" and group.it.state is State.CLAIMING
    assert beat(1, "pid 1 on a"), "it was paused, and another process has its place now"


def test_a_member_that_leaves_is_replaced_at_once() -> None:
    group = Group().running()
    group.reports[WORKER] = {"leaving": True}
    group.beat(WORKER)
    group.sessions[WORKER], group.reports[WORKER] = 2, {}
    group.beat(WORKER)
    assert group.it.members[WORKER].session == 2


def test_a_command_whose_progress_is_reported_is_never_late() -> None:
    group = in_state(State.RESTORING)
    for key in (SHARD_1, WORKER):
        group.answer(key)
    for second in range(2000):
        group.now_s += 1
        group.reports[SHARD_0] = {"progress": second // 100}
        group.round_without_answers()
        assert group.it.state is State.RESTORING
    for _ in range(600):
        group.now_s += 1
        group.round_without_answers()
    assert group.it.state is State.CLAIMING and "shard 0 did not answer" in group.it.reason


def test_a_refused_restore_does_not_end_the_restore_of_a_large_shard() -> None:
    group = in_state(State.RESTORING)
    for second in range(120):
        group.now_s += 1
        group.reports[SHARD_0] = {"progress": second}
        group.round_without_answers()
        if second == 10:
            group.answer(SHARD_1, ok=False, away=True, error="expected the controller's schema")
            group.answer(WORKER)
        assert group.it.state is State.RESTORING and group.it.incarnation == 1
    group.answer(SHARD_0)
    assert group.it.state is State.CLAIMING and "shard 1 refused restore" in group.it.reason


def test_a_restore_that_is_refused_at_once_waits_for_the_first_progress_of_a_large_shard() -> None:
    group = in_state(State.RESTORING)
    group.answer(SHARD_1, ok=False, away=True, error="expected the controller's schema")
    group.answer(WORKER)
    for second in range(60):
        assert group.it.state is State.RESTORING and group.it.incarnation == 1
        group.now_s += 1
        group.reports[SHARD_0] = {"progress": second // 5}
        group.round_without_answers()
    for _ in range(20):  # it hangs
        group.now_s += 1
        group.round_without_answers()
    assert group.it.state is State.CLAIMING and "shard 1 refused restore" in group.it.reason
