"""Holds: training stops when no restart can help, or when there is nothing to read. The use of device time is
counted."""

from __future__ import annotations

import dataclasses
import json
import threading
from typing import Any

import pytest

from roostream.runtime import manifest as manifests
from roostream.runtime.kafka.topics import Progress
from tests.trainer.control.test_scaling import FakeFleet
from trainer.control.controller import DEVICE_TIME_FILE
from trainer.control.holds import MAX_DEATHS, DeviceTime, DeviceUse, Holds, device_use, idle_hold, ratios
from trainer.control.idle import Backlog, IdleDetector, IdleHoldWatcher, IdleRule
from trainer.control.types import Hold, Key, State

WORKER = Key("worker", 0)
IDLE_REASON = "nothing to read for 60 s"


# The rules


def test_a_worker_that_keeps_dying_causes_a_hold_and_a_commit_resets_the_count() -> None:
    holds = Holds(max_deaths=3)
    assert [holds.died(WORKER), holds.died(WORKER)] == [None, None]
    holds.committed()
    assert [holds.died(WORKER), holds.died(Key("worker", 1)), holds.died(WORKER)] == [None, None, None]
    hold = holds.died(WORKER)
    assert hold is holds.now and hold is not None
    assert (hold.kind, hold.member) == ("permanent", "worker 0") and hold.reason.startswith("it died 3 times")


def test_deaths_after_a_long_life_cause_no_hold() -> None:
    holds = Holds(max_deaths=3)
    assert [holds.died(WORKER, lived_s) for lived_s in (5.0, 5.0, 3600.0, 5.0)] == [None] * 4
    assert holds.died(WORKER, 5.0) is not None


def test_dying_shards_never_cause_a_hold() -> None:
    holds = Holds(max_deaths=1)
    assert [holds.died(Key("shard", 0)) for _ in range(5)] == [None] * 5


def test_device_time_is_counted_separately_for_the_two_kinds_of_holds() -> None:
    assert device_use(State.HELD, idle_hold("nothing to read")) is DeviceUse.TRANSIENT_HOLD
    assert device_use(State.HELD, Hold("permanent", "out of memory", "worker 0")) is DeviceUse.PERMANENT_HOLD
    assert device_use(State.HELD) is DeviceUse.PERMANENT_HOLD
    assert device_use(State.RESTORING) is DeviceUse.TEMPORARY
    assert device_use(State.WRITING) is DeviceUse.TRAINING


@pytest.mark.parametrize(
    "saved",
    [
        {"training": 5, "held": 7.5, "waiting": "x", "more": 3},
        {
            "format": 2,
            "device_s": {
                "training": 5,
                "permanent_hold": 7.5,
                "transient_hold": -1,
                "temporary": float("nan"),
                "held": 9,
            },
        },
    ],
)
def test_saved_device_times_of_both_formats_are_added(
    saved: dict[str, Any],
) -> None:
    spent = DeviceTime(10.0)
    spent.add(saved)
    spent.note(DeviceUse.TRAINING, 2, 11.0)
    spent.note(DeviceUse.PERMANENT_HOLD, 2, 9.0)
    expected = {"training": 5.0, "temporary": 2.0, "transient_hold": 0.0, "permanent_hold": 7.5}
    assert spent.by_name() == expected
    restored = DeviceTime(0.0)
    restored.add(spent.body())
    assert restored.by_name() == spent.by_name()


def test_device_ratios_are_relative_to_the_training_time_as_in_the_paper() -> None:
    assert ratios({"training": 200.0, "temporary": 206.0, "permanent_hold": 498.0}) == {
        "training": 1.0,
        "temporary": 1.03,
        "permanent_hold": 2.49,
    }
    assert set(ratios(DeviceTime(0.0).by_name()).values()) == {None}


@pytest.mark.parametrize("saved", [None, {}, [], "held", {"reason": ""}, {"member": "worker 0"}])
def test_an_invalid_saved_hold_is_ignored(saved: object) -> None:
    assert Hold.from_saved(saved) is None


# The controller


