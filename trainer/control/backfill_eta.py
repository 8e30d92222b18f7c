"""How long history takes yet, from how fast all workers train it: smoothed, and unknown where there is no rate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.monitoring.rates import RateMeter, time_left

WINDOW_S = 60.0


class BackfillEta:
    """Of one controller, fed whenever it is asked. Seconds of a monotonic clock."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._meter = RateMeter(window_s)
        self._trained = self._at_commit = 0.0
        self._left: int | None = None  # as of the last commit

    def told(
        self, initial: Mapping[str, Any] | None, trained: float | None, now_s: float
    ) -> dict[str, Any] | None:
        """`initial` as `Phases.progress` gives it, with `eta_s`: [value, low, high] as a lag's, value null = unknown. `trained`:
        requests by all workers since they started; None: one of them doesn't tell."""
        if initial is None:
            self._left = None
            self._meter.clear()
            return None
        left = initial["left"] + (initial["epochs"] - initial["epoch"]) * initial["records"]
        if (
            trained is None or trained < self._trained
        ):  # one began anew: what it trained is counted from there
            self._meter.clear()
            self._left = None
        self._trained = trained or 0.0
        if left != self._left:
            self._left, self._at_commit = left, self._trained
        if trained is not None:
            self._meter.note(now_s, 0.0, trained)
        ahead = max(left - (self._trained - self._at_commit), 0.0)
        return {**initial, "eta_s": list(time_left(ahead, self._meter.consumption))}
