"""Labels from engagements: each fold, windows, thresholds."""

from __future__ import annotations

import pytest

from joiner.fold import fold_labels
from joiner.state import Folded
from roo.schema import Label, Schema

EVENTS = [
    Folded(1, 0, "dwell", 3.0, 1_010),
    Folded(2, 0, "dwell", 9.0, 1_020),
    Folded(3, 1, "dwell", -4.0, 1_030),
    Folded(4, 0, "dwell", 5.0, 1_090),
    Folded(5, 0, "click", 7.0, 1_091),
]


@pytest.mark.parametrize(
    ("fold", "first", "second"),
    [("any", 1.0, 1.0), ("count", 3.0, 1.0), ("sum", 17.0, -4.0), ("max", 9.0, -4.0), ("last", 5.0, -4.0)],
)
def test_each_fold_of_an_action_and_zero_without_any(fold: str, first: float, second: float) -> None:
    schema = Schema(labels=(Label(name="dwell", action="dwell", fold=fold),))  # type: ignore[arg-type]
    assert fold_labels(schema, 3, EVENTS, request_ms=1_000, window_ms=100) == [first, second, 0.0]


@pytest.mark.parametrize(
    ("window", "label_window", "count"), [(100, 0, 3.0), (89, 0, 2.0), (90, 0, 3.0), (10, 100, 3.0), (100, 15, 1.0)]
)
def test_a_label_counts_within_its_own_window_or_the_joins(window: int, label_window: int, count: float) -> None:
    schema = Schema(labels=(Label(name="dwell", action="dwell", fold="count", window_ms=label_window),))
    assert fold_labels(schema, 1, EVENTS[:2] + EVENTS[3:], request_ms=1_000, window_ms=window) == [count]


def test_a_threshold_leaves_smaller_values_out() -> None:
    labels = (Label(name="long", action="dwell", threshold=5.0), Label(name="longs", action="dwell", fold="count", threshold=5.0))
    assert fold_labels(Schema(labels=labels), 2, EVENTS, request_ms=1_000, window_ms=100) == [1.0, 2.0, 0.0, 0.0]


def test_a_sum_beyond_float32_stays_finite() -> None:
    schema = Schema(labels=(Label(name="sum", action="x", fold="sum"),))
    huge = [Folded(n, 0, "x", 3e38, 1_000) for n in range(3)]
    assert fold_labels(schema, 1, huge, request_ms=1_000, window_ms=1) == [3.4028234663852886e38]
