"""The controller's calls (long-polled heartbeats, status, commit on demand), and a store that is
unavailable."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest

from roostream.errors import CheckpointError, ConfigError, FencedError, RoostreamError, UnavailableError
from roostream.runtime import manifest as manifests
from roostream.runtime.health import Health
from roostream.runtime.manifest import Manifest
from roostream.runtime.retention import Retention
from roostream.runtime.store_identity import IDENTITY_NAME
from tests.runtime.manifest_cases import a_manifest
from tests.trainer.control.test_coordinator import ANSWERS, CONFIG
from tests.trainer.control.test_scaling import FakeFleet
from tests.trainer.memory_store import MemoryStore
from trainer.control.controller import Controller
from trainer.control.coordinator import Coordinator
from trainer.control.types import Key, State


def test_a_commit_on_demand_is_waited_for() -> None:
    fleet = FakeFleet().to(State.RUNNING)
    fleet.step = 3
    fleet.turn()
    assert fleet.call("commit", timeout_s=20) == {"seq": 1, "committed": True}
    assert manifests.load(fleet.store, "manifests/00000001").manifest.step == 3
    assert fleet.controller.handle("commit", {}, ())[0] == {"seq": 1, "committed": True}, (
        "without new steps the call must return at once"
    )


def test_a_store_that_is_away_is_reported_as_away_until_it_answers() -> None:
    fleet = FakeFleet().to(State.RUNNING)
    fleet.clock.advance(2)
    for _ in range(3):
        fleet.store.fail_next("list")
    reported = []
    for _ in range(4):
        fleet.controller.turn()
        reported.append(bool(fleet.controller.status()["away"]))
    assert reported == [True, True, True, False]


class SlowFleet(FakeFleet):
    """A fleet whose store has 40 old commits; the next turn of the controller deletes most of them. Each read
    and each deletion takes 10 s, and calls `on_call`."""

    def __init__(self) -> None:
        store = MemoryStore()
        for seq in range(1, 41):
            manifest = a_manifest(seq)
            store.create(manifest.name, manifest.encode())
        super().__init__(store=store)
        self.to(State.RUNNING).step = 1 << 40
        self.controller.coordinator.want_commit()
        while not self.controller.coordinator.num_commits:
            self.turn()
        assert self.controller.coordinator.has_effects, "the deletion must be next"
        self.on_call: Callable[[], object] = lambda: None
        self.call_s = 10.0
        get, delete = store.get, store.delete
        store.get = lambda name: self._slow(get, name)  # type: ignore[method-assign]
        store.delete = lambda name: self._slow(delete, name)  # type: ignore[method-assign]

    def _slow(self, method: Callable[[str], Any], name: str) -> Any:
        self.clock.advance(self.call_s)
        self.on_call()
        return method(name)


def test_a_controller_that_deletes_many_old_commits_stays_alive() -> None:
    """After days without the right to delete, reading and deleting them takes longer than `/livez` allows."""
    fleet, reasons = SlowFleet(), list[str]()
    health = Health(120.0, fleet.clock)
    health.turned()
    fleet.on_call = lambda: reasons.append(health.dead())
    fleet.controller.turn(on_progress=health.turned)
    assert len(reasons) > 60 and set(reasons) == {""}


def test_a_controller_that_was_paused_while_it_deleted_stops_once_another_one_has_taken_over() -> None:
    """Meanwhile a rollback may have made a commit the newest that this controller is about to delete."""
    fleet, left = SlowFleet(), list[int]()

    def take_over() -> None:
        left.append(len(fleet.store.list(manifests.MANIFESTS)))
        if len(left) == 45:
            manifests.claim_incarnation(fleet.store, 0)

    fleet.on_call = take_over
    with pytest.raises(FencedError):
        fleet.controller.turn()
    assert len(fleet.store.list(manifests.MANIFESTS)) == left[44] - 1 > 11


def test_the_deletion_of_many_old_commits_does_not_delay_the_next_effect() -> None:
    fleet, calls = SlowFleet(), list[int]()

    def restart_worker() -> None:
        calls.append(len(fleet.store.list(manifests.MANIFESTS)))
        if len(calls) == 45:
            fleet.sessions[Key("worker", 0)] = 2
            fleet.beat(Key("worker", 0))

    fleet.on_call = restart_worker
    fleet.controller.turn()
    assert fleet.controller.coordinator.state is State.CLAIMING and len(calls) == 45
    fleet.controller.turn()
    assert fleet.controller.coordinator.state is State.GATHERING
    fleet.on_call, fleet.call_s = lambda: None, 0.0
    fleet.to(State.RUNNING).step += 1
    fleet.turn()
    fleet.call("commit", timeout_s=20)
    fleet.turn()
    assert len(fleet.store.list(manifests.MANIFESTS)) == 10


def test_a_commit_on_demand_does_not_succeed_during_an_outage_or_restore() -> None:
    fleet = FakeFleet()
    fleet.controller.turn()
    assert fleet.controller.coordinator.state is State.GATHERING
    assert fleet.controller.handle("commit", {"timeout_s": 0.01}, ())[0] == {"seq": 0, "committed": False}
    fleet.to(State.RESTORING)
    assert fleet.controller.handle("commit", {"timeout_s": 0.01}, ())[0] == {"seq": 0, "committed": False}
    fleet.to(State.RUNNING)
    assert fleet.controller.handle("commit", {"timeout_s": 0.01}, ())[0] == {"seq": 0, "committed": True}, (
        "there is nothing to commit"
    )


def test_a_commit_on_demand_ignores_a_commit_already_in_progress() -> None:
    fleet = FakeFleet().to(State.RUNNING)
    fleet.step = 3
    fleet.turn()
    fleet.controller.handle("commit", {"timeout_s": 0}, ())
    fleet.beat(Key("worker", 0))
    assert fleet.controller.coordinator.state is State.CUTTING
    fleet.to(State.FREEZING).step = 9  # the worker has trained after the cut
    answers: list[dict[str, Any]] = []
    caller = threading.Thread(
        target=lambda: answers.append(dict(fleet.controller.handle("commit", {"timeout_s": 20}, ())[0]))
    )
    caller.start()
    fleet.to(State.COMMITTING)
    assert fleet.controller.status()["seq"] == 1 and answers == []
    while caller.is_alive():
        fleet.turn()
        caller.join(0.01)
    assert answers == [{"seq": 2, "committed": True}]


def test_a_waiting_beat_returns_as_soon_as_there_is_a_command() -> None:
    fleet = FakeFleet(long_poll_s=30.0)
    fleet.controller.turn()
    received: list[list[dict[str, Any]]] = []
    threads = [
        threading.Thread(target=lambda key=key: received.append(fleet.beat(key))) for key in fleet.members
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert [[c["kind"] for c in commands] for commands in received] == [["restore"]] * 3


def test_status_reports_the_state_and_the_last_commit() -> None:
    fleet = FakeFleet().to(State.RUNNING)
    fleet.clock.advance(2)
    status = fleet.controller.status()
    assert (status["state"], status["incarnation"], status["seq"]) == ("running", 1, 0)
    assert set(status["members"]) == {"shard 0", "shard 1", "worker 0"}
    assert status["reports"]["worker 0"]["step"] == 0 and status["manifest"] == ""
    assert status["commit_age_ms"] is None and status["committed_at_ms"] is None
    fleet = fleet_with_one_commit()
    fleet.clock.advance(2)
    status = fleet.controller.status()
    assert status["commit_age_ms"] == pytest.approx(2000)
    assert status["committed_at_ms"] == fleet.clock.now_ms() - 2000


def test_a_restarted_controller_reports_the_time_of_the_last_commit_not_of_its_start() -> None:
    second = FakeFleet(1, fleet_with_one_commit().store).to(State.RUNNING)
    status, committed_ms = second.controller.status(), ANSWERS["worker", "cut"]["time_ms"]
    assert status["committed_at_ms"] == committed_ms
    assert status["commit_age_ms"] == second.clock.now_ms() - committed_ms


def test_steps_wait_for_a_commit_since_the_first_of_them_also_across_a_restore() -> None:
    fleet = FakeFleet().to(State.RUNNING)
    for _ in range(100):
        fleet.turn(1)
    assert fleet.controller.status()["uncommitted_at_ms"] is None, "nothing was trained"
    fleet.refused_kind, fleet.step = "freeze", 3
    fleet.turn()
    trained_ms = fleet.clock.now_ms()
    for _ in range(100):
        fleet.turn(1)
    fleet.step = 0  # a restored worker begins again at the last commit
    fleet.turn(1)
    status = fleet.controller.status()
    assert status["rollbacks"] and not status["commits"]
    assert (status["uncommitted_at_ms"], status["uncommitted_ms"]) == (trained_ms, pytest.approx(101_000))
    fleet.refused_kind, fleet.step = "", 3
    while not fleet.controller.status()["commits"]:
        fleet.turn(1)
    fleet.turn(1)
    status = fleet.controller.status()
    assert status["uncommitted_at_ms"] is None and status["uncommitted_ms"] is None


def test_an_unknown_call_is_refused() -> None:
    with pytest.raises(RoostreamError, match="got 'dance'"):
        FakeFleet().controller.handle("dance", {}, ())


def fleet_with_one_commit() -> FakeFleet:
    fleet = FakeFleet().to(State.RUNNING)
    fleet.step = 3
    fleet.controller.handle("commit", {"timeout_s": 0}, ())
    return fleet.to(State.COMMITTING)


def test_a_restarted_controller_checks_the_manifest_before_any_command() -> None:
    first = fleet_with_one_commit()
    second = FakeFleet(1, first.store)
    second.controller.turn()
    assert set(second.checked) == {"manifests/00000001"} and second.controller.status()["incarnation"] == 2
    with pytest.raises(FencedError, match="this controller stops"):
        first.clock.advance(2)
        first.controller.turn()


def test_g5_a_store_with_only_damaged_manifests_stops_the_controller() -> None:
    fleet = FakeFleet()
    fleet.store.create("manifests/00000001", b"{}")
    with pytest.raises(CheckpointError, match="expected a usable manifest among 1"):
        fleet.controller.turn()


@pytest.mark.parametrize("method", ["create", "list", "get"])
def test_an_unavailable_store_is_waited_for_and_skips_no_manifest(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = FakeFleet(1, fleet_with_one_commit().store)
    for _ in range(5):
        fleet.store.fail_next(method)
    for _ in range(5):
        fleet.controller.turn()
        assert fleet.controller.coordinator.state is State.CLAIMING
    assert (
        "waiting for the checkpoint store: the store can't be written (No space left on device) (retrying)"
        in caplog.text
    )
    assert "reset" not in caplog.text and "damaged" not in caplog.text
    fleet.controller.turn()
    assert (
        fleet.controller.coordinator.state is State.GATHERING
        and fleet.controller.coordinator.last is not None
    )
    assert fleet.controller.coordinator.last.name == "manifests/00000001"


def test_a_controller_does_not_go_back_behind_a_commit_that_it_made(caplog: pytest.LogCaptureFixture) -> None:
    """The shards may not have been told of that commit, so they would start over."""
    fleet = fleet_with_one_commit()
    manifest = fleet.store.objects.pop("manifests/00000001")
    fleet.clock.advance(4)
    for _ in range(5):
        fleet.controller.turn()
    coordinator = fleet.controller.coordinator
    assert coordinator.state is State.CLAIMING
    assert "expected manifests/00000001" in fleet.controller.status()["away"]
    fleet.store.objects["manifests/00000001"] = manifest
    fleet.controller.turn()
    assert coordinator.state is not State.CLAIMING and coordinator.last is not None


def test_an_empty_store_in_place_of_the_known_one_is_not_used(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fleet = fleet_with_one_commit()
    mounted, fleet.store.objects = fleet.store.objects, {}
    fleet.clock.advance(4)
    for _ in range(5):
        fleet.controller.turn()
    assert fleet.controller.coordinator.state is State.CLAIMING and fleet.store.objects == {}
    assert "checkpoint init" in caplog.text
    fleet.store.objects |= {IDENTITY_NAME: mounted[IDENTITY_NAME]}
    fleet.controller.turn()
    assert "an older copy of the store" in fleet.controller.status()["away"]
    assert list(fleet.store.objects) == [IDENTITY_NAME]
    fleet.store.objects = mounted
    fleet.controller.turn()
    assert (
        fleet.controller.coordinator.last is not None
        and fleet.controller.coordinator.last.name == "manifests/00000001"
    )


def test_waiting_for_the_store_ends_with_stop() -> None:
    fleet, stop = FakeFleet(), threading.Event()
    fleet.store.fail_next("create")
    stop.set()
    with pytest.raises(UnavailableError, match="stopped while waiting for the checkpoint store"):
        fleet.controller.turn(stop)


def test_the_outcome_of_a_link_is_reported_only_once_it_is_readable() -> None:
    fleet = FakeFleet().to(State.RUNNING)
    fleet.step = 3
    fleet.controller.handle("commit", {"timeout_s": 0}, ())
    fleet.store.fail_next("create", "after")
    for _ in range(3):
        fleet.store.fail_next("get")
    for _ in range(10):
        if fleet.controller.coordinator.state is State.LINKING:
            break
        fleet.turn()
    fleet.controller.turn()
    assert fleet.controller.coordinator.state is State.LINKING
    fleet.to(State.RUNNING)
    assert fleet.controller.status()["seq"] == 1 and fleet.controller.status()["aborts"] == 0


def test_the_configured_number_of_manifests_is_kept() -> None:
    fleet = FakeFleet()
    fleet.controller.cleaner.retention = Retention(2)
    for seq in range(1, 5):
        fleet.step = 3 + seq
        fleet.to(State.RUNNING)
        fleet.controller.coordinator.want_commit()
        while fleet.controller.status()["seq"] < seq:
            fleet.turn()
    fleet.turn()
    assert manifests.numbers(fleet.store) == [3, 4]


def other_identity() -> bytes:
    return json.dumps({"store": "1" * 32}).encode()


def test_a_store_that_was_never_created_is_waited_for_and_stays_empty() -> None:
    store = MemoryStore()
    identity = store.objects.pop(IDENTITY_NAME)
    fleet = FakeFleet(1, store)
    for _ in range(3):
        fleet.controller.turn()
    assert "checkpoint init" in fleet.controller.status()["away"] and not store.objects
    store.objects[IDENTITY_NAME] = identity
    fleet.to(State.RUNNING)


def test_a_controller_claims_nothing_in_a_different_store() -> None:
    fleet = FakeFleet().to(State.RUNNING)
    first, fleet.store.objects = fleet.store.objects, {IDENTITY_NAME: other_identity()}
    fleet.clock.advance(100)  # every member is lost, so the controller claims again
    for _ in range(3):
        fleet.controller.turn()
    away = fleet.controller.status()["away"]
    assert "0" * 32 in away and "1" * 32 in away
    assert list(fleet.store.objects) == [IDENTITY_NAME]
    fleet.store.objects = first
    fleet.to(State.RUNNING)


def test_a_controller_of_another_deployment_does_not_claim() -> None:
    """A claim would fence the controller that owns the store."""
    first = fleet_with_one_commit()

    def refuse(manifest: Manifest) -> None:
        raise ConfigError(f"{manifest.name} belongs to another deployment")

    other = Controller(Coordinator(CONFIG), first.store, first.clock, check=refuse)
    with pytest.raises(ConfigError):
        other.turn()
    assert manifests.newest_incarnation(first.store) == first.controller.coordinator.incarnation


def test_members_are_restored_from_the_controller_s_store() -> None:
    fleet = FakeFleet()
    fleet.controller.turn()
    for key in fleet.members:
        fleet.beat(key)
    fleet.controller.turn()
    for key in fleet.members:
        (command,) = fleet.beat(key)
        assert command["kind"] == "restore" and command["store"] == "0" * 32
