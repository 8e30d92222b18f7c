"""Event time of training, and what several workers make of theirs."""

from __future__ import annotations

import numpy as np

from trainer.watermark import TrainingWatermark, merge_newest_times


def test_the_watermark_follows_close_times_and_never_goes_back() -> None:
    time = TrainingWatermark()
    for close_ms in ([100, 300], [200], [1 << 50], [400]):
        time.add(np.array(close_ms, np.int64))
    assert time.watermark_ms == 400 and time.recent_ms.tolist() == [100, 300, 200, 1 << 50, 400]
    again = TrainingWatermark(time.watermark_ms, time.recent_ms.tolist())
    for of_both in (time, again):
        of_both.add(np.array([500], np.int64))
    assert again.watermark_ms == time.watermark_ms == 500
    assert again.recent_ms.tolist() == time.recent_ms.tolist()


def test_newest_times_of_several_workers_are_merged_evenly() -> None:
    assert merge_newest_times([[1, 2, 3], [], [7]]) == [1, 2, 7, 3]
    both = merge_newest_times([list(range(100, 115)), list(range(200, 215))])
    assert len(both) == 15 and set(both) == {*range(107, 115), *range(208, 215)}
    assert merge_newest_times([]) == [] and merge_newest_times([[5]]) == [5]
    assert merge_newest_times([list(range(15)), []]) == list(range(15)), (
        "one with data alone is as one worker"
    )
