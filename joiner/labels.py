"""Computes the labels of a closed request from its engagements, by the `[[label]]` tables of the schema.

An engagement counts for a label if it has the label's action, its value reaches the label's threshold, and it
came within the label's window. A label may have no threshold; its window is by default the request's. Later
engagements appear in corrections but change no label. Labels are aggregated a candidate at a time in (time,
event id) order, so that a correction needs only the aggregate and none of the earlier engagements.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

from joiner.state import LabelAggregate
from roostream.schema.schema import Schema

_FLOAT32_MAX = 3.4028234663852886e38


JoinedEngagement: TypeAlias = tuple[int, int, str, float, int]
"""(join time in ms, event id, action, value, candidate). The join time is not before the item was shown."""


class LabelFolder:
    """The labels of one schema."""

    def __init__(self, schema: Schema) -> None:
        self.num_labels = len(schema.labels)
        # Action → (label index, fold, own window, threshold).
        self._labels_of_action: dict[str, list[tuple[int, str, int, float]]] = {}
        for n, label in enumerate(schema.labels):
            self._labels_of_action.setdefault(label.action, []).append(
                (n, label.fold, label.window_ms, label.threshold)
            )
        self._pack = struct.Struct(f"<{self.num_labels}f").pack
        needs_newest = any(label.fold in ("max", "last") for label in schema.labels)
        self._newest = [(0, 0)] * self.num_labels if needs_newest else []

    def empty(self) -> LabelAggregate:
        """The aggregate of a candidate without engagements: every label is 0."""
        return LabelAggregate([0.0] * self.num_labels, self._newest.copy())

    def fold(
        self,
        aggregates: dict[int, LabelAggregate],
        engagements: Iterable[JoinedEngagement],
        request_ms: int,
        window_ms: int,
    ) -> None:
        """Add engagements to `aggregates` (by candidate). They should be in order: an older one never becomes
        a `last` label.

        `request_ms`, `window_ms`: time and window of the request.
        """
        labels_of_action = self._labels_of_action
        for join_ms, event_id, action, value, candidate in engagements:
            aggregate = aggregates.get(candidate)
            if aggregate is None:
                aggregate = aggregates[candidate] = self.empty()
            for n, fold, label_window_ms, threshold in labels_of_action.get(action, ()):
                if join_ms > request_ms + (label_window_ms or window_ms) or (threshold and value < threshold):
                    continue
                if fold == "any":
                    aggregate.values[n] = 1.0
                elif fold == "count":
                    aggregate.values[n] += 1.0
                elif fold == "sum":
                    aggregate.values[n] += value
                else:
                    newest, this = aggregate.newest[n], (join_ms, event_id)
                    if newest == (0, 0) or (fold == "last" and this >= newest):
                        aggregate.values[n] = value
                    elif fold == "max":
                        aggregate.values[n] = max(aggregate.values[n], value)
                    aggregate.newest[n] = max(newest, this)

    def pack(self, aggregate: LabelAggregate) -> bytes:
        """f4 [labels], little-endian; values beyond float32 are clipped."""
        return _pack(self._pack, aggregate.values)

    def pack_all(self, aggregates: Mapping[int, LabelAggregate], num_candidates: int) -> bytes:
        """f4 [candidates, labels]; 0 for candidates without an aggregate."""
        width = self.num_labels
        values = [0.0] * (width * num_candidates)
        for candidate, aggregate in aggregates.items():
            values[width * candidate : width * (candidate + 1)] = aggregate.values
        return _pack(_float_packer(len(values)), values)


def _pack(pack: Callable[..., bytes], values: list[float]) -> bytes:
    try:
        return pack(*values)
    except OverflowError:
        return pack(*[min(max(value, -_FLOAT32_MAX), _FLOAT32_MAX) for value in values])


@functools.lru_cache(maxsize=256)
def _float_packer(n: int) -> Callable[..., bytes]:
    return struct.Struct(f"<{n}f").pack
