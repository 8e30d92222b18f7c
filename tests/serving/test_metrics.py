"""Metrics of serving: score histograms, requests by route and status, and the stages of a rank request."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry
from starlette.testclient import TestClient

from serving.http.app import HttpInterface
from serving.metrics import SCORES, ScoreHistogram, ServingMetrics
from tests.serving.serving_cases import BODY, SCHEMA, build_serving
from tests.serving.serving_fakes import FakeHydrator, FakeRows


def bucket_counts(histogram: ScoreHistogram, task: str) -> tuple[list[float], float]:
    """Return (number of scores in each bucket, sum of the scores)."""
    registry = CollectorRegistry()
    registry.register(histogram)
    bounds = [*(repr(float(b)) for b in SCORES), "+Inf"]
    cumulated = [
        registry.get_sample_value("roostream_serving_score_bucket", {"task": task, "le": b}) or 0.0
        for b in bounds
    ]
    return np.diff([0.0, *cumulated]).tolist(), registry.get_sample_value(
        "roostream_serving_score_sum", {"task": task}
    ) or 0.0


def test_scores_are_counted_in_histogram_buckets() -> None:
    rng, histogram = np.random.default_rng(0), ScoreHistogram(("click", "dwell"))
    given = [rng.random((n, 2), np.float32) for n in (1, 50, 8192, 5000, 20)]
    given[1][0] = SCORES[3], 0.0
    for scores_nT in given:
        histogram.add(scores_nT)
        bucket_counts(histogram, "click")
    all_NT = np.concatenate(given)
    for index, task in enumerate(("click", "dwell")):
        counts, total = bucket_counts(histogram, task)
        edges = np.array([-1, *SCORES, 2]).astype(np.float32)
        assert counts == [
            ((all_NT[:, index] > a) & (all_NT[:, index] <= b)).sum() for a, b in itertools.pairwise(edges)
        ]
        assert total == pytest.approx(all_NT[:, index].sum(), rel=1e-5)


def test_scores_beyond_all_buckets_and_models_without_tasks_are_counted() -> None:
    ScoreHistogram(()).add(np.zeros((3, 0), np.float32))
    assert ScoreHistogram(()).collect()[0].samples == []
    histogram = ScoreHistogram(("click",))
    histogram.add(np.zeros((9000, 1), np.float32))
    assert sum(bucket_counts(histogram, "click")[0]) == 8192


def test_a_process_without_requests_exports_that_there_are_none() -> None:
    """The alert RoostreamNoRequests compares with 0, also after a roll-out has replaced all processes."""
    ServingMetrics(registry := CollectorRegistry())
    answers = {"route": "rank", "status": "200"}
    assert registry.get_sample_value("roostream_serving_requests_total", answers) == 0


def test_a_request_is_counted_by_route_and_class_of_status() -> None:
    metrics = ServingMetrics(CollectorRegistry())
    for status, seconds in ((200, 0.0015), (200, 0.002), (429, 0.0001), (503, 5.0)):
        metrics.answered("rank", status, seconds)

    def bucket_value(status: str, le: str) -> float | None:
        return metrics.registry.get_sample_value(
            "roostream_serving_request_seconds_bucket", {"route": "rank", "status": status, "le": le}
        )

    assert [bucket_value("2xx", le) for le in ("0.001", "0.002", "+Inf")] == [0, 2, 2]
    assert (bucket_value("4xx", "0.0005"), bucket_value("5xx", "2.0"), bucket_value("5xx", "+Inf")) == (
        1,
        0,
        1,
    )
    assert (
        metrics.registry.get_sample_value(
            "roostream_serving_requests_total", {"route": "rank", "status": "503"}
        )
        == 1
    )


def test_every_stage_of_a_rank_is_observed_once(tmp_path: Path) -> None:
    hydrator = FakeHydrator({"history": None}, {"clicks_1h": 1.0})
    serving = build_serving(tmp_path, FakeRows(SCHEMA), hydrator)
    http = TestClient(HttpInterface(serving.context))
    for _ in range(2):
        assert http.post("/v1/rank", json=BODY | {"ro": {}}).is_success
    hydrator.unavailable = True
    assert http.post("/v1/rank", json=BODY | {"ro": {}}).json()["degraded"]
    assert http.post("/v1/rank", json={}).status_code == 400
    get_metric = serving.context.metrics.registry.get_sample_value
    stages = {
        s: get_metric("roostream_serving_stage_seconds_count", {"stage": s})
        for s in ("parse", "hydrate", "encode", "score", "log")
    }
    assert stages == dict.fromkeys(stages, 3) and get_metric("roostream_serving_queue_seconds_count") == 3
    assert [
        get_metric("roostream_serving_redis_seconds_count", {"outcome": o}) for o in ("ok", "failed")
    ] == [2, 1]
    assert get_metric("roostream_serving_score_count", {"task": "click"}) == 9
    serving.close()
