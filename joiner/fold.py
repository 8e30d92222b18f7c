"""Labels of a closed request from its engagements, as the schema's `[[label]]` says.

An engagement counts for a label if its action is the label's, its value is at least the threshold (if there is one), and it came
within the label's own window, or the request's if the label has none: what comes later is in the corrections, but changes no
label. Labels are tallied candidate by candidate, one engagement after the other in (time, event id) order, so that a correction
needs the tally alone and none of the engagements before it.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

from joiner.state import Tally
from roostream.schema.schema import Schema

_FLOAT32_MAX = 3.4028234663852886e38


Fact: TypeAlias = tuple[int, int, str, float, int]
"""An engagement as it is folded: (time in ms, no sooner than its item was shown; event id; action; value; candidate)."""


class Labels:
    """The labels of one schema."""

    def __init__(self, schema: Schema) -> None:
        self.count = len(schema.labels)
        self._of_action: dict[
            str, list[tuple[int, str, int, float]]
        ] = {}  # place, fold, own window, threshold
        for n, label in enumerate(schema.labels):
            self._of_action.setdefault(label.action, []).append(
                (n, label.fold, label.window_ms, label.threshold)
            )
        self._pack = struct.Struct(f"<{self.count}f").pack
        self._newest = (
            [(0, 0)] * self.count if any(label.fold in ("max", "last") for label in schema.labels) else []
        )

    def nothing(self) -> Tally:
        """Of a candidate without engagements: every label is 0."""
        return Tally([0.0] * self.count, self._newest.copy())

    def tally(
        self, tallies: dict[int, Tally], facts: Iterable[Fact], request_ms: int, window_ms: int
    ) -> None:
        """Count engagements that follow those in `tallies`, which are by candidate and are added to; one that comes out of order
        is no `last` one. The times: the request's, and its window."""
        of_action = self._of_action
        for at_ms, event_id, action, value, candidate in facts:
            tally = tallies.get(candidate)
            if tally is None:
                tally = tallies[candidate] = self.nothing()
            for n, fold, own_ms, threshold in of_action.get(action, ()):
                if at_ms > request_ms + (own_ms or window_ms) or (threshold and value < threshold):
                    continue
                if fold == "any":
                    tally.values[n] = 1.0
                elif fold == "count":
                    tally.values[n] += 1.0
                elif fold == "sum":
                    tally.values[n] += value
                else:
                    newest, this = tally.newest[n], (at_ms, event_id)
                    if newest == (0, 0) or (fold == "last" and this >= newest):
                        tally.values[n] = value
                    elif fold == "max":
                        tally.values[n] = max(tally.values[n], value)
                    tally.newest[n] = max(newest, this)

    def pack(self, tally: Tally) -> bytes:
        """f4 [T], little-endian; what is too large for it is the largest."""
        return _packed(self._pack, tally.values)

    def pack_all(self, tallies: Mapping[int, Tally], num_candidates: int) -> bytes:
        """f4 [candidates, T]: 0 for those without a tally."""
        count, values = self.count, [0.0] * (self.count * num_candidates)
        for candidate, tally in tallies.items():
            values[count * candidate : count * (candidate + 1)] = tally.values
        return _packed(_floats(len(values)), values)


def _packed(pack: Callable[..., bytes], values: list[float]) -> bytes:
    try:
        return pack(*values)
    except OverflowError:
        return pack(*[min(max(value, -_FLOAT32_MAX), _FLOAT32_MAX) for value in values])


@functools.lru_cache(maxsize=256)
def _floats(n: int) -> Callable[..., bytes]:
    return struct.Struct(f"<{n}f").pack
