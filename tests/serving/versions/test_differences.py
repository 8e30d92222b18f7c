"""What is told of two versions' scores."""

from __future__ import annotations

import numpy as np
import pytest

from serving.versions.shadow_scoring import differences


def column(*scores: float) -> np.ndarray:
    return np.array(scores, dtype=np.float32)[:, None]


def test_equal_scores_differ_in_nothing() -> None:
    assert differences(column(0.1, 0.5, 0.5), column(0.1, 0.5, 0.5), 0) == (0.0, 1.0, 1.0)


def test_a_list_turned_round_correlates_with_minus_one() -> None:
    found = differences(column(0.1, 0.2, 0.3), column(0.3, 0.2, 0.1), 0)
    assert found.rank_correlation == -1.0 and found.top_overlap == 1.0
    assert found.mean_abs == pytest.approx(0.4 / 3, abs=1e-6)


def test_overlap_counts_the_first_ten_slots() -> None:
    one = np.linspace(1, 0, 20, dtype=np.float32)
    moved = np.roll(one, 5)  # its first five were the last five
    assert differences(one[:, None], moved[:, None], 0).top_overlap == 0.5


def test_the_task_that_orders_ranks_and_all_tasks_differ() -> None:
    one = np.array([[0.1, 0.9], [0.2, 0.8]], np.float32)
    other = np.array([[0.9, 0.9], [0.1, 0.8]], np.float32)
    assert (
        differences(one, other, 1).rank_correlation == 1.0
        and differences(one, other, 0).rank_correlation == -1.0
    )
    assert differences(one, other, 1).mean_abs == pytest.approx(0.9 / 4)


def test_a_single_candidate_has_one_rank() -> None:
    assert differences(column(0.2), column(0.7), 0)[1:] == (1.0, 1.0)
