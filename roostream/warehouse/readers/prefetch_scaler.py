"""How many units a worker has under way, and how many readers that takes: a rule with hysteresis, pure.

The fullness of the trainer's buffer says whether readers keep up (Kurian et al., *Scalable Machine Learning Training
Infrastructure for Online Ads Recommendation*, §IV): too empty while training waited, one unit
more; nearly full for long, one less. One less is a trial: a buffer that empties under it ends it before training waits, and what
was too few isn't tried again for a time that doubles.
"""

from __future__ import annotations

import dataclasses

LOW, HIGH = 0.5, 0.9  # of the buffer's capacity
STALL_WITHIN_S = 2.0  # training waited for data within it
SMOOTHED_S = 2.0
FULL_FOR_S = 20.0
BACK_BELOW = 0.75  # of the capacity, where fewer are under way than there once were
SETTLES_S = 3.0  # until one more shows in the buffer
FAILED_FOR_S, MAX_FAILED_FOR_S = 120.0, 1920.0  # that what was too few isn't tried again, first and at most
UNITS_A_READER = 2
MIN_DOWN_S = 10.0  # between two readers that are taken away


def wanted_in_flight(now: int, fullness: float, stalled_s_ago: float, full_s: float, most: int) -> int:
    """Units of one worker from now on, at least 1 and at most `most`. `fullness`: smoothed, of 1; `stalled_s_ago`: since training
    last waited; `full_s`: for how long `fullness` has been above HIGH."""
    if fullness < LOW and stalled_s_ago <= STALL_WITHIN_S:
        return min(now + 1, most)
    if fullness > HIGH and full_s >= FULL_FOR_S:
        return max(now - 1, 1)
    return max(min(now, most), 1)


@dataclasses.dataclass(kw_only=True)
class PrefetchScaler:
    """One worker's units in flight over time. Not thread-safe; seconds of a monotonic clock."""

    most: int
    in_flight: int = 1
    fullness: float = 0.0
    _seen_s: float | None = None
    _stalled_s: float = float("-inf")
    _full_since_s: float | None = None
    _changed_s: float = float("-inf")
    _enough: int = 0  # so many were under way once; fewer are a trial
    _failed: dict[int, tuple[float, float]] = dataclasses.field(
        default_factory=dict
    )  # number → not before, for how long

    def __post_init__(self) -> None:
        self._enough = self.in_flight

    def observe(self, fullness: float, *, stalled: bool, now_s: float) -> int:
        """The buffer is so full now, and training waits for it or doesn't; the units in flight from now on. One more a second at
        most, so that a unit that was just added can come."""
        dt_s = 0.0 if self._seen_s is None else max(now_s - self._seen_s, 0.0)
        share = 1.0 if self._seen_s is None else min(dt_s / SMOOTHED_S, 1.0)
        self._seen_s = now_s
        self.fullness += share * (fullness - self.fullness)
        if stalled:
            self._stalled_s = now_s
        self._full_since_s = (self._full_since_s or now_s) if self.fullness > HIGH else None
        full_s = 0.0 if self._full_since_s is None else now_s - self._full_since_s
        wanted = self._wanted(now_s, full_s)
        if wanted != self.in_flight and now_s - self._changed_s >= 1.0:
            self._full_since_s = None  # a change has to show before the next one
            if wanted > self.in_flight:
                self._note(wanted, now_s)
            self.in_flight, self._changed_s = wanted, now_s
        return self.in_flight

    def _wanted(self, now_s: float, full_s: float) -> int:
        """The rule, and what is known of trials."""
        settled = now_s - self._changed_s >= SETTLES_S
        if self.in_flight < self._enough and self.fullness < BACK_BELOW and settled:
            return self.in_flight + 1
        wanted = wanted_in_flight(self.in_flight, self.fullness, now_s - self._stalled_s, full_s, self.most)
        has_failed = wanted < self.in_flight and now_s < self._failed.get(wanted, (now_s, 0.0))[0]
        return self.in_flight if has_failed else wanted

    def _note(self, wanted: int, now_s: float) -> None:
        """What is under way was too few."""
        if self.in_flight < self._enough:
            for_s = min(2 * self._failed.get(self.in_flight, (0.0, FAILED_FOR_S / 2))[1], MAX_FAILED_FOR_S)
            self._failed[self.in_flight] = now_s + for_s, for_s
        self._enough = max(self._enough, wanted)


@dataclasses.dataclass(kw_only=True)
class ReaderScaler:
    """Readers that are wanted for all workers together: up at once, down one in `MIN_DOWN_S`."""

    least: int
    most: int
    wanted: int = 0
    _down_s: float = float("-inf")

    def of(self, units_in_flight: int, now_s: float) -> int:
        """From now on; `units_in_flight`: the sum over the workers, 0 where nothing is to be read."""
        needed = (
            min(max(-(-units_in_flight // UNITS_A_READER), self.least), self.most) if units_in_flight else 0
        )
        if needed >= self.wanted:
            self.wanted, self._down_s = needed, now_s if needed > self.wanted else self._down_s
        elif now_s - self._down_s >= MIN_DOWN_S:
            self.wanted, self._down_s = self.wanted - 1, now_s
        return self.wanted
