"""Every metric against a brute-force oracle, ties included; NE against TorchRec's."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.monitoring.progressive_metrics import (
    DailyMetrics,
    Metrics,
    merge_summaries,
    summarize,
    update_each,
)
from trainer.monitoring.ranking_metrics import ScoreHistogram

DAY_MS = 86_400_000


def draw(seed: int, requests: int = 40, levels: int = 7, tasks: int = 1) -> tuple[np.ndarray, ...]:
    """score_BT (few levels, so many ties), label_BT, weight_BT, request_index_B, time_ms_R."""
    rng = np.random.default_rng(seed)
    counts_R = rng.integers(0, 15, requests)
    index_B = np.repeat(np.arange(requests), counts_R)
    shape = (len(index_B), tasks)
    score_BT = (rng.integers(1, levels + 1, shape) / (levels + 2)).astype(np.float32)
    label_BT = (rng.random(shape) < 0.3).astype(np.float32)
    return (
        score_BT,
        label_BT,
        np.ones(shape, dtype=np.float32),
        index_B,
        1000 * np.arange(requests, dtype=np.int64),
    )


def brute_auc(score: np.ndarray, label: np.ndarray, weight: np.ndarray) -> float:
    p, n = label > 0, label <= 0
    wins = (score[p][:, None] > score[n]) + 0.5 * (score[p][:, None] == score[n])
    pair = weight[p][:, None] * weight[n]
    return float((wins * pair).sum() / pair.sum())


def brute_order(score: np.ndarray, label: np.ndarray) -> tuple[float, float]:
    """(MRR, nDCG@10): the mean over every order that sorts by score."""
    mrr, ndcg = [], []
    for order in itertools.permutations(range(len(score))):
        if any(score[a] < score[b] for a, b in itertools.pairwise(order)):
            continue
        ranked = label[list(order)]
        mrr.append((ranked / np.arange(1, len(ranked) + 1)).sum() / ranked.sum())
        discount = 1 / np.log2(np.arange(len(ranked)) + 2)
        discount[10:] = 0
        ndcg.append((ranked * discount).sum() / (np.sort(ranked)[::-1] * discount).sum())
    return float(np.mean(mrr)), float(np.mean(ndcg))


def counted(
    *batches: tuple[np.ndarray, ...], tasks: tuple[str, ...] = ("click",), max_scores: int = 1 << 18
) -> Metrics:
    metrics = Metrics(tasks, max_scores)
    for batch in batches:
        metrics.update(*batch)
    return metrics


def test_auc_counts_ties_as_half_over_all_batches() -> None:
    batches = [draw(seed) for seed in range(12)]
    score, label, weight = (np.concatenate([b[i][:, 0] for b in batches]) for i in range(3))
    report = counted(*batches).report()
    assert report["auc"] == pytest.approx(brute_auc(score, label, weight), abs=1e-12)
    assert report["auc_error"] == 0


def test_auc_weighs_candidates_by_their_weight() -> None:
    score, label, weight, index, time = draw(3)
    weight = np.random.default_rng(0).integers(0, 4, weight.shape).astype(np.float32)
    report = counted((score, label, weight, index, time)).report()
    assert report["auc"] == pytest.approx(brute_auc(score[:, 0], label[:, 0], weight[:, 0]), abs=1e-12)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1, width=32), st.booleans()), min_size=2, max_size=60))
def test_auc_is_exact_for_any_scores(pairs: list[tuple[float, bool]]) -> None:
    score = np.array([s for s, _ in pairs], dtype=np.float32)
    positive = np.array([p for _, p in pairs])
    counts = ScoreHistogram()
    counts.add(score, positive, np.ones(len(score)))
    if positive.all() or not positive.any():
        assert counts.auc() is None
    else:
        assert counts.auc() == pytest.approx(
            brute_auc(score, positive.astype(float), np.ones(len(score))), abs=1e-12
        )


def test_beyond_max_scores_memory_is_bounded_and_the_error_certified() -> None:
    rng = np.random.default_rng(1)
    score = rng.random(20_000).astype(np.float32)
    positive = rng.random(20_000) < score
    exact, bounded = ScoreHistogram(), ScoreHistogram(max_scores=256)
    for part in np.array_split(np.arange(20_000), 40):
        exact.add(score[part], positive[part], np.ones(len(part)))
        bounded.add(score[part], positive[part], np.ones(len(part)))
    truth, measured = exact.auc(), bounded.auc()
    assert truth is not None and measured is not None
    assert len(bounded.state()["score"]) <= 256
    assert 0 < abs(truth - measured) <= bounded.auc_error() < 0.02
    assert exact.auc_error() == 0


def test_request_metrics_are_the_mean_over_all_orders_of_equal_scores() -> None:
    rng = np.random.default_rng(5)
    aucs, orders, batches = [], [], []
    for r in range(30):
        n = int(rng.integers(2, 7))
        score = (rng.integers(1, 4, (n, 1)) / 8).astype(np.float32)
        label = (rng.random((n, 1)) < 0.4).astype(np.float32)
        batches.append(
            (score, label, np.ones((n, 1), dtype=np.float32), np.zeros(n, dtype=np.int64), np.array([r]))
        )
        if 0 < label.sum() < n:
            aucs.append(brute_auc(score[:, 0], label[:, 0], np.ones(n)))
            orders.append(brute_order(score[:, 0], label[:, 0]))
    report = counted(*batches).report()
    assert report["request_auc"] == pytest.approx(np.mean(aucs), abs=1e-12)
    assert (report["mrr"], report["ndcg@10"]) == pytest.approx(tuple(np.mean(orders, axis=0)), abs=1e-12)


def test_ndcg_looks_at_ten_ranks_only() -> None:
    score = np.linspace(0.9, 0.1, 12, dtype=np.float32)[:, None]
    label = np.zeros((12, 1), dtype=np.float32)
    label[[1, 11]] = 1
    report = counted(
        (score, label, np.ones_like(label), np.zeros(12, dtype=np.int64), np.array([0]))
    ).report()
    assert report["ndcg@10"] == pytest.approx((1 / math.log2(3)) / (1 + 1 / math.log2(3)), abs=1e-12)
    assert report["mrr"] == pytest.approx((1 / 2 + 1 / 12) / 2, abs=1e-12)


def test_many_requests_in_one_update_equal_one_update_each() -> None:
    score, label, weight, index, time = draw(8, requests=60)
    split = [
        (score[index == r], label[index == r], weight[index == r], index[index == r] * 0, time[r : r + 1])
        for r in range(len(time))
    ]
    whole, parts = counted((score, label, weight, index, time)).report(), counted(*split).report()
    for key in (
        "requests",
        "candidates",
        "auc",
        "request_auc",
        "mrr",
        "ndcg@10",
        "ne",
        "calibration",
        "first_ms",
        "last_ms",
    ):
        assert whole[key] == pytest.approx(parts[key], abs=1e-12), key


def test_one_update_of_several_counts_each_requests_own() -> None:
    score, label, weight, index, time = draw(9, requests=60)
    of_R = np.arange(len(time)) * 7 % 3
    several = [Metrics(["click"], 1 << 18) for _ in range(4)]  # of the last, nothing comes
    update_each(several, of_R, score, label, weight, index, time)
    for number, metrics in enumerate(several):
        mine_R = of_R == number
        mine_B = mine_R[index]
        alone = Metrics(["click"], 1 << 18)
        alone.update(
            score[mine_B], label[mine_B], weight[mine_B], (np.cumsum(mine_R) - 1)[index[mine_B]], time[mine_R]
        )
        for key, value in alone.report().items():
            if key != "tasks":
                assert metrics.report()[key] == (
                    value if value is None else pytest.approx(value, abs=1e-12)
                ), key


def test_ne_equals_torchrecs() -> None:
    from torchrec.metrics.ne import compute_cross_entropy, compute_ne

    rng = np.random.default_rng(2)
    score, label, _, index, time = draw(2)
    score[:3] = [[0.0], [1.0], [1e-9]]
    weight = rng.random(score.shape).astype(np.float32)
    report = counted((score, label, weight, index, time)).report()
    y, p, w = (torch.from_numpy(x[:, 0].astype(np.float64)) for x in (label, score, weight))
    positive, negative = (w * y).sum(), (w * (1 - y)).sum()
    theirs = compute_ne(compute_cross_entropy(y, p, w, 1e-12).sum(), w.sum(), positive, negative, 1e-12)
    assert report["ne"] == pytest.approx(float(theirs), abs=1e-9, rel=1e-9)


def test_calibration_and_base_rate() -> None:
    score = np.array([[0.2], [0.4], [0.6]], dtype=np.float32)
    label = np.array([[0], [3], [0]], dtype=np.float32)  # a count above 0 is a positive
    report = counted((score, label, np.ones_like(label), np.zeros(3, dtype=np.int64), np.array([0]))).report()
    assert report["base_rate"] == pytest.approx(1 / 3)
    assert report["calibration"] == pytest.approx(1.2, rel=1e-6)


def test_weight_zero_leaves_a_candidate_out_of_that_task_only() -> None:
    score, label, weight, index, time = draw(4, tasks=2)
    weight[: len(weight) // 2, 1] = 0
    report = counted((score, label, weight, index, time), tasks=("click", "long_read")).report()
    tasks = report["tasks"]
    assert isinstance(tasks, dict)
    assert (
        tasks["click"]["candidates"] == len(index)
        and tasks["long_read"]["candidates"] == len(index) - len(index) // 2
    )
    kept = weight[:, 1] > 0
    assert tasks["long_read"]["auc"] == pytest.approx(
        brute_auc(score[kept, 1], label[kept, 1], weight[kept, 1]), abs=1e-12
    )
    assert report["auc"] == tasks["click"]["auc"]


def test_what_is_not_defined_is_none_and_the_report_is_json() -> None:
    nothing = Metrics(["click"]).report()
    assert nothing["requests"] == 0 and all(
        nothing[k] is None for k in ("ne", "auc", "request_auc", "calibration", "first_ms")
    )
    score = np.full((2, 1), 0.5, dtype=np.float32)
    only_negatives = counted(
        (score, 0 * score, np.ones_like(score), np.zeros(2, dtype=np.int64), np.array([7]))
    ).report()
    assert all(only_negatives[k] is None for k in ("ne", "auc", "request_auc", "mrr", "calibration"))
    json.dumps([nothing, only_negatives, counted(draw(1)).report()], allow_nan=False)


def test_requests_without_candidates_are_counted() -> None:
    empty = np.zeros((0, 1), dtype=np.float32)
    report = counted((empty, empty, empty, np.zeros(0, dtype=np.int64), np.array([1, 2]))).report()
    assert (report["requests"], report["candidates"]) == (2, 0)


@pytest.mark.parametrize("max_scores", [1 << 18, 16])
def test_state_loads_into_another_process_and_goes_on(max_scores: int) -> None:
    first, second = draw(1, levels=300), draw(2, levels=300)
    straight = counted(first, second, max_scores=max_scores)
    resumed = Metrics(["click"], max_scores)
    resumed.load({k: v.copy() for k, v in counted(first, max_scores=max_scores).state().items()})
    resumed.update(*second)
    assert resumed.report() == straight.report()


def test_a_task_that_the_state_lacks_starts_at_nothing() -> None:
    metrics = Metrics(["click", "new"])
    metrics.load(counted(draw(1)).state())
    tasks = metrics.report()["tasks"]
    assert isinstance(tasks, dict)
    assert tasks["new"]["candidates"] == 0 and tasks["click"]["candidates"] > 0


def test_an_amount_has_an_error_in_its_own_unit_that_merges_and_is_kept() -> None:
    score, _, weight, index, time = draw(3)
    label = np.random.default_rng(0).exponential(20.0, score.shape).astype(np.float32)
    expected = np.abs(np.expm1(score.astype(np.float64) * math.log1p(60)) - np.minimum(label, 60)).mean()
    metrics, parts = Metrics(["read_s"]), [Metrics(["read_s"]) for _ in range(3)]
    metrics.update(score, label, weight, index, time, [60.0])
    assert metrics.report()["mae"] == pytest.approx(expected)
    for part, mine in zip(parts, np.array_split(np.arange(len(score)), 2), strict=False):
        part.update(score[mine], label[mine], weight[mine], index[mine], time, [60.0])
    parts[1].merge(parts[0])
    parts[2].load(parts[1].state())
    assert parts[2].report()["mae"] == pytest.approx(expected)
    told = [{**summarize(part.report()), "sums": part.sums()} for part in (metrics, parts[1])]
    assert merge_summaries(told)["tasks"]["read_s"]["mae"] == pytest.approx(expected)
    assert "mae" not in counted(draw(3)).report() and "click.amount" not in counted(draw(3)).state(), (
        "of an event there is none"
    )


def test_merged_workers_report_what_one_worker_would() -> None:
    batches = [draw(seed) for seed in range(6)]
    left, right = counted(*batches[:2]), counted(*batches[2:])
    left.merge(right)
    whole = counted(*batches).report()
    for key, value in left.report().items():
        if key != "tasks":
            assert value == pytest.approx(whole[key], abs=1e-12), key


def told_by(metrics: Metrics) -> dict[str, object]:
    """What a worker's beat tells."""
    return {**summarize(metrics.report()), "sums": metrics.sums()}


