"""How fast counters grow, and how sure that is.

An interval comes from the batch means of the window: its increments are put together to at most ten blocks, whose rates vary
independently enough for Student's t (Law and Kelton, Simulation Modeling and Analysis, §9.5.3). About 95 %.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from typing import NamedTuple

_BLOCKS = 10
_T = {
    2: 4.303,
    3: 3.182,
    4: 2.776,
    5: 2.571,
    6: 2.447,
    7: 2.365,
    8: 2.306,
    9: 2.262,
}  # 97.5 % quantile by degrees of freedom


class Estimate(NamedTuple):
    """Per second. Without bounds where too few observations are there to tell."""

    value: float
    low: float | None = None
    high: float | None = None


class TimeLeft(NamedTuple):
    """Seconds until a lag is gone; None = not foreseeable. `high_s` None beside a value: no bound above is known."""

    s: float | None
    low_s: float | None
    high_s: float | None


UNKNOWN_TIME_LEFT = TimeLeft(None, None, None)


class RateMeter:
    """Sums of what came, what was consumed; over the last `window_s` of a monotonic clock."""

    def __init__(self, window_s: float) -> None:
        self.window_s = window_s
        self._history: deque[tuple[float, float, float]] = deque()  # (when, arrived in all, consumed in all)

    def note(self, now_s: float, arrived: float, consumed: float) -> None:
        """Totals, which never shrink."""
        self._history.append((now_s, arrived, consumed))
        while len(self._history) > 2 and now_s - self._history[0][0] > self.window_s:
            self._history.popleft()

    def clear(self) -> None:
        self._history.clear()

    @property
    def arrival(self) -> Estimate | None:
        """None before there are two observations; so below."""
        return self._estimate(1.0, 0.0)

    @property
    def consumption(self) -> Estimate | None:
        return self._estimate(0.0, 1.0)

    @property
    def drain(self) -> Estimate | None:
        """By how much a lag shrinks; negative while it grows."""
        return self._estimate(-1.0, 1.0)

    def _estimate(self, of_arrived: float, of_consumed: float) -> Estimate | None:
        points = [
            (at_s, of_arrived * arrived + of_consumed * consumed) for at_s, arrived, consumed in self._history
        ]
        if len(points) < 2 or points[-1][0] <= points[0][0]:
            return None
        elapsed_s, rate = (
            points[-1][0] - points[0][0],
            (points[-1][1] - points[0][1]) / (points[-1][0] - points[0][0]),
        )
        n = min(len(points) - 1, _BLOCKS)
        if n < 3:
            return Estimate(rate)
        ends = [points[round(k * (len(points) - 1) / n)] for k in range(n + 1)]
        misses = [b[1] - a[1] - rate * (b[0] - a[0]) for a, b in itertools.pairwise(ends)]
        half = _T[n - 1] * math.sqrt(n / (n - 1) * sum(miss * miss for miss in misses)) / elapsed_s
        return Estimate(rate, rate - half, rate + half)


def time_left(records: float, drain: Estimate | None) -> TimeLeft:
    """Until `records` are gone at this rate of drain: between what the fastest and the slowest likely rate make of it."""
    if not records:
        return TimeLeft(0.0, 0.0, 0.0)
    if drain is None or drain.value <= 0:
        return UNKNOWN_TIME_LEFT
    low_s = records / drain.high if drain.high is not None and drain.high > 0 else None
    high_s = records / drain.low if drain.low is not None and drain.low > 0 else None
    return TimeLeft(records / drain.value, low_s, high_s)
