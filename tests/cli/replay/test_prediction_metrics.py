"""Metrics of a replay through a stack, computed from the `predictions` topic."""

from __future__ import annotations

import numpy as np
import pytest

from roostream.cli.replay.prediction_metrics import PredictionMetrics
from roostream.schema.schema import Label
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.records import Record
from tests.wire.sample_builders import parse_schema
from trainer.monitoring.verdict import RULES, PairedRequests, RequestScores

DAY = 86_400_000
CLICK = Label(name="click", action="click")
READ_S = Label(name="read_s", action="read", fold="sum", objective="amount", scale=60.0)


def prediction(number: int, time_ms: int, scores: list[float], labels: list[float], tasks: int = 1) -> Record:
    message = pb.Prediction(
        sample_id=number, time_ms=time_ms, item_ids=range(len(scores) // tasks), scores=scores, labels=labels
    )
    return Record("predictions", 0, number, time_ms, b"", wire.encode(wire.PREDICTION, message))


def test_each_request_counts_once_overall_by_day_and_from_the_time_measured_from() -> None:
    metrics = PredictionMetrics(("click",), measure_from_ms=DAY)
    good, bad = [0.9, 0.1], [0.1, 0.9]
    for record in (
        prediction(1, 5, good, [1, 0]),
        prediction(1, 5, bad, [1, 0]),
        prediction(2, DAY + 5, bad, [1, 0]),
        Record("predictions", 0, 9, 0, b"", b"rubbish"),
        Record("samples", 0, 9, 0, b"", b""),
    ):
        metrics.add(record)
    report = metrics.report()
    assert report["overall"]["requests"] == 2 and report["overall"]["request_auc"] == pytest.approx(0.5)
    assert report["measured"]["requests"] == 1 and report["measured"]["request_auc"] == 0.0
    assert {day: m["request_auc"] for day, m in report["by_day"].items()} == {
        "1970-01-01": 1.0,
        "1970-01-02": 0.0,
    }


def test_requests_counted_in_batches_give_the_same_metrics() -> None:
    metrics = PredictionMetrics(("click", "long_read"))
    for k in range(1200):
        metrics.add(prediction(k, k, [0.5, 0.4, 0.2, 0.1, 0.3, 0.2], [1, 0, 0, 0, 0, 0], tasks=2))
    overall = metrics.report()["overall"]
    assert overall["requests"] == 1200 and overall["candidates"] == 3600
    assert (
        overall["tasks"]["click"]["base_rate"] == pytest.approx(1 / 3)
        and overall["tasks"]["long_read"]["base_rate"] == 0
    )


def test_a_label_that_is_not_known_counts_in_no_metric_and_no_comparison() -> None:
    paired, nan = PairedRequests(), float("nan")
    metrics = PredictionMetrics(("new", "old"), paired=paired)
    for k in range(600):
        old, new = [1.0, 0.0, 0.0], [1.0, 1.0, 0.0] if k % 2 else [nan] * 3
        labels = [value for pair in zip(new, old, strict=True) for value in pair]
        metrics.add(prediction(k, k, [0.5, 0.4, 0.2, 0.1, 0.3, 0.2], labels, tasks=2))
    tasks = metrics.report()["overall"]["tasks"]
    found = {name: (task["candidates"], round(task["base_rate"], 4)) for name, task in tasks.items()}
    assert found == {"new": (900, 0.6667), "old": (1800, 0.3333)}
    rules = dict.fromkeys(RULES, RequestScores(np.zeros(600), np.ones(600)))
    paired.add_rules(range(600), rules)
    assert paired.verdict().requests == 150, "the later half of those whose first label is known"


def test_an_amount_has_an_error_in_its_unit_overall_and_by_day() -> None:
    metrics = PredictionMetrics(("click", "read_s"), declared_T=(CLICK, READ_S))
    metrics.add(prediction(1, DAY, [0.5, 0.25, 0.5, 0.75], [1, 20, 0, 100], tasks=2))
    report = metrics.report()
    predicted_s = (61**0.25 - 1, 61**0.75 - 1)
    overall = report["overall"]
    assert isinstance(overall, dict)
    assert overall["tasks"]["read_s"]["mae"] == pytest.approx(
        (abs(predicted_s[0] - 20) + abs(predicted_s[1] - 60)) / 2, rel=1e-6
    )
    assert "mae" not in overall["tasks"]["click"]


def test_only_events_have_metrics_of_probabilities() -> None:
    """Scores of other objectives are no probabilities: an order, a share of an amount, or odds of a value."""
    text = "".join(
        f'[[label]]\nname = "{objective}"\naction = "read"\nfold = "sum"\nobjective = "{objective}"\n'
        for objective in ("event", "weighted", "amount", "pairwise")
    )
    schema = parse_schema(text)
    metrics = PredictionMetrics(schema.tasks, declared_T=schema.labels)
    metrics.add(prediction(1, DAY, [0.5] * 4 + [0.25] * 4, [9] * 4 + [0] * 4, tasks=4))
    report = metrics.report()
    assert isinstance(report["overall"], dict) and isinstance(report["curve"], list)
    for part in (report["overall"], report["curve"][0]):
        tasks = part["tasks"]
        assert all(task["request_auc"] == 1.0 for task in tasks.values())
        for metric in ("ne", "calibration"):
            assert [name for name, task in tasks.items() if task[metric] is not None] == ["event"]