def test_workers_summaries_are_pooled_exactly_but_for_the_auc_that_sums_cannot_tell() -> None:
    batches = [draw(seed) for seed in range(6)]
    whole = summarize(counted(*batches).report())
    pool = merge_summaries([told_by(counted(*batches[:2])), {}, told_by(counted(*batches[2:]))])
    assert pool["auc"] is None and pool["tasks"].keys() == whole["tasks"].keys()
    for name in whole.keys() - {"auc", "tasks"}:
        assert pool[name] == pytest.approx(whole[name], abs=1e-12), name


def test_a_worker_that_alone_has_counted_is_the_whole() -> None:
    alone = told_by(counted(draw(1)))
    assert merge_summaries([told_by(counted()), alone]) == alone and merge_summaries([{}]) == {}


def test_daily_metrics_split_by_request_time() -> None:
    score, label, weight, index, _ = draw(9, requests=30)
    time = np.arange(30, dtype=np.int64) * (DAY_MS // 10)  # ten requests a day from 1970-01-01
    daily = DailyMetrics(["click"], measure_from_ms=DAY_MS)
    daily.update(score, label, weight, index, time)
    report = daily.report()
    measured = index >= 10
    expected = counted(
        (score[measured], label[measured], weight[measured], index[measured] - 10, time[10:])
    ).report()
    assert report["measured"] == expected
    by_day = report["by_day"]
    assert isinstance(by_day, dict) and list(by_day) == ["1970-01-01", "1970-01-02", "1970-01-03"]
    assert [m["requests"] for m in by_day.values()] == [10, 10, 10]
    assert report["overall"] == counted((score, label, weight, index, time)).report()
