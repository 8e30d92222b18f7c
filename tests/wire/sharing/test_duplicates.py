"""Statistics of repeated values in a log, for batches of requests whose repetition is known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from roostream.wire.dedup import dedupe_factor
from roostream.wire.duplicate_statistics import EVERYTHING, DuplicateStatistics
from tests.models.model_cases import make_batch, make_schema
from tests.models.returning_users import GROWING_HISTORIES, UNCHANGED_HISTORIES, returning_users_batch


def report_of(
    visits: list[tuple[int, int]], batch_requests: int, *, windows: int = 1, same_floats: bool = False
) -> dict[str, Any]:
    batch = returning_users_batch(visits, same_floats=same_floats)
    statistics = DuplicateStatistics(batch_requests)
    user_R, candidates_R = np.array([user for user, _ in visits]), np.full(len(visits), 4)
    for rows in np.array_split(np.arange(len(visits)), windows):
        statistics.add(batch.take_requests(rows), user_R[rows], candidates_R[rows])
    return statistics.report()


def test_a_growing_history_is_shared_partially_and_only_within_a_batch() -> None:
    """The histories have 4, 5, 5, 5 entries for user 1 (7 different ones), 5, 5, 5 for user 2 (7 different
    ones), and 0, 2 for user 3 (2 different ones)."""
    whole = report_of(GROWING_HISTORIES, 100)["arrangements"]["clustered"]["features"]["history"]
    assert whole["exact"] == 1.0 and whole["partial"] == pytest.approx(36 / 16) and whole["same"] == 0.0
    alone = report_of(GROWING_HISTORIES, 1)["arrangements"]["clustered"]["features"]["history"]
    assert alone["partial"] == 1.0 and alone["same"] is None, "a batch of one request shares nothing"


def test_clustering_brings_duplicates_into_one_batch() -> None:
    visits = [(1, 5), (2, 5), (3, 5), (1, 6), (2, 6), (3, 6)]
    arrangements = report_of(visits, 2)["arrangements"]
    assert arrangements["logged"]["features"]["history"]["partial"] == 1.0
    assert arrangements["logged"]["session_rows"] == 1.0
    assert arrangements["clustered"]["features"]["history"]["partial"] == pytest.approx(10 / 6)
    assert arrangements["clustered"]["session_rows"] == 2.0


def test_the_report_has_measured_factors_and_those_of_the_papers_formula() -> None:
    """Three users send nine requests. The history stays the same in five of six steps to the user's next
    request."""
    clustered = report_of(UNCHANGED_HISTORIES, 9, same_floats=True)["arrangements"]["clustered"]
    history = clustered["features"]["history"]
    assert clustered["session_rows"] == pytest.approx(9 / 3) and history["same"] == pytest.approx(5 / 6)
    assert history["dedupe_factor"] == pytest.approx(dedupe_factor(history["length"], 9, 3.0, 5 / 6))
    assert history["exact"] == pytest.approx(31 / 14)


def test_features_that_change_together_are_a_group_with_one_index() -> None:
    clustered = report_of(UNCHANGED_HISTORIES, 9, same_floats=True)["arrangements"]["clustered"]["groups"]
    members = [group["members"] for name, group in clustered.items() if name != EVERYTHING]
    assert members == [["user", "topics", "gap_s", "hour"]], (
        "the history changes once while the other features stay the same"
    )
    assert next(iter(clustered)) == EVERYTHING and clustered[EVERYTHING]["members"] == []
    assert clustered[EVERYTHING]["same"] == pytest.approx(5 / 6)


def test_only_worthwhile_deduplication_is_recommended() -> None:
    advice = report_of(GROWING_HISTORIES, 9)["advice"]
    assert advice[0].startswith("requests have 4.0 candidates")
    assert any(line.startswith("history: deduplicate partially") for line in advice)
    assert not any(line.startswith("user:") for line in advice), (
        "an index has one number per row, as the feature itself"
    )
    lonely = report_of([(n, 3) for n in range(6)], 6)["advice"]
    assert "no deduplication pays" in lonely[-1]


def test_clustering_is_recommended_only_where_it_helps() -> None:
    visits = [(user, clicks) for clicks in range(5, 9) for user in range(1, 5)]
    lines = [line for line in report_of(visits, 4)["advice"] if line.startswith("history")]
    assert len(lines) == 1 and "only if clustered" in lines[0]


def test_windows_add_up_and_share_nothing() -> None:
    one, two = (
        report_of(GROWING_HISTORIES, 3, windows=n)["arrangements"]["logged"]["features"]["history"]
        for n in (1, 3)
    )
    assert one == two, "batches of three requests end where the windows end"


def test_an_empty_log_has_a_report() -> None:
    statistics = DuplicateStatistics(8)
    schema = make_schema("everything")
    statistics.add(make_batch(schema, []), np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))
    assert statistics.report() == {
        "batch_requests": 8,
        "requests": 0,
        "candidates": 0,
        "arrangements": {},
        "advice": [],
    }
