"""Labels of a closed request from its engagements, as the schema's `[[label]]` says.

An engagement counts for a label if its action is the label's, its value is at least the threshold (if there is one), and it came
within the label's own window, or the request's if the label has none: what comes later is in the corrections, but changes no
label. Labels are tallied candidate by candidate, one engagement after the other in (time, event id) order, so that a correction
needs the tally alone and none of the engagements before it.
"""

from __future__ import annotations

import struct
from typing import TypeAlias

from joiner.state import Tally
from roo.schema import Label, Schema

_FLOAT32_MAX = 3.4028234663852886e38


Fact: TypeAlias = tuple[int, int, str, float]
"""An engagement as it is folded: (time in ms, no sooner than its item was shown; event id; action; value)."""


class Labels:
    """The labels of one schema."""

    def __init__(self, schema: Schema) -> None:
        self.count = len(schema.labels)
        self._of_action: dict[str, list[tuple[int, Label]]] = {}
        for n, label in enumerate(schema.labels):
            self._of_action.setdefault(label.action, []).append((n, label))
        self._pack = struct.Struct(f"<{self.count}f").pack

    def nothing(self) -> Tally:
        """Of a candidate without engagements: every label is 0."""
        return Tally([0.0] * self.count, [(0, 0)] * self.count)

    def add(self, tally: Tally, fact: Fact, request_ms: int, window_ms: int) -> None:
        """Count an engagement that follows those in `tally`; one that comes out of order is no `last` one. The times: the
        request's, and its window."""
        at_ms, event_id, action, value = fact
        for n, label in self._of_action.get(action, ()):
            if at_ms > request_ms + (label.window_ms or window_ms) or (label.threshold and value < label.threshold):
                continue
            newest, this = tally.newest[n], (at_ms, event_id)
            tally.values[n] = _fold(label.fold, tally.values[n], value, first=newest == (0, 0), last=this >= newest)
            if this > newest:
                tally.newest[n] = this

    def pack(self, tally: Tally) -> bytes:
        """f4 [T], little-endian; what is too large for it is the largest."""
        try:
            return self._pack(*tally.values)
        except OverflowError:
            return self._pack(*[min(max(value, -_FLOAT32_MAX), _FLOAT32_MAX) for value in tally.values])


def _fold(fold: str, before: float, value: float, *, first: bool, last: bool) -> float:
    if fold == "any":
        return 1.0
    if fold == "count":
        return before + 1.0
    if fold == "sum":
        return before + value
    if first:
        return value
    if fold == "max":
        return max(before, value)
    return value if last else before
