"""Training is held where no restart helps, and only there; what the time goes to is counted."""

from __future__ import annotations

from typing import Any

import pytest

from runtime import manifest as manifests
from tests.trainer.control.test_scaling import Fleet
from trainer.control.holds import MOST_DEATHS, Holds, Spent, spending_of
from trainer.control.protocol import Hold, Key, State, Wish

WORKER = Key("worker", 0)


# The rules


def test_a_worker_that_dies_again_and_again_is_a_hold_and_a_commit_begins_the_count_anew() -> None:
    holds = Holds(most_deaths=3)
    assert [holds.died(WORKER), holds.died(WORKER)] == [None, None]
    holds.committed()
    assert [holds.died(WORKER), holds.died(Key("worker", 1)), holds.died(WORKER)] == [None, None, None]
    hold = holds.died(WORKER)
    assert hold is holds.now and hold is not None
    assert (hold.kind, hold.member) == ("permanent", "worker 0") and hold.reason.startswith("it died 3 times")


def test_deaths_after_a_long_life_are_no_loop() -> None:
    holds = Holds(most_deaths=3)
    assert [holds.died(WORKER, lived_s) for lived_s in (5.0, 5.0, 3600.0, 5.0)] == [None] * 4
    assert holds.died(WORKER, 5.0) is not None


def test_shards_hold_the_rows_and_are_always_waited_for() -> None:
    holds = Holds(most_deaths=1)
    assert [holds.died(Key("shard", 0)) for _ in range(5)] == [None] * 5


def test_the_first_reason_stands_until_it_is_released() -> None:
    holds = Holds()
    holds.stop(WORKER, "out of memory")
    assert holds.stop(WORKER, "later").reason == "out of memory"
    holds.release()
    assert holds.now is None and holds.stop(WORKER, "later").reason == "later"


@pytest.mark.parametrize("state", list(State))
def test_every_state_s_time_goes_to_something(state: State) -> None:
    spent = Spent(100.0)
    spent.note(state, 3, 100.0)
    spent.note(State.RUNNING, 3, 104.0)
    assert spent.seconds[spending_of(state)] == 12.0 and sum(spent.seconds.values()) == 12.0


def test_time_before_this_controller_is_added_and_a_clock_that_goes_back_adds_nothing() -> None:
    spent = Spent(10.0)
    spent.add({"training": 5, "held": 7.5, "waiting": "x", "more": 3})
    spent.note(State.RUNNING, 2, 11.0)
    spent.note(State.HELD, 2, 9.0)
    assert spent.told() == {"training": 5.0, "waiting": 2.0, "held": 7.5}


@pytest.mark.parametrize("kept", [None, {}, [], "held", {"reason": ""}, {"member": "worker 0"}])
def test_what_was_not_kept_is_no_hold(kept: object) -> None:
    assert Hold.of(kept) is None


def test_a_kept_hold_reads_as_it_was_written() -> None:
    hold = Hold("permanent", "out of memory", "worker 1", 17)
    assert Hold.of(Wish(2, 1, hold).body()["hold"]) == hold


# The controller


class HeldFleet(Fleet):
    """Workers end when they are told of a hold, as their program does; the supervisor starts them after it."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.fatal: dict[Key, str] = {}
        self.refusal: dict[str, Any] = {}
        self.leaves = False

    def beat(self, key: Key, results: list[dict[str, Any]] | None = None) -> list[dict[str, Any]]:
        if key not in self.members:
            return []
        report = {"step": self.step, "meet": "here", "fatal": self.fatal.get(key, ""), "leaving": self.leaves}
        header = {"role": key.role, "index": key.index, "session": self.sessions.get(key, 1), "report": report}
        header |= {"incarnation": self.incarnations.get(key, 0), "results": results or []}
        answer = self.it.handle("beat", header, ())[0]
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


def held(fleet: HeldFleet, turns: int = 6) -> dict[str, Any]:
    for _ in range(turns):
        fleet.turn(1.0)
    assert fleet.it.coordinator.state is State.HELD
    (hold,) = fleet.it.status()["holds"]
    return hold


@pytest.mark.parametrize("count", [1, 2])
def test_a_worker_that_says_it_can_never_go_on_holds_training_and_all_are_released(count: int) -> None:
    fleet = HeldFleet(count)
    fleet.to(State.RUNNING)
    fleet.fatal[Key("worker", count - 1)] = "out of memory: 3 GiB more for a batch of 64"
    hold = held(fleet)
    assert hold["member"] == f"worker {count - 1}" and hold["reason"].startswith("out of memory") and hold["since_ms"] > 0
    assert [k.role for k in fleet.members] == ["shard", "shard"], "workers are gone, the rows stay"
    assert fleet.it.coordinator.num_rollbacks == 0


def test_settings_that_can_t_be_restored_hold_training_instead_of_trying_for_ever() -> None:
    fleet = HeldFleet()
    fleet.refusal = {"error": "manifests/00000001: expected width = 8, got 9", "permanent": True}
    assert held(fleet)["reason"] == "manifests/00000001: expected width = 8, got 9"


def test_what_is_away_now_is_tried_again_and_never_held() -> None:
    fleet = HeldFleet()
    fleet.refusal = {"error": "the store is away", "away": True}
    for _ in range(40):
        fleet.turn(1.0)
    assert fleet.it.status()["holds"] == []
    fleet.refusal = {}
    fleet.to(State.RUNNING, 1.0)


def test_a_crash_loop_escalates_to_a_hold() -> None:
    fleet = HeldFleet()
    fleet.to(State.RUNNING)
    for _ in range(MOST_DEATHS - 1):
        fleet.start_again(WORKER)
        fleet.turn(1.0)
        fleet.to(State.RUNNING, 1.0)
    fleet.start_again(WORKER)
    assert held(fleet)["reason"].startswith(f"it died {MOST_DEATHS} times without a commit")


def test_a_worker_that_was_asked_to_leave_has_not_died() -> None:
    fleet = HeldFleet()
    for _ in range(2 * MOST_DEATHS):
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
    assert fleet.it.status()["holds"] == [] and "hold" not in manifests.kept_wish(fleet.store)


def test_device_seconds_are_told_and_kept_for_the_next_controller() -> None:
    fleet = HeldFleet(2)
    fleet.to(State.RUNNING)
    for _ in range(5):
        fleet.turn(1.0)
    fleet.fatal[WORKER] = "out of memory"
    held(fleet, turns=4)
    fleet.it.handle("release", {}, ())
    fleet.turn(0.0)
    told = fleet.it.status()["device_s"]
    assert told["training"] >= 10.0 and told["held"] >= 4.0
    after = HeldFleet(2, fleet.store)
    after.turn()
    assert after.it.status()["device_s"]["training"] == told["training"]