class HeldFleet(FakeFleet):
    """A fleet whose workers exit when a heartbeat answer announces a hold, as their program does.
    `restart_member` plays the supervisor, which starts them again."""

    def __init__(self, *args: Any, idle: bool = False, **more: Any) -> None:
        super().__init__(*args, **more)
        coordinator = self.controller.coordinator
        coordinator.config = dataclasses.replace(coordinator.config, holds_idle=idle)
        self.fatal: dict[Key, str] = {}
        self.refusal: dict[str, Any] = {}
        self.leaves = False
        self.saved = ""

    def report(self, key: Key) -> dict[str, Any]:
        more = {"fatal": self.fatal.get(key, ""), "leaving": self.leaves, "saved": self.saved}
        return super().report(key) | more

    def beat(self, key: Key, results: list[dict[str, Any]] | None = None) -> list[dict[str, Any]]:
        if key not in self.members:
            return []
        answer = self.send(key, results)
        if answer["hold"] and key.role == "worker":
            self.stop(key)
        return answer["commands"]

    def answer(self, key: Key, command: dict[str, Any]) -> dict[str, Any]:
        if self.refusal and command["kind"] == "restore" and key.role == "worker":
            return {"id": command["id"], "ok": False, **self.refusal}
        return super().answer(key, command)

    def restart_member(self, key: Key) -> None:
        self.sessions[key] = self.sessions.get(key, 1) + 1
        self.incarnations[key] = 0
        if key not in self.members:
            self.members.append(key)

    def with_commit(self, step: int) -> HeldFleet:
        """Train up to `step` and commit."""
        self.to(State.RUNNING, 1.0)
        self.step = step
        self.controller.coordinator.want_commit()
        self.turn(1.0)
        assert self.to(State.RUNNING).controller.coordinator.has_uncommitted_steps() is False
        return self

    def with_idle_hold(self) -> HeldFleet:
        self.with_commit(5)
        assert self.controller.hold_idle(IDLE_REASON)
        run_until_held(self)
        return self


def run_until_held(fleet: HeldFleet, turns: int = 6) -> dict[str, Any]:
    """Run some turns, check that training is on hold, and return the hold."""
    for _ in range(turns):
        fleet.turn(1.0)
    assert fleet.controller.coordinator.state is State.HELD
    (hold,) = fleet.controller.status()["holds"]
    return hold


@pytest.mark.parametrize("count", [1, 2])
def test_a_fatal_worker_report_starts_a_hold(count: int) -> None:
    fleet = HeldFleet(count)
    fleet.to(State.RUNNING)
    fleet.fatal[Key("worker", count - 1)] = "out of memory: 3 GiB more for a batch of 64"
    hold = run_until_held(fleet)
    assert hold["member"] == f"worker {count - 1}" and hold["reason"].startswith("out of memory")
    assert hold["since_ms"] > 0
    assert [k.role for k in fleet.members] == ["shard", "shard"], "workers must exit, and shards must stay"
    assert fleet.controller.coordinator.num_rollbacks == 0


def test_a_permanent_refusal_of_a_restore_starts_a_hold() -> None:
    fleet = HeldFleet()
    fleet.refusal = {"error": "manifests/00000001: expected width = 8, got 9", "permanent": True}
    assert run_until_held(fleet)["reason"] == "manifests/00000001: expected width = 8, got 9"


def test_temporary_outages_are_retried_and_cause_no_hold() -> None:
    fleet = HeldFleet()
    fleet.refusal = {"error": "the store is away", "away": True}
    for _ in range(40):
        fleet.turn(1.0)
    assert fleet.controller.status()["holds"] == []
    fleet.refusal = {}
    fleet.to(State.RUNNING, 1.0)


def lose_worker(fleet: HeldFleet) -> None:
    """Stop the worker, and wait until the controller regards it as lost."""
    fleet.stop(WORKER)
    for _ in range(4):
        fleet.turn(1.0)


def test_a_permanent_hold_names_the_process_that_was_refused_as_the_same_worker() -> None:
    fleet = HeldFleet()
    for n in range(MAX_DEATHS):
        fleet.restart_member(WORKER)
        fleet.to(State.RUNNING, 1.0)
        if n == MAX_DEATHS - 1:
            twin = {"role": "worker", "index": 0, "session": 99, "incarnation": 0, "process": "pid 7 on b"}
            assert "pid 7 on b" in fleet.controller.handle("beat", twin, ())[0]["refused"]
        lose_worker(fleet)
    assert "two processes run as worker 0" in run_until_held(fleet)["reason"]


def test_a_worker_that_is_only_silent_does_not_count_as_dead() -> None:
    """The network was away; the same process sends beats again."""
    fleet = HeldFleet()
    for _ in range(2 * MAX_DEATHS):
        fleet.to(State.RUNNING, 1.0)
        lose_worker(fleet)
        fleet.members.append(WORKER)
    fleet.to(State.RUNNING, 1.0)
    assert fleet.controller.status()["holds"] == []
    assert fleet.controller.coordinator.num_rollbacks == 2 * MAX_DEATHS


