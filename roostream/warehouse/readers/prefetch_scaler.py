"""How many pieces a worker has in flight, and how many readers that takes: control rules with hysteresis,
without I/O.

The fullness of the trainer's buffer tells whether the readers keep up (Kurian et al., *Scalable Machine
Learning Training Infrastructure for Online Ads Recommendation*, §IV). A buffer that is nearly empty while
training waited adds one piece in flight; one that is nearly full for long removes one. A removal is a trial:
if the buffer empties under it, the trial ends before training waits, and the same number is not tried again
for a time that doubles.
"""

from __future__ import annotations

import dataclasses

LOW, HIGH = 0.5, 0.9  # fullness below which pieces are added, above which they are removed
STALL_WITHIN_S = 2.0  # a stall counts if training waited this recently
SMOOTHING_S = 2.0
FULL_FOR_S = 20.0
TRIAL_FAILS_BELOW = 0.75  # fullness that ends a trial
SETTLES_S = 3.0  # time until one more piece shows in the buffer
MIN_RETRY_S, MAX_RETRY_S = 120.0, 1920.0  # pause before a failed number is tried again
PIECES_A_READER = 2
MIN_DOWN_S = 10.0  # between two readers that are removed


def wanted_in_flight(
    now: int, fullness: float, stalled_s_ago: float, full_s: float, max_in_flight: int
) -> int:
    """Pieces in flight of one worker from now on, in 1..max_in_flight.

    `fullness`: smoothed, 0..1. `stalled_s_ago`: since training last waited. `full_s`: how long `fullness` has
    been above HIGH.
    """
    if fullness < LOW and stalled_s_ago <= STALL_WITHIN_S:
        return min(now + 1, max_in_flight)
    if fullness > HIGH and full_s >= FULL_FOR_S:
        return max(now - 1, 1)
    return max(min(now, max_in_flight), 1)


@dataclasses.dataclass(kw_only=True)
class PrefetchScaler:
    """Pieces in flight of one worker over time. Not thread-safe; seconds of a monotonic clock."""

    max_in_flight: int
    in_flight: int = 1
    fullness: float = 0.0
    _observed_s: float | None = None
    _stalled_s: float = float("-inf")
    _full_since_s: float | None = None
    _changed_s: float = float("-inf")
    _sufficient: int = 0  # the largest number so far; fewer are a trial
    _failed: dict[int, tuple[float, float]] = dataclasses.field(default_factory=dict)
    """Number that was too small → (time of the next trial, pause)."""

    def __post_init__(self) -> None:
        self._sufficient = self.in_flight

    def observe(self, fullness: float, *, stalled: bool, now_s: float) -> int:
        """Note the buffer's fullness and whether training waits; return the pieces in flight from now on.

        The number changes at most once a second, so that a piece that was just added can arrive.
        """
        dt_s = 0.0 if self._observed_s is None else max(now_s - self._observed_s, 0.0)
        share = 1.0 if self._observed_s is None else min(dt_s / SMOOTHING_S, 1.0)
        self._observed_s = now_s
        self.fullness += share * (fullness - self.fullness)
        if stalled:
            self._stalled_s = now_s
        self._full_since_s = (self._full_since_s or now_s) if self.fullness > HIGH else None
        full_s = 0.0 if self._full_since_s is None else now_s - self._full_since_s
        wanted = self._wanted(now_s, full_s)
        if wanted != self.in_flight and now_s - self._changed_s >= 1.0:
            self._full_since_s = None  # a change must show before the next one
            if wanted > self.in_flight:
                self._note_too_few(wanted, now_s)
            self.in_flight, self._changed_s = wanted, now_s
        return self.in_flight

    def _wanted(self, now_s: float, full_s: float) -> int:
        """Apply the rule and what is known of trials."""
        settled = now_s - self._changed_s >= SETTLES_S
        if self.in_flight < self._sufficient and self.fullness < TRIAL_FAILS_BELOW and settled:
            return self.in_flight + 1
        wanted = wanted_in_flight(
            self.in_flight, self.fullness, now_s - self._stalled_s, full_s, self.max_in_flight
        )
        has_failed = wanted < self.in_flight and now_s < self._failed.get(wanted, (now_s, 0.0))[0]
        return self.in_flight if has_failed else wanted

    def _note_too_few(self, wanted: int, now_s: float) -> None:
        if self.in_flight < self._sufficient:
            pause_s = min(2 * self._failed.get(self.in_flight, (0.0, MIN_RETRY_S / 2))[1], MAX_RETRY_S)
            self._failed[self.in_flight] = now_s + pause_s, pause_s
        self._sufficient = max(self._sufficient, wanted)


@dataclasses.dataclass(kw_only=True)
class ReaderScaler:
    """Number of readers for all workers together: it grows at once and shrinks by one in `MIN_DOWN_S`."""

    min_readers: int
    max_readers: int
    wanted: int = 0
    _down_s: float = float("-inf")

    def update(self, in_flight: int, now_s: float) -> int:
        """The wanted number of readers. `in_flight`: pieces in flight of all workers, 0 = nothing to read."""
        needed = (
            min(max(-(-in_flight // PIECES_A_READER), self.min_readers), self.max_readers) if in_flight else 0
        )
        if needed >= self.wanted:
            self.wanted, self._down_s = needed, now_s if needed > self.wanted else self._down_s
        elif now_s - self._down_s >= MIN_DOWN_S:
            self.wanted, self._down_s = self.wanted - 1, now_s
        return self.wanted
