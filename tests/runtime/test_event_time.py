"""Estimates of event time that tolerate single wrong timestamps. tests/joiner tests how the joiner uses
them."""

from __future__ import annotations

import random

import pytest

from roostream.runtime.event_time import NUM_RECENT, START, MedianEventTime, SteppedEventTime


def test_the_middle_of_recent_times() -> None:
    recent = MedianEventTime()
    assert recent.middle_ms == 0
    for n, middle in enumerate([10, 10, 20, 20, 30], 1):
        recent.add([10 * n])
        assert recent.middle_ms == middle, "of an even number of times, the earlier of the middle two counts"
    recent.add(range(1000))
    assert recent.times_ms == [*range(1000 - NUM_RECENT, 1000)] and recent.middle_ms == 992


def test_adding_no_times_changes_nothing() -> None:
    recent = MedianEventTime()
    recent.add([5])
    recent.add([])
    assert recent.times_ms == [5]


def test_the_median_is_reliable_once_full() -> None:
    recent = MedianEventTime()
    for n in range(2 * NUM_RECENT):
        assert recent.is_full == (n >= NUM_RECENT)
        recent.add([n])


@pytest.mark.parametrize("wrong_ms", [0, 1 << 50])
def test_a_few_wrong_times_do_not_move_the_median(wrong_ms: int) -> None:
    for seed in range(50):
        times_ms = [wrong_ms] * (NUM_RECENT // 2) + [*range(1000, 1000 + NUM_RECENT - NUM_RECENT // 2)]
        random.Random(seed).shuffle(times_ms)
        recent = MedianEventTime()
        recent.add(times_ms)
        assert 1000 <= recent.middle_ms < 1000 + NUM_RECENT


def test_the_first_time_is_accepted_and_a_jump_only_after_a_second_event_confirms_it() -> None:
    steps = SteppedEventTime()
    assert steps.newest_ms == START
    for time_ms, newest_ms in (
        (100, 100),
        (1 << 50, 100),
        (150, 150),
        (5_000, 150),
        (5_010, 5_000),
        (5_010, 5_010),
    ):
        steps.event(time_ms, 1_000)
        assert steps.newest_ms == newest_ms