def test_a_crash_loop_escalates_to_a_hold() -> None:
    fleet = HeldFleet()
    fleet.to(State.RUNNING)
    for _ in range(MAX_DEATHS - 1):
        lose_worker(fleet)
        fleet.restart_member(WORKER)
        fleet.to(State.RUNNING, 1.0)
    fleet.saved = "/home/worker/batches/1.batch"
    fleet.turn(1.0)
    lose_worker(fleet)
    reason = run_until_held(fleet)["reason"]
    assert reason.startswith(f"it died {MAX_DEATHS} times without a commit")
    assert reason.endswith(
        "; `roostream inspect batch /home/worker/batches/1.batch` shows the last batch that it saved"
    )


def test_a_preempted_worker_does_not_count_as_dead() -> None:
    fleet = HeldFleet()
    for _ in range(2 * MAX_DEATHS):
        fleet.to(State.RUNNING, 1.0)
        fleet.leaves = True
        fleet.beat(WORKER)
        fleet.leaves = False
        fleet.restart_member(WORKER)
        fleet.turn(1.0)
    assert fleet.controller.status()["holds"] == []


def test_a_hold_outlives_the_controller_and_a_release_ends_it_for_good() -> None:
    first = HeldFleet()
    first.to(State.RUNNING)
    first.fatal[WORKER] = "out of memory"
    since_ms = run_until_held(first)["since_ms"]
    second = HeldFleet(1, first.store)
    second.clock.advance(100)
    hold = run_until_held(second)
    assert (hold["reason"], hold["since_ms"]) == ("out of memory", since_ms)
    assert second.controller.handle("release", {}, ())[0] == {"held": True, "reason": "out of memory"}
    second.restart_member(WORKER)
    second.to(State.RUNNING)
    assert second.controller.status()["holds"] == []
    third = HeldFleet(1, first.store)
    third.to(State.RUNNING)
    assert third.controller.handle("release", {}, ())[0] == {"held": False, "reason": ""}


def test_a_release_while_the_hold_is_being_written_ends_it() -> None:
    fleet = HeldFleet()
    fleet.to(State.RUNNING)
    fleet.fatal[WORKER] = "out of memory"
    fleet.beat(WORKER)
    assert fleet.controller.coordinator.state is State.CLAIMING
    fleet.fatal.clear()
    fleet.controller.handle("release", {}, ())
    fleet.to(State.RUNNING)
    assert fleet.controller.status()["holds"] == [] and "hold" not in manifests.newest_purpose(fleet.store)


def test_device_seconds_are_saved_for_the_next_controller() -> None:
    fleet = HeldFleet(2)
    fleet.to(State.RUNNING)
    for _ in range(5):
        fleet.turn(1.0)
    fleet.fatal[WORKER] = "out of memory"
    run_until_held(fleet, turns=4)
    fleet.controller.handle("release", {}, ())
    fleet.turn(0.0)
    device_s = fleet.controller.status()["device_s"]
    assert device_s["training"] >= 10.0 and device_s["permanent_hold"] >= 4.0
    assert device_s["transient_hold"] == 0.0
    ratio = fleet.controller.status()["device_ratio"]["permanent_hold"]
    assert ratio == device_s["permanent_hold"] / device_s["training"]
    after = HeldFleet(2, fleet.store)
    after.turn()
    assert after.controller.status()["device_s"]["training"] == device_s["training"]


def test_device_seconds_of_earlier_controllers_are_added_once_if_a_claim_is_repeated() -> None:
    first = HeldFleet().with_commit(5)
    first.turn(30.0)
    saved = DeviceTime(0.0)
    saved.add(json.loads(first.store.objects[DEVICE_TIME_FILE]))
    assert saved.seconds[DeviceUse.TRAINING] > 0
    second = HeldFleet(1, first.store)
    for _ in range(3):
        second.store.fail_next("create")  # the claim is refused after the file was read
        second.controller.turn()
    second.controller.turn()
    assert second.controller.status()["device_s"]["training"] == saved.seconds[DeviceUse.TRAINING]


def test_device_seconds_are_saved_during_a_long_hold() -> None:
    first = HeldFleet().with_idle_hold()
    for _ in range(10):
        first.turn(30.0)
    after = HeldFleet(1, first.store)  # as if the first controller had been killed
    after.turn()
    assert after.controller.status()["device_s"]["transient_hold"] >= 240.0


# Idle holds, when there is nothing to read


