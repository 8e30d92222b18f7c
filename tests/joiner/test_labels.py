"""Labels from engagements: folds, windows and thresholds. Folding one by one equals folding all at once."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import pytest

from joiner.labels import JoinedEngagement, LabelFolder
from roostream.schema.schema import Label, Schema

DWELLS: list[JoinedEngagement] = [
    (1_010, 1, "dwell", 3.0, 3),
    (1_020, 2, "dwell", 9.0, 3),
    (1_090, 4, "dwell", 5.0, 3),
    (1_091, 5, "click", 7.0, 3),
]


def labels(
    schema_labels: Sequence[Label], facts: Sequence[JoinedEngagement], window_ms: int = 100
) -> list[float]:
    folder = LabelFolder(Schema(labels=tuple(schema_labels)))
    at_once, one_by_one = {3: folder.empty()}, {3: folder.empty()}
    folder.fold(at_once, facts, 1_000, window_ms)
    for fact in facts:
        folder.fold(one_by_one, [fact], 1_000, window_ms)
    assert at_once == one_by_one
    assert folder.pack_all(at_once, 4) == bytes(12 * folder.num_labels) + folder.pack(at_once[3])
    return list(struct.unpack(f"<{folder.num_labels}f", folder.pack(at_once[3])))


@pytest.mark.parametrize(
    ("fold", "value", "single_value"),
    [("any", 1.0, 1.0), ("count", 3.0, 1.0), ("sum", 17.0, -4.0), ("max", 9.0, -4.0), ("last", 5.0, -4.0)],
)
def test_each_fold_of_an_action_and_zero_without_any(fold: str, value: float, single_value: float) -> None:
    label = Label(name="dwell", action="dwell", fold=fold)  # type: ignore[arg-type]
    assert labels([label], DWELLS) == [value]
    assert labels([label], [(1_030, 3, "dwell", -4.0, 3)]) == [single_value]
    assert labels([label], []) == labels([label], DWELLS[3:]) == [0.0]


@pytest.mark.parametrize(
    ("window", "label_window", "count"),
    [(100, 0, 3.0), (89, 0, 2.0), (90, 0, 3.0), (10, 100, 3.0), (100, 15, 1.0)],
)
def test_a_label_counts_within_its_own_window_or_the_joins(
    window: int, label_window: int, count: float
) -> None:
    label = Label(name="dwell", action="dwell", fold="count", window_ms=label_window)
    assert labels([label], DWELLS, window) == [count]


def test_a_threshold_leaves_smaller_values_out() -> None:
    threshold_labels = [
        Label(name="long", action="dwell", threshold=5.0),
        Label(name="longs", action="dwell", fold="count", threshold=5.0),
    ]
    assert labels(threshold_labels, DWELLS) == [1.0, 2.0] and labels(threshold_labels, DWELLS[:1]) == [
        0.0,
        0.0,
    ]


def test_a_sum_beyond_float32_is_the_largest_finite_one() -> None:
    huge: list[JoinedEngagement] = [(1_000, n, "x", 3e38, 3) for n in (1, 2, 3)]
    assert labels([Label(name="sum", action="x", fold="sum")], huge) == [3.4028234663852886e38]


def test_an_older_engagement_does_not_become_the_last() -> None:
    label = Label(name="dwell", action="dwell", fold="last")
    assert labels([label], [DWELLS[1], DWELLS[0]]) == [9.0]
    assert labels([label], [(1_010, 2, "dwell", 1.0, 3), (1_010, 1, "dwell", 2.0, 3)]) == [1.0], (
        "at equal times, the larger event id is the last"
    )
