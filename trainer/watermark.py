"""Event-time watermark of training. It expires rows and is stated in the manifest.

Letters: R requests.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from roostream.runtime.event_time import NUM_RECENT, MedianEventTime

_MAX_AHEAD_MS = 600_000  # beyond the median of recent close times; later samples do not move the watermark
_MAX_STEP_MS = 600_000  # by which one sample can move the watermark, unless samples are further apart
_MAX_BEHIND_MS = 86_400_000  # a watermark that is further ahead of the median was moved by wrong times


class TrainingWatermark:
    """The latest close time that is not far ahead of the median of recent ones.

    The watermark expires rows, so wrong times, even of some samples in a row, must not move it far. After
    the first NUM_RECENT samples, each sample moves it by at most 10 minutes, or by twice the usual time
    between two samples if that is longer. So a month without traffic is caught up with in 4,320 samples.

    Late samples do not move it back. If the median of recent close times is more than a day behind, the
    watermark itself is wrong, for example because a clock had jumped. Then it returns in steps of that size.

    Several workers share one watermark: all add the merged times (`merge_newest_times`) in the same order."""

    def __init__(self, watermark_ms: int = 0, recent_ms: Sequence[int] = ()) -> None:
        self.watermark_ms = watermark_ms
        self._recent = MedianEventTime()
        self._recent.add(recent_ms)

    @property
    def recent_ms(self) -> np.ndarray:
        """Recent close times (int64), for the checkpoint."""
        return np.array(self._recent.times_ms, np.int64)

    @property
    def push_time_ms(self) -> int:
        """The time that a push states for its rows. While the watermark catches up with a pause of the
        traffic, the rows are newer than it, and must not expire once it has caught up."""
        return max(self.watermark_ms, self._recent.middle_ms)

    def add(self, close_ms_R: np.ndarray) -> None:
        """Add the close times of a trained chunk."""
        was_reliable = self._recent.is_full
        self._recent.add(close_ms_R.tolist())
        middle_ms = self._recent.middle_ms
        near_R = close_ms_R[close_ms_R <= middle_ms + _MAX_AHEAD_MS]
        newest_ms = max(int(near_R.max(initial=0)), middle_ms)
        if not was_reliable:
            self.watermark_ms = max(self.watermark_ms, newest_ms)
        elif newest_ms > self.watermark_ms:
            num_ahead = int((close_ms_R > self.watermark_ms).sum())
            self.watermark_ms = min(newest_ms, self.watermark_ms + num_ahead * self._max_step_ms())
        elif middle_ms < self.watermark_ms - _MAX_BEHIND_MS:
            self.watermark_ms = max(middle_ms, self.watermark_ms - len(close_ms_R) * self._max_step_ms())

    def _max_step_ms(self) -> int:
        gaps_ms = np.sort(np.diff(np.sort(self.recent_ms)))
        return max(_MAX_STEP_MS, 2 * int(gaps_ms[(len(gaps_ms) - 1) // 2]))


def merge_newest_times(times_ms: Sequence[Sequence[int]]) -> list[int]:
    """Merge the newest times of several workers, taking equally many of each, up to NUM_RECENT."""
    rounds = max((len(worker) for worker in times_ms), default=0)
    newest_first = [worker[-1 - at] for at in range(rounds) for worker in times_ms if at < len(worker)]
    return newest_first[:NUM_RECENT][::-1]
