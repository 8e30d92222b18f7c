"""Rates of growing counters with confidence intervals.

An interval comes from batch means: the increments of the window are grouped into at most ten blocks, whose
rates are independent enough for Student's t at 95 % (Law and Kelton, Simulation Modeling and Analysis,
§9.5.3).
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from typing import NamedTuple

_BLOCKS = 10
# 97.5 % quantiles by degrees of freedom.
_T = dict(enumerate((4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262), start=2))


class Estimate(NamedTuple):
    """A rate per second with its interval; without bounds if there are too few observations."""

    value: float
    low: float | None = None
    high: float | None = None


class TimeLeft(NamedTuple):
    """Seconds until a lag is gone; None = unknown. `high_s` None beside a value: no upper bound is known."""

    s: float | None
    low_s: float | None
    high_s: float | None


UNKNOWN_TIME_LEFT = TimeLeft(None, None, None)


class RateMeter:
    """Rates of arrival, consumption and drain over the last `window_s` of a monotonic clock."""

    def __init__(self, window_s: float) -> None:
        self.window_s = window_s
        self._history: deque[tuple[float, float, float]] = deque()  # (time, total arrived, total consumed)

    def update(self, now_s: float, arrived: float, consumed: float) -> None:
        """Add totals, which never shrink."""
        self._history.append((now_s, arrived, consumed))
        while len(self._history) > 2 and now_s - self._history[0][0] > self.window_s:
            self._history.popleft()

    def clear(self) -> None:
        self._history.clear()

    @property
    def arrival(self) -> Estimate | None:
        """None until there are two observations, as for the other rates."""
        return self._estimate(1.0, 0.0)

    @property
    def consumption(self) -> Estimate | None:
        return self._estimate(0.0, 1.0)

    @property
    def drain(self) -> Estimate | None:
        """How fast a lag shrinks; negative while it grows."""
        return self._estimate(-1.0, 1.0)

    def _estimate(self, of_arrived: float, of_consumed: float) -> Estimate | None:
        points = [
            (at_s, of_arrived * arrived + of_consumed * consumed) for at_s, arrived, consumed in self._history
        ]
        if len(points) < 2 or points[-1][0] <= points[0][0]:
            return None
        elapsed_s = points[-1][0] - points[0][0]
        rate = (points[-1][1] - points[0][1]) / elapsed_s
        n = min(len(points) - 1, _BLOCKS)
        if n < 3:
            return Estimate(rate)
        ends = [points[round(k * (len(points) - 1) / n)] for k in range(n + 1)]
        residuals = [b[1] - a[1] - rate * (b[0] - a[0]) for a, b in itertools.pairwise(ends)]
        half = _T[n - 1] * math.sqrt(n / (n - 1) * sum(miss * miss for miss in residuals)) / elapsed_s
        return Estimate(rate, rate - half, rate + half)


def time_left(records: float, drain: Estimate | None) -> TimeLeft:
    """Time until `records` are gone at this drain rate, with bounds from the interval of the rate."""
    if not records:
        return TimeLeft(0.0, 0.0, 0.0)
    if drain is None or drain.value <= 0:
        return UNKNOWN_TIME_LEFT
    low_s = records / drain.high if drain.high is not None and drain.high > 0 else None
    high_s = records / drain.low if drain.low is not None and drain.low > 0 else None
    return TimeLeft(records / drain.value, low_s, high_s)
