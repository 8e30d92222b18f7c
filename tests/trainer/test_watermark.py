"""The watermark of training (event time), and how several workers merge theirs."""

from __future__ import annotations

import numpy as np

from trainer.watermark import TrainingWatermark, merge_newest_times


def test_the_watermark_follows_close_times_and_never_goes_back() -> None:
    time = TrainingWatermark()
    for close_ms in ([100, 300], [200], [1 << 50], [400]):
        time.add(np.array(close_ms, np.int64))
    assert time.watermark_ms == 400 and time.recent_ms.tolist() == [100, 300, 200, 1 << 50, 400]
    restored = TrainingWatermark(time.watermark_ms, time.recent_ms.tolist())
    for each in (time, restored):
        each.add(np.array([500], np.int64))
    assert restored.watermark_ms == time.watermark_ms == 500
    assert restored.recent_ms.tolist() == time.recent_ms.tolist()


MINUTE, DAY, YEAR = 60_000, 86_400_000, 365 * 86_400_000
NOW = 1_700_000_000_000


def filled_watermark(first_ms: int = NOW, step_ms: int = 1000, samples: int = 20) -> TrainingWatermark:
    time = TrainingWatermark()
    time.add(np.arange(samples) * step_ms + first_ms)
    assert time.watermark_ms == first_ms + (samples - 1) * step_ms
    return time


def test_g8_a_few_samples_of_a_wrong_clock_hardly_move_the_watermark() -> None:
    time = filled_watermark()
    time.add(np.full(8, NOW + YEAR))
    assert time.watermark_ms < NOW + 2 * 60 * MINUTE
    for n in range(10):
        time.add(NOW + 20_000 + 1000 * np.arange(100 * n, 100 * (n + 1)))
    assert time.watermark_ms < NOW + 2 * 60 * MINUTE


def test_g8_the_watermark_recovers_from_many_wrong_times() -> None:
    time = filled_watermark()
    for n in range(20):
        time.add(NOW + YEAR + np.arange(1000) + 1000 * n)
    assert time.watermark_ms > NOW + 100 * DAY
    for n in range(30):
        time.add(NOW + DAY + np.arange(1000) + 1000 * n)
    assert NOW + DAY < time.watermark_ms < NOW + 3 * DAY


def test_samples_that_are_a_little_late_never_move_the_watermark_back() -> None:
    time = filled_watermark()
    before = time.watermark_ms
    time.add(np.full(100, NOW - 20 * 60 * MINUTE))
    assert time.watermark_ms == before


def test_the_watermark_catches_up_after_a_pause_and_pushes_state_the_time_after_it() -> None:
    time = filled_watermark()
    for n in range(500):
        time.add(np.array([NOW + 3 * DAY + 1000 * n]))
        if n == 10:
            assert time.watermark_ms < NOW + DAY < NOW + 3 * DAY <= time.push_time_ms
    assert time.watermark_ms == NOW + 3 * DAY + 499_000


def test_the_watermark_keeps_up_with_samples_that_are_hours_apart() -> None:
    time = TrainingWatermark()
    for n in range(200):
        time.add(np.array([NOW + n * 5 * 60 * MINUTE]))
    assert time.watermark_ms > NOW + 185 * 5 * 60 * MINUTE


def test_newest_times_of_several_workers_are_merged_evenly() -> None:
    assert merge_newest_times([[1, 2, 3], [], [7]]) == [1, 2, 7, 3]
    both = merge_newest_times([list(range(100, 115)), list(range(200, 215))])
    assert len(both) == 15 and set(both) == {*range(107, 115), *range(208, 215)}
    assert merge_newest_times([]) == [] and merge_newest_times([[5]]) == [5]
    assert merge_newest_times([list(range(15)), []]) == list(range(15)), (
        "a worker without data must not change the result"
    )
