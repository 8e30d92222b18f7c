"""Every metric equals a brute-force computation, with ties between scores. NE and AUC equal TorchRec's."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roostream.schema.schema import Label, Objective
from trainer.monitoring.progressive_metrics import (
    SHARED_SCORES,
    DailyMetrics,
    Metrics,
    ScoredBatch,
    merge_summaries,
    summarize,
    update_each,
)
from trainer.monitoring.ranking_metrics import ScoreHistogram

DAY_MS = 86_400_000


def random_batch(seed: int, requests: int = 40, levels: int = 7, tasks: int = 1) -> ScoredBatch:
    """Draw a batch. It has few different scores, so many ties, and some requests have no candidates."""
    rng = np.random.default_rng(seed)
    counts_R = rng.integers(0, 15, requests)
    index_B = np.repeat(np.arange(requests), counts_R)
    shape = (len(index_B), tasks)
    score_BT = (rng.integers(1, levels + 1, shape) / (levels + 2)).astype(np.float32)
    label_BT = (rng.random(shape) < 0.3).astype(np.float32)
    time_ms_R = 1000 * np.arange(requests, dtype=np.int64)
    return ScoredBatch(score_BT, label_BT, np.ones(shape, dtype=np.float32), index_B, time_ms_R)


def one_request(score: list[float], label: list[float]) -> ScoredBatch:
    score_S1, label_S1, weight_S1 = (
        np.array(x, dtype=np.float32)[:, None] for x in (score, label, np.ones(len(score)))
    )
    return ScoredBatch(score_S1, label_S1, weight_S1, np.zeros(len(score), dtype=np.int64), np.array([0]))


def brute_force_auc(score: np.ndarray, label: np.ndarray, weight: np.ndarray) -> float:
    p, n = label > 0, label <= 0
    wins = (score[p][:, None] > score[n]) + 0.5 * (score[p][:, None] == score[n])
    pair = weight[p][:, None] * weight[n]
    return float((wins * pair).sum() / pair.sum())


def brute_force_mrr_and_ndcg(score: np.ndarray, label: np.ndarray) -> tuple[float, float]:
    """Compute (MRR, nDCG@10) as the mean over every order that sorts by score."""
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


def compute_metrics(
    *batches: ScoredBatch, tasks: tuple[str, ...] = ("click",), max_scores: int = 1 << 18
) -> Metrics:
    metrics = Metrics(tasks, max_scores)
    for batch in batches:
        metrics.update(batch)
    return metrics


def assert_report_equals(
    report: dict[str, object], expected: dict[str, object], *, without: tuple[str, ...] = ("tasks",)
) -> None:
    for name, value in expected.items():
        if name not in without:
            assert report[name] == (value if value is None else pytest.approx(value, abs=1e-12)), name


def test_auc_counts_ties_as_half_and_candidates_by_weight_over_all_batches() -> None:
    random = np.random.default_rng(0)
    batches = [random_batch(seed) for seed in range(12)]
    batches = [
        b._replace(weight_BT=random.integers(0, 4, b.weight_BT.shape).astype(np.float32)) for b in batches
    ]
    score, label, weight = (np.concatenate([b[i][:, 0] for b in batches]) for i in range(3))
    report = compute_metrics(*batches).report()
    assert report["auc"] == pytest.approx(brute_force_auc(score, label, weight), abs=1e-12)
    assert report["auc_error"] == 0


@settings(max_examples=30)
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
            brute_force_auc(score, positive.astype(float), np.ones(len(score))), abs=1e-12
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
    counts_R = rng.integers(2, 7, 30)
    index_B = np.repeat(np.arange(30), counts_R)
    score = (rng.integers(1, 4, (len(index_B), 1)) / 8).astype(np.float32)
    label = (rng.random((len(index_B), 1)) < 0.4).astype(np.float32)
    aucs, orders = [], []
    for r, n in enumerate(counts_R):
        score_n, label_n = score[index_B == r, 0], label[index_B == r, 0]
        if 0 < label_n.sum() < n:
            aucs.append(brute_force_auc(score_n, label_n, np.ones(n)))
            orders.append(brute_force_mrr_and_ndcg(score_n, label_n))
    report = compute_metrics(ScoredBatch(score, label, np.ones_like(label), index_B, np.arange(30))).report()
    assert report["request_auc"] == pytest.approx(np.mean(aucs), abs=1e-12)
    assert (report["mrr"], report["ndcg@10"]) == pytest.approx(tuple(np.mean(orders, axis=0)), abs=1e-12)


def test_ndcg_looks_at_ten_ranks_only() -> None:
    label = [float(rank in (1, 11)) for rank in range(12)]
    report = compute_metrics(one_request(np.linspace(0.9, 0.1, 12).tolist(), label)).report()
    assert report["ndcg@10"] == pytest.approx((1 / math.log2(3)) / (1 + 1 / math.log2(3)), abs=1e-12)
    assert report["mrr"] == pytest.approx((1 / 2 + 1 / 12) / 2, abs=1e-12)


def test_one_update_of_several_metrics_counts_each_request_in_its_own() -> None:
    batch = random_batch(9, requests=60)
    metric_index_R = np.arange(60) * 7 % 3
    several = [Metrics(["click"], 1 << 18) for _ in range(4)]  # the last metrics get no request
    update_each(several, metric_index_R, batch)
    for number, metrics in enumerate(several):
        assert_report_equals(
            metrics.report(), compute_metrics(batch.of_requests(metric_index_R == number)).report()
        )


def test_ne_equals_torchrecs() -> None:
    from torchrec.metrics.ne import compute_cross_entropy, compute_ne

    rng, batch = np.random.default_rng(2), random_batch(2)
    batch.score_BT[:3] = [[0.0], [1.0], [1e-9]]
    batch = batch._replace(weight_BT=rng.random(batch.score_BT.shape).astype(np.float32))
    y, p, w = (torch.from_numpy(x[:, 0].astype(np.float64)) for x in (batch[1], batch[0], batch[2]))
    positive, negative = (w * y).sum(), (w * (1 - y)).sum()
    expected = compute_ne(compute_cross_entropy(y, p, w, 1e-12).sum(), w.sum(), positive, negative, 1e-12)
    assert compute_metrics(batch).report()["ne"] == pytest.approx(float(expected), abs=1e-9, rel=1e-9)


def test_auc_equals_torchrecs() -> None:
    from torchrec.metrics.auc import compute_auc

    rng, batch = np.random.default_rng(3), random_batch(3, requests=200)
    # Scores without ties, because TorchRec does not count a tie as half.
    score_B = rng.permutation(len(batch.score_BT)) / len(batch.score_BT)
    weight_BT = rng.random(batch.score_BT.shape).astype(np.float32)
    batch = batch._replace(score_BT=score_B[:, None].astype(np.float32), weight_BT=weight_BT)
    p, y, w = (torch.from_numpy(x.T.astype(np.float64)) for x in batch[:3])
    first, second = np.arange(200) < 70, np.arange(200) >= 70
    auc = compute_metrics(batch.of_requests(first), batch.of_requests(second)).report()["auc"]
    assert auc == pytest.approx(float(compute_auc(1, [p], [y], [w])), abs=1e-9, rel=1e-9)


def test_calibration_and_base_rate_count_a_label_above_zero_as_one_positive() -> None:
    report = compute_metrics(one_request([0.2, 0.4, 0.6], [0, 3, 0])).report()
    assert report["base_rate"] == pytest.approx(1 / 3)
    assert report["calibration"] == pytest.approx(1.2, rel=1e-6)


def test_weight_zero_excludes_a_candidate_from_that_task_only() -> None:
    batch = random_batch(4, tasks=2)
    batch.weight_BT[: len(batch.weight_BT) // 2, 1] = 0
    tasks = compute_metrics(batch, tasks=("click", "long_read")).report()["tasks"]
    assert isinstance(tasks, dict)
    kept = batch.weight_BT[:, 1] > 0
    assert (tasks["click"]["candidates"], tasks["long_read"]["candidates"]) == (len(kept), kept.sum())
    expected = brute_force_auc(batch.score_BT[kept, 1], batch.label_BT[kept, 1], batch.weight_BT[kept, 1])
    assert tasks["long_read"]["auc"] == pytest.approx(expected, abs=1e-12)


def test_undefined_metrics_are_none_and_the_report_is_json() -> None:
    nothing = Metrics(["click"]).report()
    only_negatives = compute_metrics(one_request([0.5, 0.5], [0, 0])).report()
    assert nothing["requests"] == 0 and nothing["first_ms"] is None and nothing["last_ms"] is None
    for report in (nothing, only_negatives):
        assert all(report[k] is None for k in ("ne", "auc", "request_auc", "mrr", "calibration"))
    without_candidates = compute_metrics(one_request([], [])).report()
    assert (without_candidates["requests"], without_candidates["candidates"]) == (1, 0)
    json.dumps([nothing, only_negatives, compute_metrics(random_batch(1)).report()], allow_nan=False)


@pytest.mark.parametrize("max_scores", [1 << 18, 16])
def test_metrics_continue_from_a_loaded_state(max_scores: int) -> None:
    first, second = random_batch(1, levels=300), random_batch(2, levels=300)
    uninterrupted = compute_metrics(first, second, max_scores=max_scores)
    resumed = Metrics(["click"], max_scores)
    resumed.load({k: v.copy() for k, v in compute_metrics(first, max_scores=max_scores).state().items()})
    resumed.update(second)
    assert resumed.report() == uninterrupted.report()


def test_a_task_that_the_state_lacks_starts_at_zero() -> None:
    metrics = Metrics(["click", "new"])
    metrics.load(compute_metrics(random_batch(1)).state())
    tasks = metrics.report()["tasks"]
    assert isinstance(tasks, dict)
    assert tasks["new"]["candidates"] == 0 and tasks["click"]["candidates"] > 0


def summary(metrics: Metrics) -> dict[str, object]:
    """Return the summary that one of several workers sends with its heartbeat."""
    return metrics.mergeable_summary(SHARED_SCORES)


def read_s(objective: Objective, scale: float = 60.0) -> Label:
    return Label(name="read_s", action="read", fold="sum", objective=objective, scale=scale)


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (read_s("amount"), read_s("amount", 120.0)),
        (read_s("event"), read_s("amount")),
        (read_s("amount"), read_s("event")),
        (read_s("weighted"), read_s("amount")),
    ],
)
def test_a_label_with_another_objective_or_amount_scale_is_measured_anew(before: Label, now: Label) -> None:
    old, loaded, fresh, unchanged = (Metrics(["read_s"]) for _ in range(4))
    old.update(random_batch(3)._replace(declared_T=[before]))
    loaded.load(old.state(), [now])
    for metrics in (loaded, fresh):
        metrics.update(random_batch(4)._replace(declared_T=[now]))
    assert loaded.report()["tasks"] == fresh.report()["tasks"]
    assert loaded.report()["requests"] == 2 * 40, "requests count on"
    unchanged.load(old.state(), [before])
    assert unchanged.report() == old.report()


def test_the_absolute_error_of_an_amount_is_in_its_unit_and_is_merged_and_saved() -> None:
    batch = random_batch(3)
    label = np.random.default_rng(0).exponential(20.0, batch.score_BT.shape).astype(np.float32)
    batch = batch._replace(label_BT=label, declared_T=[read_s("amount")])
    predicted = np.expm1(batch.score_BT.astype(np.float64) * math.log1p(60))
    expected = pytest.approx(np.abs(predicted - np.minimum(label, 60)).mean())
    whole, left, right, loaded = (Metrics(["read_s"]) for _ in range(4))
    whole.update(batch)
    assert whole.report()["mae"] == expected
    is_left_R = np.arange(len(batch.time_ms_R)) < 20
    left.update(batch.of_requests(is_left_R))
    right.update(batch.of_requests(~is_left_R))
    right.merge(left)
    loaded.load(right.state())
    assert loaded.report()["mae"] == expected
    assert merge_summaries([summary(whole), summary(right)])["tasks"]["read_s"]["mae"] == expected
    event = compute_metrics(random_batch(3))
    assert "mae" not in event.report() and "click.amount" not in event.state()


@pytest.mark.parametrize("objective", ["amount", "weighted"])
def test_a_score_that_is_no_probability_has_no_entropy_also_when_merged_and_saved(
    objective: Any,
) -> None:
    whole, other, loaded = (Metrics(["read_s"]) for _ in range(3))
    for metrics, seed in ((whole, 3), (other, 4)):
        metrics.update(random_batch(seed)._replace(declared_T=[read_s(objective)]))
    loaded.load(whole.state())
    merged = merge_summaries([summary(whole), summary(other)])
    for report in (whole.report(), loaded.report(), merged):
        task = report["tasks"]["read_s"]
        assert task["ne"] is None and task["calibration"] is None and task["request_auc"] is not None
        assert ("mae" in task) == (objective == "amount")


def test_merged_metrics_and_summaries_equal_those_of_one_worker() -> None:
    batches = [random_batch(seed) for seed in range(6)]
    left, right = compute_metrics(*batches[:2]), compute_metrics(*batches[2:])
    merged = merge_summaries([summary(left), {}, summary(right)])
    left.merge(right)
    whole = compute_metrics(*batches).report()
    assert_report_equals(left.report(), whole)
    assert_report_equals(merged, summarize(whole), without=("auc", "tasks"))
    assert merged["auc"] == pytest.approx(whole["auc"], abs=1e-3), "workers send rounded scores"
    assert merged["tasks"].keys() == {"click"}
    alone = summary(right)
    assert merge_summaries([summary(compute_metrics()), alone]) == summarize(right.report())
    assert merge_summaries([{}]) == {}


def test_the_merged_auc_of_two_workers_with_many_scores_equals_that_of_one() -> None:
    random = np.random.default_rng(0)
    workers, whole = (Metrics(["click"]), Metrics(["click"])), Metrics(["click"])
    for worker in workers:
        for _ in range(20):
            score_B1 = random.beta(1, 20, (2000, 1)).astype(np.float32)
            label_B1 = (random.random((2000, 1)) < score_B1).astype(np.float32)
            request_B = np.arange(2000) // 20
            batch = ScoredBatch(score_B1, label_B1, np.ones_like(label_B1), request_B, np.arange(100))
            worker.update(batch)
            whole.update(batch)
    merged = merge_summaries([summary(worker) for worker in workers])
    assert merged["auc"] == pytest.approx(whole.report()["auc"], abs=1e-4)
    assert len(summary(whole)["scores"]["click"]["score"]) <= SHARED_SCORES  # type: ignore[index]


def test_metrics_are_unknown_if_a_worker_does_not_report_what_they_need() -> None:
    left, right = (compute_metrics(random_batch(seed)) for seed in (1, 2))
    without_scores = left.mergeable_summary(0)
    merged = merge_summaries([without_scores, summary(right)])
    assert merged["auc"] is None and merged["ne"] is not None
    old = summarize(left.report())  # the form in manifests of an older version
    merged = merge_summaries([old, summary(right)])
    assert merged["ne"] is None and merged["requests"] == left.num_requests + right.num_requests


def test_daily_metrics_split_by_request_time() -> None:
    batch = random_batch(9, requests=30)
    batch = batch._replace(time_ms_R=np.arange(30, dtype=np.int64) * (DAY_MS // 10))  # starts at 1970-01-01
    daily = DailyMetrics(["click"], measure_from_ms=DAY_MS)
    daily.update(batch)
    report = daily.report()
    assert report["overall"] == compute_metrics(batch).report()
    assert report["measured"] == compute_metrics(batch.of_requests(np.arange(30) >= 10)).report()
    by_day = report["by_day"]
    assert isinstance(by_day, dict) and list(by_day) == ["1970-01-01", "1970-01-02", "1970-01-03"]
    assert [m["requests"] for m in by_day.values()] == [10, 10, 10]


@pytest.mark.parametrize("time_ms", [1_700_000_000_000_000_000, -(1 << 62)])
def test_a_request_with_a_time_in_another_unit_does_not_end_the_report(time_ms: int) -> None:
    batch = random_batch(9, requests=30)
    daily = DailyMetrics(["click"])
    daily.update(batch._replace(time_ms_R=np.where(np.arange(30) == 7, time_ms, DAY_MS)))
    by_day = daily.report()["by_day"]
    assert isinstance(by_day, dict) and by_day.pop("1970-01-02")["requests"] == 29
    assert [m["requests"] for m in by_day.values()] == [1]
