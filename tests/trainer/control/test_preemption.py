"""Preemption: a program that must end is given a deadline, the fleet commits, and training waits until the
program is back."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from roostream.errors import ConfigError, UnavailableError
from roostream.runtime import manifest as manifests
from tests.trainer.control.test_scaling import FakeFleet
from trainer.control.types import Key, State

JOBS = [Key("worker", 0), Key("worker", 1), Key("shard", 1), Key("controller", 0)]


def heartbeat_answer(fleet: FakeFleet, key: Key, **report: Any) -> dict[str, Any]:
    """Send a heartbeat with this report, and return the answer."""
    return fleet.send(key, report=report)


@pytest.mark.parametrize("who", JOBS)
def test_a_preemption_commits_first_and_training_waits_for_the_member(who: Key) -> None:
    fleet = FakeFleet(2).to(State.RUNNING)
    fleet.step = 7
    answer = fleet.call("preempt", role=who.role, index=who.index, notice_s=20.0)
    assert answer == {"seq": 1, "committed": True, "why": ""}
    last = manifests.newest(fleet.store)
    assert last is not None and last.manifest.step == 7
    assert "resume" not in [c["kind"] for _, c in fleet.received]
    for _ in range(3):
        fleet.turn()
    name = "the controller" if who.role == "controller" else str(who)
    assert (fleet.controller.coordinator.state, fleet.controller.coordinator.reason) == (
        State.GATHERING,
        f"{name} leaves",
    )
    if who.role != "controller":
        fleet.stop(who)
        fleet.sessions[who] = 2
        fleet.members.append(who)
    else:
        fleet.controller.run(threading.Event())  # returns, because the controller may end
        after = FakeFleet(2, fleet.store)
        after.incarnations, fleet = fleet.incarnations, after
    fleet.to(State.RUNNING)
    assert {c["manifest"] for c in fleet.restored().values()} == {last.name}
    assert fleet.controller.coordinator.num_rollbacks == 0


def test_a_preempted_member_gets_its_deadline_and_then_permission_to_exit() -> None:
    fleet, who = FakeFleet(2).to(State.RUNNING), Key("shard", 0)
    fleet.step = 3
    fleet.turn()
    fleet.controller.coordinator.membership.ask_to_leave(who, 20.0, fleet.clock.monotonic_s())
    fleet.clock.advance(2.0)
    assert heartbeat_answer(fleet, who)["leave_s"] == 18.0 and "leave_s" not in heartbeat_answer(
        fleet, Key("shard", 1)
    )
    fleet.leaving.add(who)
    assert "free" not in heartbeat_answer(fleet, who, leaving=True), "the trained steps are not committed yet"
    fleet.to(State.GATHERING)
    assert heartbeat_answer(fleet, who, leaving=True)["free"] is True


def test_no_member_may_leave_while_a_worker_may_have_unreported_steps() -> None:
    fleet, who = FakeFleet().to(State.RUNNING), Key("shard", 0)
    assert "free" not in heartbeat_answer(fleet, who, leaving=True)
    for _ in range(2):
        fleet.turn(0.6)
    assert heartbeat_answer(fleet, who, leaving=True)["free"] is True
    assert fleet.controller.coordinator.num_commits == 0


def test_members_may_leave_at_once_if_all_workers_leave() -> None:
    fleet = FakeFleet().to(State.RUNNING)
    assert "free" not in heartbeat_answer(fleet, Key("shard", 0), leaving=True)
    assert heartbeat_answer(fleet, Key("worker", 0), leaving=True)["free"] is True
    assert heartbeat_answer(fleet, Key("shard", 0), leaving=True)["free"] is True
    stop = threading.Event()
    stop.set()
    fleet.controller.run(stop, closing_s=8.0)
    assert fleet.clock.monotonic_s() == FakeFleet().clock.monotonic_s(), "the controller must end at once"


def test_a_member_connected_after_its_deadline_resumes_training() -> None:
    fleet, who = FakeFleet().to(State.RUNNING), Key("worker", 0)
    fleet.controller.coordinator.membership.ask_to_leave(who, 5.0, fleet.clock.monotonic_s())
    fleet.step = 1
    fleet.to(State.GATHERING)
    for _ in range(12):
        fleet.turn(1.0)
    assert fleet.controller.coordinator.state is State.RUNNING


def test_a_controller_that_cannot_commit_exits_at_its_deadline() -> None:
    fleet = FakeFleet().to(State.RUNNING)
    fleet.refused_kind, fleet.step = "freeze", 2
    fleet.turn()
    stop = threading.Event()
    stop.set()
    fleet.controller.run(stop, on_turn=lambda: fleet.turn(1.0), closing_s=4.0)
    assert fleet.controller.coordinator.num_commits == 0 and fleet.controller.coordinator.num_aborts == 1


@pytest.mark.parametrize(
    ("key", "notice_s", "error", "message"),
    [
        (Key("worker", 9), 20.0, ConfigError, "expected shards 0..1 and workers 0..3, got worker 9"),
        (Key("worker", 1), 20.0, UnavailableError, "worker 1"),
        (Key("worker", 0), 1.0, ConfigError, "notice"),
        (Key("controller", 0), float("nan"), ConfigError, "notice"),
    ],
)
def test_an_invalid_preemption_is_refused_without_changes(
    key: Key, notice_s: float, error: type[Exception], message: str
) -> None:
    fleet = FakeFleet().to(State.RUNNING)
    with pytest.raises(error, match=message):
        fleet.controller.handle("preempt", {"role": key.role, "index": key.index, "notice_s": notice_s}, ())
    assert fleet.controller.coordinator.membership.leaving() == []
