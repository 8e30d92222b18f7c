"""The controller's calls: held beats, status, commit on demand, and files that can't be written."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from roostream.errors import CheckpointError, ConfigError, FencedError, RoostreamError, UnavailableError
from roostream.runtime import manifest as manifests
from roostream.runtime.clock import FakeClock
from roostream.runtime.manifest import Manifest
from roostream.runtime.retention import Retention
from roostream.runtime.store_identity import IDENTITY_NAME
from tests.trainer.control.test_coordinator import ANSWERS, FACTS
from tests.trainer.memory_store import MemoryStore
from trainer.control.controller import Controller
from trainer.control.coordinator import Coordinator
from trainer.control.types import State

EVERYONE = (("shard", 0), ("shard", 1), ("worker", 0))


class Stage:
    def __init__(self, store: MemoryStore | None = None, long_poll_s: float = 0.0) -> None:
        self.store, self.clock = store or MemoryStore(), FakeClock()
        self.checked: list[str] = []
        check = lambda manifest: self.checked.append(manifest.name)
        self.it = Controller(Coordinator(FACTS), self.store, self.clock, check=check, long_poll_s=long_poll_s)
        self.incarnation = 0
        self.step = 0

    def beat(
        self, role: str, index: int, results: list[dict[str, Any]] | None = None
    ) -> list[dict[str, Any]]:
        header = {"role": role, "index": index, "session": 1, "incarnation": self.incarnation}
        answer, _ = self.it.handle(
            "beat", {**header, "results": results or [], "report": {"step": self.step}}, ()
        )
        return answer["commands"]

    def turn(self) -> None:
        """Everyone beats, answers, beats; the controller acts."""
        self.it.turn()
        for role, index in EVERYONE:
            commands = self.beat(role, index)
            answers = [{"id": c["id"], "ok": True, **ANSWERS.get((role, c["kind"]), {})} for c in commands]
            self.incarnation = max([self.incarnation, *(c["incarnation"] for c in commands)])
            self.beat(role, index, answers)
        self.it.turn()

    def to(self, state: State) -> Stage:
        for _ in range(20):
            if self.it.coordinator.state is state:
                return self
            self.turn()
        raise AssertionError(self.it.status())


def test_a_commit_on_demand_is_waited_for() -> None:
    stage = Stage().to(State.RUNNING)
    stage.step = 3
    stage.turn()
    answers: list[dict[str, Any]] = []
    caller = threading.Thread(
        target=lambda: answers.append(dict(stage.it.handle("commit", {"timeout_s": 20}, ())[0]))
    )
    caller.start()
    while caller.is_alive():
        stage.turn()
        caller.join(0.01)
    assert answers == [{"seq": 1, "committed": True}]
    assert manifests.load(stage.store, "manifests/00000001").manifest.step == 3
    assert stage.it.handle("commit", {}, ())[0] == {"seq": 1, "committed": True}, (
        "nothing new: nothing to wait for"
    )


def test_a_store_that_is_away_is_reported_as_away_until_it_answers() -> None:
    stage = Stage().to(State.RUNNING)
    stage.clock.advance(2)
    for _ in range(3):
        stage.store.fail_next("list")
    reported = []
    for _ in range(4):
        stage.it.turn()
        reported.append(bool(stage.it.status()["away"]))
    assert reported == [True, True, True, False]


def test_a_commit_on_demand_does_not_succeed_during_an_outage_or_restore() -> None:
    stage = Stage()
    stage.it.turn()
    assert stage.it.coordinator.state is State.GATHERING
    assert stage.it.handle("commit", {"timeout_s": 0.01}, ())[0] == {"seq": 0, "committed": False}
    stage.to(State.RESTORING)
    assert stage.it.handle("commit", {"timeout_s": 0.01}, ())[0] == {"seq": 0, "committed": False}
    stage.to(State.RUNNING)
    assert stage.it.handle("commit", {"timeout_s": 0.01}, ())[0] == {"seq": 0, "committed": True}, (
        "there is nothing to commit"
    )


def test_a_commit_on_demand_ignores_a_commit_already_in_progress() -> None:
    stage = Stage().to(State.RUNNING)
    stage.step = 3
    stage.turn()
    stage.it.handle("commit", {"timeout_s": 0}, ())
    stage.beat("worker", 0)
    assert stage.it.coordinator.state is State.CUTTING
    stage.step = 9
    answers: list[dict[str, Any]] = []
    caller = threading.Thread(
        target=lambda: answers.append(dict(stage.it.handle("commit", {"timeout_s": 20}, ())[0]))
    )
    caller.start()
    stage.to(State.COMMITTING)
    assert stage.it.status()["seq"] == 1 and answers == []
    while caller.is_alive():
        stage.turn()
        caller.join(0.01)
    assert answers == [{"seq": 2, "committed": True}]


def test_a_waiting_beat_returns_as_soon_as_there_is_a_command() -> None:
    stage = Stage(long_poll_s=30.0)
    stage.it.turn()
    got: list[list[dict[str, Any]]] = []
    threads = [threading.Thread(target=lambda key=key: got.append(stage.beat(*key))) for key in EVERYONE]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert [[c["kind"] for c in commands] for commands in got] == [["restore"]] * 3


def test_status_reports_the_state_and_the_last_commit() -> None:
    stage = Stage().to(State.RUNNING)
    stage.clock.advance(2)
    status = stage.it.status()
    assert (status["state"], status["incarnation"], status["seq"]) == ("running", 1, 0)
    assert set(status["members"]) == {"shard 0", "shard 1", "worker 0"}
    assert status["reports"]["worker 0"] == {"step": 0} and status["manifest"] == ""
    assert status["commit_age_ms"] == pytest.approx(2000)
    assert status["committed_at_ms"] == stage.clock.now_ms() - 2000


def test_an_unknown_call_is_refused() -> None:
    with pytest.raises(RoostreamError, match="got 'dance'"):
        Stage().it.handle("dance", {}, ())


def committed_once() -> Stage:
    stage = Stage().to(State.RUNNING)
    stage.step = 3
    stage.it.handle("commit", {"timeout_s": 0}, ())
    return stage.to(State.COMMITTING)


def test_a_restarted_controller_checks_the_manifest_before_any_command() -> None:
    first = committed_once()
    second = Stage(first.store)
    second.it.turn()
    assert set(second.checked) == {"manifests/00000001"} and second.it.status()["incarnation"] == 2
    with pytest.raises(FencedError, match="this controller stops"):
        first.clock.advance(2)
        first.it.turn()


def test_g5_a_store_with_only_damaged_manifests_stops_the_controller() -> None:
    stage = Stage()
    stage.store.create("manifests/00000001", b"{}")
    with pytest.raises(CheckpointError, match="expected a usable manifest among 1"):
        stage.it.turn()


@pytest.mark.parametrize("method", ["create", "list", "get"])
def test_an_unavailable_store_is_waited_for_and_skips_no_manifest(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    stage = Stage(committed_once().store)
    for _ in range(5):
        stage.store.fail_next(method)
    for _ in range(5):
        stage.it.turn()
        assert stage.it.coordinator.state is State.CLAIMING
    assert (
        "waiting for the checkpoint store: the store can't be written (No space left on device) (retrying)"
        in caplog.text
    )
    assert "reset" not in caplog.text and "damaged" not in caplog.text
    stage.it.turn()
    assert stage.it.coordinator.state is State.GATHERING and stage.it.coordinator.last is not None
    assert stage.it.coordinator.last.name == "manifests/00000001"


def test_an_empty_store_in_place_of_the_known_one_is_not_used(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stage = committed_once()
    there, stage.store.objects = stage.store.objects, {}
    stage.clock.advance(4)
    for _ in range(5):
        stage.it.turn()
    assert stage.it.coordinator.state is State.CLAIMING and stage.store.objects == {}
    assert "checkpoint init" in caplog.text
    stage.store.objects |= {IDENTITY_NAME: there[IDENTITY_NAME]}
    stage.it.turn()
    assert "an older copy of the store" in stage.it.status()["away"]
    assert list(stage.store.objects) == [IDENTITY_NAME]
    stage.store.objects = there
    stage.it.turn()
    assert stage.it.coordinator.last is not None and stage.it.coordinator.last.name == "manifests/00000001"


def test_waiting_for_the_store_ends_with_stop() -> None:
    stage, stop = Stage(), threading.Event()
    stage.store.fail_next("create")
    stop.set()
    with pytest.raises(UnavailableError, match="stopped while waiting for the checkpoint store"):
        stage.it.turn(stop)


def test_the_outcome_of_a_link_is_reported_only_once_it_is_readable() -> None:
    stage = Stage().to(State.RUNNING)
    stage.step = 3
    stage.it.handle("commit", {"timeout_s": 0}, ())
    stage.store.fail_next("create", "after")
    for _ in range(3):
        stage.store.fail_next("get")
    for _ in range(10):
        if stage.it.coordinator.state is State.LINKING:
            break
        stage.turn()
    stage.it.turn()
    assert stage.it.coordinator.state is State.LINKING
    stage.to(State.RUNNING)
    assert stage.it.status()["seq"] == 1 and stage.it.status()["aborts"] == 0


def test_the_configured_number_of_manifests_is_kept() -> None:
    stage = Stage()
    stage.it.cleaner.retention = Retention(2)
    for seq in range(1, 5):
        stage.step = 3 + seq
        stage.to(State.RUNNING)
        stage.it.coordinator.want_commit()
        while stage.it.status()["seq"] < seq:
            stage.turn()
    stage.turn()
    assert manifests.numbers(stage.store) == [3, 4]


def other_identity() -> bytes:
    return json.dumps({"store": "1" * 32}).encode()


def test_a_store_that_was_never_created_is_waited_for_and_stays_empty() -> None:
    store = MemoryStore()
    identity = store.objects.pop(IDENTITY_NAME)
    stage = Stage(store)
    for _ in range(3):
        stage.it.turn()
    assert "checkpoint init" in stage.it.status()["away"] and not store.objects
    store.objects[IDENTITY_NAME] = identity
    stage.to(State.RUNNING)


def test_nothing_is_claimed_in_another_store_than_before() -> None:
    stage = Stage().to(State.RUNNING)
    first, stage.store.objects = stage.store.objects, {IDENTITY_NAME: other_identity()}
    stage.clock.advance(100)  # every member is lost, so the controller claims again
    for _ in range(3):
        stage.it.turn()
    away = stage.it.status()["away"]
    assert "0" * 32 in away and "1" * 32 in away
    assert list(stage.store.objects) == [IDENTITY_NAME]
    stage.store.objects = first
    stage.to(State.RUNNING)


def test_a_controller_of_another_deployment_does_not_claim() -> None:
    """A claim would fence the controller that commits in this store."""
    first = committed_once()

    def refuse(manifest: Manifest) -> None:
        raise ConfigError(f"{manifest.name} belongs to another deployment")

    other = Controller(Coordinator(FACTS), first.store, first.clock, check=refuse)
    with pytest.raises(ConfigError):
        other.turn()
    assert manifests.newest_incarnation(first.store) == first.it.coordinator.incarnation


def test_members_are_restored_from_the_controller_s_store() -> None:
    stage = Stage()
    stage.it.turn()
    for role, index in EVERYONE:
        stage.beat(role, index)
    stage.it.turn()
    for role, index in EVERYONE:
        (command,) = stage.beat(role, index)
        assert command["kind"] == "restore" and command["store"] == "0" * 32
