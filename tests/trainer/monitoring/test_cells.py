"""Cells count as the exact metrics do, and a commit's state brings them back."""

from __future__ import annotations

import numpy as np
import pytest

from trainer.monitoring.progressive_metrics import Metrics, ScoredBatch
from trainer.monitoring.windowed_metrics import (
    STEPS,
    CandidateLosses,
    MetricCells,
    merge_cell_reports,
    without_scores,
)


def outcomes(n: int, tasks: int = 2, seed: int = 3) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(scores, labels, weights), of a predictor that knows something."""
    random = np.random.default_rng(seed)
    score_BT = random.beta(1, 6, (n, tasks)).astype(np.float32)
    label_BT = (random.random((n, tasks)) < score_BT).astype(np.float32)
    return score_BT, label_BT, random.choice([0.0, 1.0, 2.0], (n, tasks)).astype(np.float32)


def test_a_cell_agrees_with_the_exact_metrics() -> None:
    score_BT, label_BT, weight_BT = outcomes(5000)
    exact = Metrics(("click", "buy"))
    zeros_B, zeros_R = np.zeros(5000, dtype=np.int64), np.zeros(1, dtype=np.int64)
    exact.update(ScoredBatch(score_BT, label_BT, weight_BT, zeros_B, zeros_R))
    cells = MetricCells(("click", "buy"))
    cell = cells.number_of(("a",))
    losses = CandidateLosses(score_BT, label_BT, weight_BT, np.full_like(score_BT, 0.5))
    cells.add(np.full(5000, cell), losses, np.arange(5000))
    told = cells.report([("a",), ("unknown",)])
    for task, expected in exact.report()["tasks"].items():  # type: ignore[attr-defined]
        for name in ("candidates", "base_rate", "ne", "calibration"):
            assert told[task][name] == pytest.approx(expected[name], rel=1e-6), (task, name)
        assert told[task]["auc"] == pytest.approx(expected["auc"], abs=4e-3)


def test_ne_online_compares_with_the_base_rate_known_before() -> None:
    cells, n = MetricCells(("click",)), 4000
    label_BT, weight_BT = (
        (np.arange(n) % 4 == 0).astype(np.float32)[:, None],
        np.ones((n, 1), dtype=np.float32),
    )
    for start in range(0, n, 50):
        rows = slice(start, start + 50)
        base_BT = np.broadcast_to(cells.rates_T(("a",)), (50, 1))
        losses = CandidateLosses(base_BT, label_BT[rows], weight_BT[rows], base_BT)
        cells.add(np.full(50, cells.number_of(("a",))), losses, np.arange(50))
    told = cells.report([("a",)])["click"]
    assert told["ne_online"] == pytest.approx(1.0), "it can't beat itself"
    assert 1.0 < told["ne"] < 1.01, "and what knows the rate only afterwards is a little better"
    assert cells.rates_T(("a",))[0] == pytest.approx(0.25, abs=1e-3)


@pytest.mark.parametrize("labels", [0.0, 1.0])
def test_undefined_numbers_are_none(labels: float) -> None:
    cells = MetricCells(("click",))
    nothing = dict.fromkeys(("base_rate", "ne", "ne_online", "auc", "calibration"))
    sums = {"candidates": 0, "sums": [0.0] * 6, "scores": [0.0] * 2 * STEPS}
    assert cells.report([])["click"] == {**nothing, **sums}
    score_BT = np.array([[0.2], [0.0], [1.0]], dtype=np.float32)
    cells.add(
        np.full(3, cells.number_of(("a",))),
        CandidateLosses(score_BT, np.full((3, 1), labels), np.ones((3, 1)), score_BT * 0 + 0.5),
        np.arange(3),
    )
    told = cells.report([("a",)])["click"]
    assert told["ne"] is None and told["auc"] is None and told["base_rate"] == labels
    assert (told["calibration"] is None) == (labels == 0)


def test_cells_add_up_and_can_be_saved_loaded_and_dropped() -> None:
    cells = MetricCells(("click",))
    score_BT, label_BT, weight_BT = outcomes(300, tasks=1)
    losses = CandidateLosses(score_BT, label_BT, weight_BT, np.full_like(score_BT, 0.5))
    keys = [(0, "a"), (0, "b"), (1, "a")]
    numbers = np.array([cells.number_of(key) for key in keys])
    cells.add(numbers[np.arange(300) % 3], losses, np.arange(300))
    whole = cells.report(keys)
    other = MetricCells(("click",))
    other.load(cells.state(lambda key: key[0] == 0))
    assert other.keys == keys[:2] and other.report(keys[:2]) == cells.report(keys[:2])
    other.load(cells.state(lambda key: key[0] == 1))
    other.load(cells.state(lambda key: key[0] == 1))
    assert other.report(keys) == whole, "what comes twice replaces"
    other.drop(lambda key: key[1] == "a")
    assert other.keys == [(0, "b")] and other.report([(0, "b")]) == cells.report([(0, "b")])
    renamed = MetricCells(("buy",))
    renamed.load(cells.state(lambda key: True))
    assert renamed.keys == [], "another task's numbers are nobody's"


def test_merged_reports_of_two_workers_equal_those_of_one() -> None:
    cells, whole = [MetricCells(("click",)) for _ in range(2)], MetricCells(("click",))
    for n, mine in enumerate(cells):
        score_BT, label_BT, weight_BT = outcomes(500, tasks=1, seed=n)
        losses = CandidateLosses(score_BT, label_BT, weight_BT, np.full_like(score_BT, 0.5))
        for each in (mine, whole):
            each.add(np.full(500, each.number_of(("a",))), losses, np.arange(500))
    merge_summaries = merge_cell_reports([mine.report([("a",)])["click"] for mine in cells])
    expected = whole.report([("a",)])["click"]
    assert merge_summaries.keys() == expected.keys() - {"scores"}
    for name in merge_summaries:
        assert merge_summaries[name] == pytest.approx(expected[name]), name
    silent = [without_scores(mine.report([("a",)])["click"]) for mine in cells]
    assert merge_cell_reports(silent)["auc"] is None, "sums do not give it"
    empty = MetricCells(("click",)).report([])["click"]
    assert (
        merge_cell_reports([empty, expected]) == without_scores(expected)
        and merge_cell_reports([empty, empty])["candidates"] == 0
    )
