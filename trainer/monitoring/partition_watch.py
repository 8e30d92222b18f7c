"""One partition, observed again and again: how far behind it is, how fast it moves, whether it is stuck. See `caught_up`."""

from __future__ import annotations

import dataclasses
from collections import deque

from roostream.runtime.kafka.consumer import PartitionLag
from trainer.monitoring.rates import RateMeter

_MAX_ENDS = 512


@dataclasses.dataclass(frozen=True, kw_only=True)
class Patience:
    """Where states change; seconds of a monotonic clock unless said otherwise."""

    lag_ms: int  # event time: so little is as good as nothing
    hold_s: float = 2.0  # for how long it must have been little (or, up to twice lag_ms, too much) for the state to change
    pinned_s: float = 10.0  # an open transaction that hides records is in the way after this
    stalled_s: float = 60.0  # records are there and none is consumed
    idle_s: float = 60.0  # nothing comes, and nothing is left
    loud_s: float = 3600.0  # for how long a loss is told as the reason
    window_s: float = 60.0  # of rates


class PartitionWatch:
    """Facts of one partition after the last `note`; which state follows from them is decided in `caught_up`."""

    def __init__(self, lag: PartitionLag, now_s: float, patience: Patience) -> None:
        self.patience, self.lag = (
            patience,
            dataclasses.replace(lag, lost=0),
        )  # a loss before the first look is told, too
        self.start_end = lag.stable_end  # what was there before the start ends here
        self.arrived = self.consumed = self.lost = self._gap = 0
        self.meter = RateMeter(patience.window_s)
        self.moved_s = self.grew_s = now_s
        self.is_known, self.is_small = True, False
        self._lost_s = self._pinned_since_s = self._beyond_since_s = self._small_since_s = (
            self._large_since_s
        ) = -1.0
        self._ends: deque[tuple[float, int]] = deque(
            [(now_s, lag.stable_end)]
        )  # when a stable end was first seen
        self._newest = (
            lag.newest_ms,
            lag.high_watermark,
        )  # newest event time, and behind which offset at the latest it lies
        self.note(lag, now_s)
        self._gap = 0

    def note(self, lag: PartitionLag, now_s: float) -> None:
        """The next observation."""
        before, self.lag, self.is_known = self.lag, lag, True
        self._count(before, now_s)
        if lag.stable_end != self._ends[-1][1]:
            self._ends.append((now_s, lag.stable_end))
            if len(self._ends) > _MAX_ENDS:
                del self._ends[1]
        while len(self._ends) > 1 and self._ends[0][1] <= lag.position:
            self._ends.popleft()
        if lag.newest_ms != self._newest[0]:
            self._newest = lag.newest_ms, lag.high_watermark
        self._pinned_since_s = self._since(
            self._pinned_since_s, self._hides() and before.stable_end == lag.stable_end, now_s
        )
        beyond = lag.position > lag.high_watermark and before.high_watermark == lag.high_watermark
        self._beyond_since_s = self._since(self._beyond_since_s, beyond, now_s)
        lag_ms = self.lag_ms(now_s)
        self.is_small = lag_ms is not None and lag_ms <= self.patience.lag_ms and not self.obstacle(now_s)
        self._small_since_s = self._since(self._small_since_s, self.is_small, now_s)
        self._large_since_s = self._since(self._large_since_s, not self.is_small, now_s)

    def forget(self) -> None:
        """It can't be observed now: rates and durations begin anew."""
        self.is_known = False
        self.meter.clear()
        self._pinned_since_s = self._beyond_since_s = self._small_since_s = self._large_since_s = -1.0

    def lag_ms(self, now_s: float) -> int | None:
        """Event time from the last record given to the newest one; where that can't be told, or is less, for how long the next
        record has been there to be read, by the monotonic clock. None: behind, and no record was given yet.

        The newest event time of a partition may lie behind the position (a clock was ahead for a while): then it says nothing
        about what is still to be read.
        """
        lag = self.lag
        if not lag.records:
            return 0
        if not lag.position_ms:
            return None
        waits_ms = int(1000 * (now_s - self._ends[0][0]))
        _, behind = self._newest
        return waits_ms if lag.position >= behind else max(lag.event_ms, waits_ms)

    @property
    def retention_share(self) -> float | None:
        kept = self.lag.stable_end - self.lag.oldest
        return min(self.lag.records / kept, 1.0) if self.lag.oldest and kept > 0 else None

    def is_idle(self, now_s: float) -> bool:
        return not self.lag.records and now_s - self.grew_s >= self.patience.idle_s

    def is_stuck(self, now_s: float) -> bool:
        """Nothing was consumed for long, though records are there."""
        return self.lag.records > 0 and now_s - max(self.moved_s, self._ends[0][0]) >= self.patience.stalled_s

    def small_for_s(self, now_s: float) -> float:
        return now_s - self._small_since_s if self._small_since_s >= 0 else 0.0

    def large_for_s(self, now_s: float) -> float:
        return now_s - self._large_since_s if self._large_since_s >= 0 else 0.0

    def obstacle(self, now_s: float) -> str:
        """What keeps the rest from being read, "" = nothing."""
        lag = self.lag
        if lag.position < lag.oldest:
            return f"{lag.oldest - lag.position} records were deleted before they were read: retention is too short"
        if self._beyond_since_s >= 0 and now_s - self._beyond_since_s >= self.patience.pinned_s:
            return f"the log ends at {lag.high_watermark}, before {lag.position}, which was read: records were lost"
        hidden_ms = lag.newest_ms - lag.position_ms if lag.position_ms and self._hides() else 0
        pinned = self._pinned_since_s >= 0 and now_s - self._pinned_since_s >= self.patience.pinned_s
        if pinned or hidden_ms > self.patience.lag_ms:
            return f"an open transaction hides {lag.hidden} records from offset {lag.stable_end} on"
        return ""

    def loss(self, now_s: float) -> str:
        """A loss that is to be told, "" = none."""
        if not self.lost or now_s - self._lost_s > self.patience.loud_s:
            return ""
        return f"{self.lost} records were gone before they were read"

    def _hides(self) -> bool:
        return not self.lag.records and self.lag.hidden > 0

    def _count(self, before: PartitionLag, now_s: float) -> None:
        lag, lost = self.lag, max(self.lag.lost - before.lost, 0)
        if lost:
            self.lost, self._lost_s = self.lost + lost, now_s
        if lag.position != before.position:
            self.moved_s = now_s
        if lag.stable_end != before.stable_end:
            self.grew_s = now_s
        self.arrived += max(lag.stable_end - before.stable_end, 0)
        moved = max(
            lag.position - before.position, 0
        )  # a position that was put back is no consumption, nor is the way over a gap
        self._gap += lost
        over = min(self._gap, moved)
        self._gap -= over
        self.consumed += moved - over
        self.meter.note(now_s, self.arrived, self.consumed)

    @staticmethod
    def _since(since_s: float, holds: bool, now_s: float) -> float:
        """When it began to hold; -1 = it doesn't."""
        return -1.0 if not holds else now_s if since_s < 0 else since_s
