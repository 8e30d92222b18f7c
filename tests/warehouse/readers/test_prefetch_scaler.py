"""Readers and units in flight follow the fullness of the trainer's buffer, and don't swing."""

from __future__ import annotations

import pytest

from roostream.warehouse.readers.prefetch_scaler import (
    FULL_FOR_S,
    MIN_DOWN_S,
    MIN_RETRY_S,
    SETTLES_S,
    PrefetchScaler,
    ReaderScaler,
    wanted_in_flight,
)


@pytest.mark.parametrize(
    ("fullness", "stalled_s_ago", "full_s", "wanted", "why"),
    [
        (0.2, 1.0, 0.0, 4, "empty, and training waited"),
        (0.2, 9.0, 0.0, 3, "empty, but nobody waited"),
        (0.7, 1.0, 0.0, 3, "half full"),
        (0.95, 9.0, FULL_FOR_S, 2, "full for long"),
        (0.95, 9.0, 1.0, 3, "full for a moment"),
    ],
)
def test_pieces_follow_fullness_and_stalls(
    fullness: float, stalled_s_ago: float, full_s: float, wanted: int, why: str
) -> None:
    assert wanted_in_flight(3, fullness, stalled_s_ago, full_s, 8) == wanted, why


class Course:
    """An appetite over time, looked at four times a second."""

    def __init__(self) -> None:
        self.it, self.now_s = PrefetchScaler(max_in_flight=6, in_flight=4), 0.0

    def after(self, seconds: float, fullness: float) -> int:
        for _ in range(int(4 * seconds)):
            self.now_s += 0.25
            self.it.observe(fullness, stalled=False, now_s=self.now_s)
        return self.it.in_flight


def test_a_trial_with_one_piece_less_ends_before_training_waits() -> None:
    course = Course()
    assert course.after(FULL_FOR_S + 6, fullness=1.0) == 3
    assert course.after(SETTLES_S + 2, fullness=0.7) == 4, "nobody waited yet"


def test_a_failed_number_is_retried_after_a_pause_that_doubles() -> None:
    course = Course()
    course.after(FULL_FOR_S + 6, fullness=1.0)
    course.after(SETTLES_S + 2, fullness=0.7)
    assert course.after(MIN_RETRY_S - 10, fullness=1.0) == 4
    assert course.after(10, fullness=1.0) == 3
    course.after(SETTLES_S + 2, fullness=0.7)
    assert course.after(MIN_RETRY_S + 10, fullness=1.0) == 4, "now twice as long"
    assert course.after(MIN_RETRY_S, fullness=1.0) == 3


def test_readers_are_added_at_once_and_removed_one_at_a_time() -> None:
    it = ReaderScaler(min_readers=1, max_readers=8)
    assert it.update(5, 0.0) == 3
    assert it.update(99, 1.0) == 8
    assert it.update(1, 2.0) == 8, "too soon after it grew"
    assert it.update(1, 1.0 + MIN_DOWN_S) == 7
    assert it.update(1, 2.0 + MIN_DOWN_S) == 7
    assert it.update(1, 1.0 + 2 * MIN_DOWN_S) == 6


def test_all_readers_are_removed_when_nothing_is_read() -> None:
    it = ReaderScaler(min_readers=1, max_readers=8)
    it.update(2, 0.0)
    assert it.update(0, MIN_DOWN_S) == 0
