"""Whoever has to go is told, everybody commits, and training waits until it is back."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from roostream.errors import ConfigError, UnavailableError
from roostream.runtime import manifest as manifests
from tests.trainer.control.test_scaling import Fleet
from trainer.control.types import Key, State

JOBS = [Key("worker", 0), Key("worker", 1), Key("shard", 1), Key("controller", 0)]


def told(fleet: Fleet, key: Key, **report: Any) -> dict[str, Any]:
    """What a beat of it is answered."""
    return fleet.send(key, report=report)


@pytest.mark.parametrize("who", JOBS)
def test_a_preemption_commits_first_and_training_waits_for_the_member(who: Key) -> None:
    fleet = Fleet(2).to(State.RUNNING)
    fleet.step = 7
    answer = fleet.call("preempt", role=who.role, index=who.index, notice_s=20.0)
    assert answer == {"seq": 1, "committed": True, "why": ""}
    last = manifests.newest(fleet.store)
    assert last is not None and last.manifest.step == 7
    assert "resume" not in [c["kind"] for _, c in fleet.asked]
    for _ in range(3):
        fleet.turn()
    name = "the controller" if who.role == "controller" else str(who)
    assert (fleet.it.coordinator.state, fleet.it.coordinator.reason) == (State.GATHERING, f"{name} leaves")
    if who.role != "controller":
        fleet.stop(who)
        fleet.sessions[who] = 2
        fleet.members.append(who)
    else:
        fleet.it.run(threading.Event())  # returns: it may go
        after = Fleet(2, fleet.store)
        after.incarnations, fleet = fleet.incarnations, after
    fleet.to(State.RUNNING)
    assert {c["manifest"] for c in fleet.restored().values()} == {last.name}
    assert fleet.it.coordinator.num_rollbacks == 0


def test_a_preempted_member_gets_its_deadline_and_then_permission_to_exit() -> None:
    fleet, who = Fleet(2).to(State.RUNNING), Key("shard", 0)
    fleet.step = 3
    fleet.turn()
    fleet.it.coordinator.membership.ask_to_leave(who, 20.0, fleet.clock.monotonic_s())
    fleet.clock.advance(2.0)
    assert told(fleet, who)["leave_s"] == 18.0 and "leave_s" not in told(fleet, Key("shard", 1))
    fleet.leaving.add(who)
    assert "free" not in told(fleet, who, leaving=True), "what was trained isn't committed"
    fleet.to(State.GATHERING)
    assert told(fleet, who, leaving=True)["free"] is True


def test_no_member_may_leave_while_a_worker_may_have_unreported_steps() -> None:
    fleet, who = Fleet().to(State.RUNNING), Key("shard", 0)
    assert "free" not in told(fleet, who, leaving=True)
    for _ in range(2):
        fleet.turn(0.6)
    assert told(fleet, who, leaving=True)["free"] is True
    assert fleet.it.coordinator.num_commits == 0


def test_if_all_workers_leave_none_waits_for_more_reports() -> None:
    fleet = Fleet().to(State.RUNNING)
    assert "free" not in told(fleet, Key("shard", 0), leaving=True)
    assert told(fleet, Key("worker", 0), leaving=True)["free"] is True
    assert told(fleet, Key("shard", 0), leaving=True)["free"] is True
    stop = threading.Event()
    stop.set()
    fleet.it.run(stop, closing_s=8.0)
    assert fleet.clock.monotonic_s() == Fleet().clock.monotonic_s(), "the controller goes at once"


def test_a_member_connected_after_its_deadline_resumes_training() -> None:
    fleet, who = Fleet().to(State.RUNNING), Key("worker", 0)
    fleet.it.coordinator.membership.ask_to_leave(who, 5.0, fleet.clock.monotonic_s())
    fleet.step = 1
    fleet.to(State.GATHERING)
    for _ in range(12):
        fleet.turn(1.0)
    assert fleet.it.coordinator.state is State.RUNNING


def test_a_controller_that_cannot_commit_exits_at_its_deadline() -> None:
    fleet = Fleet().to(State.RUNNING)
    fleet.refusing, fleet.step = "freeze", 2
    fleet.turn()
    stop = threading.Event()
    stop.set()
    fleet.it.run(stop, on_turn=lambda: fleet.turn(1.0), closing_s=4.0)
    assert fleet.it.coordinator.num_commits == 0 and fleet.it.coordinator.num_aborts == 1


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
    fleet = Fleet().to(State.RUNNING)
    with pytest.raises(error, match=message):
        fleet.it.handle("preempt", {"role": key.role, "index": key.index, "notice_s": notice_s}, ())
    assert fleet.it.coordinator.membership.leaving() == []
