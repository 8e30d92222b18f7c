"""Training is held when there is surely nothing to read, and goes on when there is; between the two nothing
flaps."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.control.idle import Backlog, IdleAction, IdleDetector, IdleRule

P = ("samples", 0)
RULE = IdleRule(hold_s=60, min_records=100, max_wait_s=10, min_held_s=30)
UNKNOWN = None


def some(records: int = 0, end: int = 7) -> Backlog:
    return Backlog(records, {P: end})


def first(
    idle: IdleDetector,
    advice: IdleAction,
    unread: Backlog | None,
    *,
    held: bool,
    begin_s: float,
    until_s: float,
) -> float | None:
    """When it is given first, looking each second; None = not before `until_s`."""
    for second in itertools.count():
        now_s = begin_s + second
        if now_s >= until_s:
            return None
        if idle.observe(now_s, unread, held=held) is advice:
            return now_s
    raise AssertionError


def test_training_is_held_after_the_configured_quiet_time() -> None:
    assert first(IdleDetector(RULE), IdleAction.HOLD, some(), held=False, begin_s=100, until_s=300) == 160


@pytest.mark.parametrize("unread", [some(1), some(5000), UNKNOWN])
def test_unread_records_or_an_unknown_backlog_never_hold(unread: Backlog | None) -> None:
    assert first(IdleDetector(RULE), IdleAction.HOLD, unread, held=False, begin_s=0, until_s=1000) is None


def test_zero_disables_idle_holds() -> None:
    assert (
        first(IdleDetector(IdleRule(hold_s=0)), IdleAction.HOLD, some(), held=False, begin_s=0, until_s=1000)
        is None
    )


def test_records_committed_between_two_readings_restart_the_quiet_time() -> None:
    idle = IdleDetector(RULE)
    assert first(idle, IdleAction.HOLD, some(end=7), held=False, begin_s=0, until_s=50) is None
    assert first(idle, IdleAction.HOLD, some(end=8), held=False, begin_s=50, until_s=300) == 110


@pytest.mark.parametrize("unknown_s", [1, 20])
def test_quiet_time_without_readings_does_not_count(unknown_s: int) -> None:
    idle = IdleDetector(RULE)
    assert first(idle, IdleAction.HOLD, some(), held=False, begin_s=0, until_s=50) is None
    assert first(idle, IdleAction.HOLD, UNKNOWN, held=False, begin_s=50, until_s=50 + unknown_s) is None
    assert (
        first(idle, IdleAction.HOLD, some(), held=False, begin_s=50 + unknown_s, until_s=300)
        == 110 + unknown_s
    )


@pytest.mark.parametrize("jump_s", [-7200.0, 7200.0])
def test_a_clock_jump_causes_no_hold(jump_s: float) -> None:
    idle = IdleDetector(RULE)
    assert first(idle, IdleAction.HOLD, some(), held=False, begin_s=10_000, until_s=10_030) is None
    begin_s = 10_030 + jump_s
    assert (
        first(idle, IdleAction.HOLD, some(), held=False, begin_s=begin_s, until_s=begin_s + 300)
        == begin_s + 60
    )


def test_enough_records_end_the_hold_at_once_and_few_when_they_have_waited() -> None:
    for records, after_s in ((100, 0), (1, 10)):
        idle = IdleDetector(RULE)
        assert first(idle, IdleAction.RELEASE, some(), held=True, begin_s=0, until_s=40) is None
        assert (
            first(idle, IdleAction.RELEASE, some(records), held=True, begin_s=40, until_s=100) == 40 + after_s
        )


def test_a_hold_has_a_minimum_duration() -> None:
    assert first(IdleDetector(RULE), IdleAction.RELEASE, some(5000), held=True, begin_s=0, until_s=100) == 30


@given(st.lists(st.tuples(st.integers(1, 8), st.sampled_from([None, 0, 1, 150])), max_size=150))
def test_a_trickle_does_not_toggle_holds(stream: list[tuple[int, int | None]]) -> None:
    idle, held, now_s, end = IdleDetector(RULE), False, 0.0, 0
    changed_s = -RULE.min_held_s
    for gap_s, unread in stream:
        now_s, end = now_s + gap_s, end + (unread or 0)
        advice = idle.observe(now_s, None if unread is None else some(unread, end), held=held)
        if advice is not IdleAction.NOTHING:
            min_s = RULE.min_held_s if held else RULE.hold_s
            assert now_s - changed_s >= min_s and held == (advice is IdleAction.RELEASE)
            held, changed_s = not held, now_s