def test_an_idle_hold_commits_and_releases_the_workers() -> None:
    fleet = HeldFleet(2).with_commit(5)
    assert fleet.controller.hold_idle(IDLE_REASON)
    hold = run_until_held(fleet)
    assert (hold["kind"], hold["reason"]) == ("transient", IDLE_REASON) and hold["since_ms"] > 0
    assert [k.role for k in fleet.members] == ["shard", "shard"]
    coordinator = fleet.controller.coordinator
    assert (coordinator.num_commits, coordinator.num_rollbacks, coordinator.num_aborts) == (1, 0, 0), (
        "without new steps there must be no second commit"
    )


def test_an_idle_hold_commits_trained_samples_first() -> None:
    fleet = HeldFleet().with_commit(5)
    assert fleet.controller.hold_idle(IDLE_REASON)
    fleet.step = 6  # the worker trains a sample that arrives just now
    run_until_held(fleet)
    last = manifests.newest(fleet.store)
    assert last is not None and last.manifest.step == 6 and fleet.controller.coordinator.num_rollbacks == 0
    assert "resume" not in [c["kind"] for _, c in fleet.received if c.get("seq") == last.manifest.seq]


def test_a_failed_commit_cancels_the_idle_hold() -> None:
    fleet = HeldFleet().with_commit(5)
    fleet.refused_kind, fleet.step = "freeze", 6
    assert fleet.controller.hold_idle(IDLE_REASON)
    fleet.to(State.RUNNING)
    assert fleet.controller.status()["holds"] == [] and fleet.controller.coordinator.num_aborts == 1
    assert fleet.controller.hold_idle(IDLE_REASON) is False, "the hold must not be retried at once"
    fleet.refused_kind = ""
    for _ in range(20):
        fleet.turn(1.0)
        if fleet.controller.hold_idle(IDLE_REASON):
            break
    run_until_held(fleet)


def test_a_permanent_hold_overrides_an_idle_hold() -> None:
    fleet = HeldFleet().with_commit(5)
    assert fleet.controller.hold_idle(IDLE_REASON)
    fleet.fatal[WORKER] = "out of memory"
    assert run_until_held(fleet)["kind"] == "permanent" and fleet.controller.end_idle() is False


def test_new_records_end_an_idle_hold() -> None:
    fleet = HeldFleet().with_idle_hold()
    assert fleet.controller.committed() == ({("samples", p): 10 + p for p in range(4)}, True)
    assert fleet.controller.end_idle() is True
    fleet.restart_member(WORKER)
    fleet.to(State.RUNNING)
    assert fleet.controller.status()["holds"] == [] and fleet.controller.committed()[1] is False


@pytest.mark.parametrize("by", ["itself", "a person"])
def test_an_idle_hold_survives_a_restart_of_the_controller(by: str) -> None:
    first = HeldFleet(idle=True).with_idle_hold()
    second = HeldFleet(1, first.store, idle=True)
    second.members.remove(WORKER)
    assert run_until_held(second)["kind"] == "transient" and second.controller.committed()[1] is True
    second.controller.end_idle() if by == "itself" else second.controller.handle("release", {}, ())
    second.restart_member(WORKER)
    second.to(State.RUNNING)
    third = HeldFleet(1, second.store, idle=True).to(State.RUNNING)
    assert third.controller.status()["holds"] == []


def test_an_idle_hold_is_dropped_if_nothing_would_end_it() -> None:
    first = HeldFleet(idle=True).with_idle_hold()
    second = HeldFleet(1, first.store).to(State.RUNNING)
    assert second.controller.status()["holds"] == [] and "hold" not in manifests.newest_purpose(second.store)


def test_a_failing_probe_ends_the_idle_hold() -> None:
    class FailingProbe:
        def count(self, committed: Progress) -> Backlog | None:
            stop.set()
            raise ValueError("a defect")

    fleet, stop = HeldFleet(idle=True).with_idle_hold(), NonBlockingEvent()
    IdleHoldWatcher(fleet.controller, FailingProbe(), IdleDetector(IdleRule(hold_s=20)), fleet.clock).run(
        stop
    )  # type: ignore[arg-type]
    assert fleet.to(State.GATHERING).controller.status()["holds"] == []


class NonBlockingEvent(threading.Event):
    """An event whose `wait` returns at once."""

    def wait(self, timeout: float | None = None) -> bool:
        return self.is_set()


def test_a_controller_crash_during_an_idle_hold_resumes_training() -> None:
    first = HeldFleet(idle=True).with_commit(5)
    assert first.controller.hold_idle(IDLE_REASON) and first.controller.coordinator.state is State.CUTTING
    second = HeldFleet(1, first.store, idle=True).to(State.RUNNING)
    assert second.controller.status()["holds"] == []
