"""Event-time watermark of training. It expires rows and is stated in the manifest.

Letters: R requests.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from roostream.runtime.event_time import NUM_RECENT, MedianEventTime

_MAX_AHEAD_MS = 600_000  # beyond the median of recent close times; later samples do not move the watermark


class TrainingWatermark:
    """The latest close time that is not far ahead of the median of recent ones, so that a single sample
    cannot expire rows. It never goes back. Several workers share one watermark: all add the merged times
    (`merge_newest_times`) in the same order."""

    def __init__(self, watermark_ms: int = 0, recent_ms: Sequence[int] = ()) -> None:
        self.watermark_ms = watermark_ms
        self._recent = MedianEventTime()
        self._recent.add(recent_ms)

    @property
    def recent_ms(self) -> np.ndarray:
        """Recent close times (int64), for the checkpoint."""
        return np.array(self._recent.times_ms, np.int64)

    def add(self, close_ms_R: np.ndarray) -> None:
        """Add the close times of a trained chunk."""
        self._recent.add(close_ms_R.tolist())
        near_R = close_ms_R[close_ms_R <= self._recent.middle_ms + _MAX_AHEAD_MS]
        self.watermark_ms = max(self.watermark_ms, int(near_R.max(initial=0)))


def merge_newest_times(times_ms: Sequence[Sequence[int]]) -> list[int]:
    """Merge the newest times of several workers, taking equally many of each, up to NUM_RECENT."""
    rounds = max((len(worker) for worker in times_ms), default=0)
    newest_first = [worker[-1 - at] for at in range(rounds) for worker in times_ms if at < len(worker)]
    return newest_first[:NUM_RECENT][::-1]
