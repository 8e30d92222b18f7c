"""Which time it is by now in a stream of records of which any single one may have a wrong time.

Nothing that is bounded by time (a watermark, a horizon, what expires) may be moved far by one record: a line of a log in
the wrong unit would close, forget or hold everything. Two rules, one owner:

    SteppedEventTime      a promise that is kept at once: the newest time, but a jump has to be confirmed by the next record. What a
                  partition's watermark is made of.
    MedianEventTime   an estimate behind the newest time: the middle of the newest few. Wrong ones among them, next to each other too,
                  don't move it. What horizons and expiries are made of.

joiner/java/EventTime.java follows `SteppedEventTime` in Flink; a test holds the two against each other.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

START = -(1 << 63)
_NONE = 1 << 63  # of unconfirmed times
NUM_RECENT = 15
"""Wrong times among so many, up to NUM_RECENT // 2 of them, don't move their middle beyond the others."""


class SteppedEventTime(Struct, array_like=True):
    """The newest time, in steps of at most `max_ms` for a single event. START before the first one, which is believed."""

    newest_ms: int = START
    unconfirmed_ms: int = _NONE  # of the event before, if that was a jump

    def event(self, time_ms: int, max_ms: int) -> None:
        """An event moves it to its own time, unless that is a jump of more than `max_ms`: then the next event has to confirm it,
        and the smaller of the two counts."""
        is_jump = time_ms > self.newest_ms + max_ms and self.newest_ms != START
        if is_jump and self.unconfirmed_ms == _NONE:
            self.unconfirmed_ms = time_ms
            return
        self.newest_ms = max(self.newest_ms, min(time_ms, self.unconfirmed_ms) if is_jump else time_ms)
        self.unconfirmed_ms = time_ms if time_ms > self.newest_ms + max_ms else _NONE


class MedianEventTime:
    """`times_ms`: the newest NUM_RECENT, in the order in which they came; in checkpoints as an int64 array."""

    def __init__(self) -> None:
        self.times_ms: list[int] = []

    def add(self, times_ms: Sequence[int]) -> None:
        self.times_ms = [*self.times_ms, *times_ms[-NUM_RECENT:]][-NUM_RECENT:]

    @property
    def is_full(self) -> bool:
        """Fewer than NUM_RECENT may all be wrong."""
        return len(self.times_ms) == NUM_RECENT

    @property
    def middle_ms(self) -> int:
        """As many are later as are not; of two middles the earlier. 0 of none."""
        return sorted(self.times_ms)[(len(self.times_ms) - 1) // 2] if self.times_ms else 0
