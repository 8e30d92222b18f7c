"""Event time of training: what expires rows, and what the manifest says of time.

Letters: R requests.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from roostream.runtime.event_time import NUM_RECENT, MedianEventTime

_MAX_AHEAD_MS = 600_000  # of the middle of the recent close times; the watermark passes over what is later


class TrainingWatermark:
    """The latest close time that isn't far ahead of the middle of the recent ones: no sample's time alone expires rows. It never
    goes back. Several workers' is one: what each takes is gathered (`newest_of`), and all add it in the same order."""

    def __init__(self, watermark_ms: int = 0, recent_ms: Sequence[int] = ()) -> None:
        self.watermark_ms = watermark_ms
        self._recent = MedianEventTime()
        self._recent.add(recent_ms)

    @property
    def recent_ms(self) -> np.ndarray:
        """int64, for the checkpoint."""
        return np.array(self._recent.times_ms, np.int64)

    def add(self, close_ms_R: np.ndarray) -> None:
        """Of a chunk that is trained."""
        self._recent.add(close_ms_R.tolist())
        near_R = close_ms_R[close_ms_R <= self._recent.middle_ms + _MAX_AHEAD_MS]
        self.watermark_ms = max(self.watermark_ms, int(near_R.max(initial=0)))


def newest_of(times_ms: Sequence[Sequence[int]]) -> list[int]:
    """The newest of several workers' newest times, as many of each as there is room for: none pushes the others' out."""
    rounds = max((len(of_one) for of_one in times_ms), default=0)
    newest_first = [of_one[-1 - at] for at in range(rounds) for of_one in times_ms if at < len(of_one)]
    return newest_first[:NUM_RECENT][::-1]
