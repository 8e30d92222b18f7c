"""Estimates the current event time of a stream in which any single record may have a wrong time.

One record must not move anything that is bounded by time (a watermark, a horizon, an expiry): a line of a log
with times in a wrong unit would otherwise close, forget or delay everything. Two estimates:

    SteppedEventTime  the newest time; the next record must confirm a jump. For the watermark of a partition.
    MedianEventTime   the median of the newest times; a few wrong times, even consecutive ones, do not move
                      it. For horizons and expiry.

joiner/java/EventTime.java follows `SteppedEventTime` in Flink; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

START = -(1 << 63)
_NONE = 1 << 63  # of unconfirmed times
NUM_RECENT = 15
"""Up to NUM_RECENT // 2 wrong times do not move the median beyond the others."""


class SteppedEventTime(Struct, array_like=True):
    """The newest event time; a single event moves it by at most `max_ms`. START before the first event, which
    is accepted."""

    newest_ms: int = START
    unconfirmed_ms: int = _NONE  # of the previous event, if that was a jump

    def event(self, time_ms: int, max_ms: int) -> None:
        """An event moves it to its own time. A jump of more than `max_ms` must be confirmed by the next
        event; then the smaller time of the two counts."""
        is_jump = time_ms > self.newest_ms + max_ms and self.newest_ms != START
        if is_jump and self.unconfirmed_ms == _NONE:
            self.unconfirmed_ms = time_ms
            return
        self.newest_ms = max(self.newest_ms, min(time_ms, self.unconfirmed_ms) if is_jump else time_ms)
        self.unconfirmed_ms = time_ms if time_ms > self.newest_ms + max_ms else _NONE


class MedianEventTime:
    """`times_ms`: the newest NUM_RECENT in order of arrival; stored in checkpoints as an int64 array."""

    def __init__(self) -> None:
        self.times_ms: list[int] = []

    def add(self, times_ms: Sequence[int]) -> None:
        self.times_ms = [*self.times_ms, *times_ms[-NUM_RECENT:]][-NUM_RECENT:]

    @property
    def is_full(self) -> bool:
        """Below NUM_RECENT times the median is not reliable."""
        return len(self.times_ms) == NUM_RECENT

    @property
    def middle_ms(self) -> int:
        """The median, the lower one of an even number; 0 without times."""
        return sorted(self.times_ms)[(len(self.times_ms) - 1) // 2] if self.times_ms else 0
