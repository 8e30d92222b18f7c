"""Labels of a closed request from its engagements, as the schema's `[[label]]` says."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from joiner.state import Folded
from roo.schema import Label, Schema

_FLOAT32_MAX = 3.4028234663852886e38

_FOLDS: dict[str, Callable[[list[float]], float]] = {
    "any": lambda values: 1.0,
    "count": lambda values: float(len(values)),
    "sum": sum,
    "max": max,
    "last": lambda values: values[-1],
}


def fold_labels(schema: Schema, num_items: int, folded: Sequence[Folded], *, request_ms: int, window_ms: int) -> list[float]:
    """n x T labels, row-major; 0 where no engagement counts.

    `folded` is in (time, event id) order. An engagement counts for a label if its action is the label's, its value is at
    least the threshold (if there is one), and it came within the label's own window, or the request's (`window_ms`) if the
    label has none: what comes later is in the corrections, but changes no label.
    """
    of_item: list[list[Folded]] = [[] for _ in range(num_items)]
    for engagement in folded:
        of_item[engagement.candidate].append(engagement)
    return [_fold(label, events, request_ms, window_ms) for events in of_item for label in schema.labels]


def _fold(label: Label, events: list[Folded], request_ms: int, window_ms: int) -> float:
    if not events:
        return 0.0
    until_ms = request_ms + (label.window_ms or window_ms)
    values = [
        e.value
        for e in events
        if e.action == label.action and e.time_ms <= until_ms and (not label.threshold or e.value >= label.threshold)
    ]
    if not values:
        return 0.0
    return min(max(_FOLDS[label.fold](values), -_FLOAT32_MAX), _FLOAT32_MAX)
