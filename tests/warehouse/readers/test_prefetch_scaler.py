"""The numbers of readers and of pieces in flight follow the fullness of the trainer's buffer without
oscillating."""

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
    ("fullness", "stalled_s_ago", "full_s", "expected", "reason"),
    [
        (0.2, 1.0, 0.0, 4, "the buffer is nearly empty, and training has waited"),
        (0.2, 9.0, 0.0, 3, "the buffer is nearly empty, but training has not waited lately"),
        (0.7, 1.0, 0.0, 3, "the buffer is neither empty nor full"),
        (0.95, 9.0, FULL_FOR_S, 2, "the buffer has been full for a long time"),
        (0.95, 9.0, 1.0, 3, "the buffer has been full for a short time only"),
    ],
)
def test_pieces_follow_fullness_and_stalls(
    fullness: float, stalled_s_ago: float, full_s: float, expected: int, reason: str
) -> None:
    assert wanted_in_flight(3, fullness, stalled_s_ago, full_s, 8) == expected, reason


class ScalerSimulation:
    """A prefetch scaler in simulated time. It observes the buffer four times a second."""

    def __init__(self) -> None:
        self.scaler, self.now_s = PrefetchScaler(max_in_flight=6, in_flight=4), 0.0

    def run(self, seconds: float, fullness: float) -> int:
        for _ in range(int(4 * seconds)):
            self.now_s += 0.25
            self.scaler.observe(fullness, stalled=False, now_s=self.now_s)
        return self.scaler.in_flight


def test_a_trial_with_one_piece_less_ends_before_training_waits() -> None:
    simulation = ScalerSimulation()
    assert simulation.run(FULL_FOR_S + 6, fullness=1.0) == 3
    assert simulation.run(SETTLES_S + 2, fullness=0.7) == 4, "the number must grow before training waits"


def test_a_failed_number_is_retried_after_a_pause_that_doubles() -> None:
    simulation = ScalerSimulation()
    simulation.run(FULL_FOR_S + 6, fullness=1.0)
    simulation.run(SETTLES_S + 2, fullness=0.7)
    assert simulation.run(MIN_RETRY_S - 10, fullness=1.0) == 4
    assert simulation.run(10, fullness=1.0) == 3
    simulation.run(SETTLES_S + 2, fullness=0.7)
    assert simulation.run(MIN_RETRY_S + 10, fullness=1.0) == 4, "the second pause is twice as long"
    assert simulation.run(MIN_RETRY_S, fullness=1.0) == 3


def test_readers_are_added_at_once_and_removed_one_at_a_time() -> None:
    scaler = ReaderScaler(min_readers=1, max_readers=8)
    assert scaler.update(5, 0.0) == 3
    assert scaler.update(99, 1.0) == 8
    assert scaler.update(1, 2.0) == 8, "the number was raised too recently"
    assert scaler.update(1, 1.0 + MIN_DOWN_S) == 7
    assert scaler.update(1, 2.0 + MIN_DOWN_S) == 7
    assert scaler.update(1, 1.0 + 2 * MIN_DOWN_S) == 6


def test_all_readers_are_removed_when_nothing_is_read() -> None:
    scaler = ReaderScaler(min_readers=1, max_readers=8)
    scaler.update(2, 0.0)
    assert scaler.update(0, MIN_DOWN_S) == 0
