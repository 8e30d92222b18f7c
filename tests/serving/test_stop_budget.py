"""One time for a whole stop."""

from __future__ import annotations

from runtime.clock import FakeClock
from serving.stop_budget import StopBudget


def test_what_a_step_does_not_need_the_next_one_has() -> None:
    clock = FakeClock(0)
    budget = StopBudget(20.0, clock)
    clock.advance(100.0)
    budget.begin()
    assert budget.left_s() == 20.0
    clock.advance(3.0)
    budget.begin()
    assert budget.left_s() == 17.0 and budget.left_s(5.0) == 12.0
    clock.advance(30.0)
    assert budget.left_s() == 0.0


def test_it_begins_when_it_is_asked_for_at_the_latest() -> None:
    clock = FakeClock(0)
    budget = StopBudget(20.0, clock)
    assert budget.left_s() == 20.0
    clock.advance(1.0)
    assert budget.left_s() == 19.0
