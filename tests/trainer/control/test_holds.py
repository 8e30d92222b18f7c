"""Training is held where no restart helps, and only there; what the time goes to is counted."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import pytest

from roostream.runtime import manifest as manifests
from roostream.runtime.kafka.topics import Progress
from tests.trainer.control.test_scaling import Fleet
from trainer.control.holds import MAX_DEATHS, DeviceTime, DeviceUse, Holds, device_use, idle_hold, ratios
from trainer.control.idle import Backlog, IdleDetector, IdleHoldWatcher, IdleRule
from trainer.control.types import Hold, Key, State

WORKER = Key("worker", 0)
QUIET = "nothing to read for 60 s"


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


def test_the_two_kinds_of_holds_are_counted_apart() -> None:
    assert device_use(State.HELD, idle_hold("nothing to read")) is DeviceUse.TRANSIENT_HOLD
    assert device_use(State.HELD, Hold("permanent", "out of memory", "worker 0")) is DeviceUse.PERMANENT_HOLD
    assert device_use(State.HELD) is DeviceUse.PERMANENT_HOLD
    assert device_use(State.RESTORING) is DeviceUse.TEMPORARY
    assert device_use(State.WRITING) is DeviceUse.TRAINING


@pytest.mark.parametrize(
    "kept",
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
    kept: dict[str, Any],
) -> None:
    spent = DeviceTime(10.0)
    spent.add(kept)
    spent.note(DeviceUse.TRAINING, 2, 11.0)
    spent.note(DeviceUse.PERMANENT_HOLD, 2, 9.0)
    expected = {"training": 5.0, "temporary": 2.0, "transient_hold": 0.0, "permanent_hold": 7.5}
    assert spent.by_name() == expected
    again = DeviceTime(0.0)
    again.add(spent.body())
    assert again.by_name() == spent.by_name()


def test_the_ratio_is_to_the_time_in_training_as_in_the_paper() -> None:
    assert ratios({"training": 200.0, "temporary": 206.0, "permanent_hold": 498.0}) == {
        "training": 1.0,
        "temporary": 1.03,
        "permanent_hold": 2.49,
    }
    assert set(ratios(DeviceTime(0.0).by_name()).values()) == {None}


@pytest.mark.parametrize("kept", [None, {}, [], "held", {"reason": ""}, {"member": "worker 0"}])
def test_an_invalid_saved_hold_is_ignored(kept: object) -> None:
    assert Hold.from_saved(kept) is None


# The controller


class HeldFleet(Fleet):
    """Workers end when they are told of a hold, as their program does; the supervisor starts them after
    it."""

    def __init__(self, *args: Any, idle: bool = False, **more: Any) -> None:
        super().__init__(*args, **more)
        coordinator = self.it.coordinator
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

    def start_again(self, key: Key) -> None:
        self.sessions[key] = self.sessions.get(key, 1) + 1
        self.incarnations[key] = 0
        if key not in self.members:
            self.members.append(key)

    def committed(self, step: int) -> HeldFleet:
        """A commit of so many steps is behind it."""
        self.to(State.RUNNING, 1.0)
        self.step = step
        self.it.coordinator.want_commit()
        self.turn(1.0)
        assert self.to(State.RUNNING).it.coordinator.has_uncommitted_steps() is False
        return self

    def held_idle(self) -> HeldFleet:
        self.committed(5)
        assert self.it.hold_idle(QUIET)
        held(self)
        return self


def held(fleet: HeldFleet, turns: int = 6) -> dict[str, Any]:
    for _ in range(turns):
        fleet.turn(1.0)
    assert fleet.it.coordinator.state is State.HELD
    (hold,) = fleet.it.status()["holds"]
    return hold


@pytest.mark.parametrize("count", [1, 2])
def test_a_fatal_worker_report_begins_a_hold(count: int) -> None:
    fleet = HeldFleet(count)
    fleet.to(State.RUNNING)
    fleet.fatal[Key("worker", count - 1)] = "out of memory: 3 GiB more for a batch of 64"
    hold = held(fleet)
    assert hold["member"] == f"worker {count - 1}" and hold["reason"].startswith("out of memory")
    assert hold["since_ms"] > 0
    assert [k.role for k in fleet.members] == ["shard", "shard"], "workers are gone, the rows stay"
    assert fleet.it.coordinator.num_rollbacks == 0


def test_a_permanent_refusal_of_a_restore_begins_a_hold() -> None:
    fleet = HeldFleet()
    fleet.refusal = {"error": "manifests/00000001: expected width = 8, got 9", "permanent": True}
    assert held(fleet)["reason"] == "manifests/00000001: expected width = 8, got 9"


def test_temporary_outages_are_retried_and_cause_no_hold() -> None:
    fleet = HeldFleet()
    fleet.refusal = {"error": "the store is away", "away": True}
    for _ in range(40):
        fleet.turn(1.0)
    assert fleet.it.status()["holds"] == []
    fleet.refusal = {}
    fleet.to(State.RUNNING, 1.0)


def dies(fleet: HeldFleet) -> None:
    """The worker is silent until the controller has lost it."""
    fleet.stop(WORKER)
    for _ in range(4):
        fleet.turn(1.0)


def test_a_permanent_hold_names_the_process_that_was_refused_as_the_same_worker() -> None:
    fleet = HeldFleet()
    for n in range(MAX_DEATHS):
        fleet.start_again(WORKER)
        fleet.to(State.RUNNING, 1.0)
        if n == MAX_DEATHS - 1:
            twin = {"role": "worker", "index": 0, "session": 99, "incarnation": 0, "process": "pid 7 on b"}
            assert "pid 7 on b" in fleet.it.handle("beat", twin, ())[0]["refused"]
        dies(fleet)
    assert "two processes run as worker 0" in held(fleet)["reason"]


def test_a_crash_loop_escalates_to_a_hold() -> None:
    fleet = HeldFleet()
    fleet.to(State.RUNNING)
    for _ in range(MAX_DEATHS - 1):
        dies(fleet)
        fleet.start_again(WORKER)
        fleet.to(State.RUNNING, 1.0)
    fleet.saved = "/home/worker/batches/1.batch"
    fleet.turn(1.0)
    dies(fleet)
    reason = held(fleet)["reason"]
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
        fleet.start_again(WORKER)
        fleet.turn(1.0)
    assert fleet.it.status()["holds"] == []


def test_a_hold_outlives_the_controller_and_a_release_ends_it_for_good() -> None:
    first = HeldFleet()
    first.to(State.RUNNING)
    first.fatal[WORKER] = "out of memory"
    since_ms = held(first)["since_ms"]
    second = HeldFleet(1, first.store)
    second.clock.advance(100)
    hold = held(second)
    assert (hold["reason"], hold["since_ms"]) == ("out of memory", since_ms)
    assert second.it.handle("release", {}, ())[0] == {"held": True, "reason": "out of memory"}
    second.start_again(WORKER)
    second.to(State.RUNNING)
    assert second.it.status()["holds"] == []
    third = HeldFleet(1, first.store)
    third.to(State.RUNNING)
    assert third.it.handle("release", {}, ())[0] == {"held": False, "reason": ""}


def test_a_release_while_the_hold_is_being_written_ends_it() -> None:
    fleet = HeldFleet()
    fleet.to(State.RUNNING)
    fleet.fatal[WORKER] = "out of memory"
    fleet.beat(WORKER)
    assert fleet.it.coordinator.state is State.CLAIMING
    fleet.fatal.clear()
    fleet.it.handle("release", {}, ())
    fleet.to(State.RUNNING)
    assert fleet.it.status()["holds"] == [] and "hold" not in manifests.newest_purpose(fleet.store)


def test_device_seconds_are_saved_for_the_next_controller() -> None:
    fleet = HeldFleet(2)
    fleet.to(State.RUNNING)
    for _ in range(5):
        fleet.turn(1.0)
    fleet.fatal[WORKER] = "out of memory"
    held(fleet, turns=4)
    fleet.it.handle("release", {}, ())
    fleet.turn(0.0)
    told = fleet.it.status()["device_s"]
    assert told["training"] >= 10.0 and told["permanent_hold"] >= 4.0 and told["transient_hold"] == 0.0
    assert fleet.it.status()["device_ratio"]["permanent_hold"] == told["permanent_hold"] / told["training"]
    after = HeldFleet(2, fleet.store)
    after.turn()
    assert after.it.status()["device_s"]["training"] == told["training"]


def test_device_seconds_are_saved_during_a_long_hold() -> None:
    first = HeldFleet().held_idle()
    for _ in range(10):
        first.turn(30.0)
    after = HeldFleet(1, first.store)  # the first is killed
    after.turn()
    assert after.it.status()["device_s"]["transient_hold"] >= 240.0


# Nothing to read


def test_an_idle_hold_commits_and_releases_the_workers() -> None:
    fleet = HeldFleet(2).committed(5)
    assert fleet.it.hold_idle(QUIET)
    hold = held(fleet)
    assert (hold["kind"], hold["reason"]) == ("transient", QUIET) and hold["since_ms"] > 0
    assert [k.role for k in fleet.members] == ["shard", "shard"]
    it = fleet.it.coordinator
    assert (it.num_commits, it.num_rollbacks, it.num_aborts) == (1, 0, 0), (
        "nothing was new, so nothing was committed"
    )


def test_an_idle_hold_commits_trained_samples_first() -> None:
    fleet = HeldFleet().committed(5)
    assert fleet.it.hold_idle(QUIET)
    fleet.step = 6  # it came at this moment
    held(fleet)
    last = manifests.newest(fleet.store)
    assert last is not None and last.manifest.step == 6 and fleet.it.coordinator.num_rollbacks == 0
    assert "resume" not in [c["kind"] for _, c in fleet.asked if c.get("seq") == last.manifest.seq]


def test_a_failed_commit_cancels_the_idle_hold() -> None:
    fleet = HeldFleet().committed(5)
    fleet.refusing, fleet.step = "freeze", 6
    assert fleet.it.hold_idle(QUIET)
    fleet.to(State.RUNNING)
    assert fleet.it.status()["holds"] == [] and fleet.it.coordinator.num_aborts == 1
    assert fleet.it.hold_idle(QUIET) is False, "not at once"
    fleet.refusing = ""
    for _ in range(20):
        fleet.turn(1.0)
        if fleet.it.hold_idle(QUIET):
            break
    held(fleet)


def test_a_permanent_hold_overrides_an_idle_hold() -> None:
    fleet = HeldFleet().committed(5)
    assert fleet.it.hold_idle(QUIET)
    fleet.fatal[WORKER] = "out of memory"
    assert held(fleet)["kind"] == "permanent" and fleet.it.end_idle() is False


def test_new_records_end_an_idle_hold() -> None:
    fleet = HeldFleet().held_idle()
    assert fleet.it.committed() == ({("samples", p): 10 + p for p in range(4)}, True)
    assert fleet.it.end_idle() is True
    fleet.start_again(WORKER)
    fleet.to(State.RUNNING)
    assert fleet.it.status()["holds"] == [] and fleet.it.committed()[1] is False


@pytest.mark.parametrize("by", ["itself", "a person"])
def test_an_idle_hold_survives_a_restart_of_the_controller(by: str) -> None:
    first = HeldFleet(idle=True).held_idle()
    second = HeldFleet(1, first.store, idle=True)
    second.members.remove(WORKER)
    assert held(second)["kind"] == "transient" and second.it.committed()[1] is True
    second.it.end_idle() if by == "itself" else second.it.handle("release", {}, ())
    second.start_again(WORKER)
    second.to(State.RUNNING)
    third = HeldFleet(1, second.store, idle=True).to(State.RUNNING)
    assert third.it.status()["holds"] == []


def test_an_idle_hold_is_dropped_if_nothing_would_end_it() -> None:
    first = HeldFleet(idle=True).held_idle()
    second = HeldFleet(1, first.store).to(State.RUNNING)
    assert second.it.status()["holds"] == [] and "hold" not in manifests.newest_purpose(second.store)


def test_a_failing_probe_ends_the_idle_hold() -> None:
    class Blind:
        def count(self, committed: Progress) -> Backlog | None:
            stop.set()
            raise ValueError("a defect")

    fleet, stop = HeldFleet(idle=True).held_idle(), Ended()
    IdleHoldWatcher(fleet.it, Blind(), IdleDetector(IdleRule(hold_s=20)), fleet.clock).run(stop)  # type: ignore[arg-type]
    assert fleet.to(State.GATHERING).it.status()["holds"] == []


class Ended(threading.Event):
    """Waits for nobody."""

    def wait(self, timeout: float | None = None) -> bool:
        return self.is_set()


def test_a_controller_crash_during_an_idle_hold_resumes_training() -> None:
    first = HeldFleet(idle=True).committed(5)
    assert first.it.hold_idle(QUIET) and first.it.coordinator.state is State.CUTTING
    second = HeldFleet(1, first.store, idle=True).to(State.RUNNING)
    assert second.it.status()["holds"] == []
