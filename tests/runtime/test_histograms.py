"""Quantiles of what a histogram counted in a recent window."""

from __future__ import annotations

import math

import pytest
from prometheus_client import CollectorRegistry

from roostream.runtime.histograms import (
    FRESHNESS_BUCKETS_S,
    RecentQuantiles,
    StageHistogram,
    freshness_histogram,
    quantile_of,
)

TEN = {1.0: 2, 2.0: 8, 4.0: 10, math.inf: 10}  # two values up to 1, six between 1 and 2, two between 2 and 4


@pytest.mark.parametrize(
    ("q", "expected", "case"),
    [
        (0.0, 0.0, "start of the first bucket"),
        (0.1, 0.5, "the first of the two values below 1"),
        (0.5, 1.5, "the fifth value, the third of six in its bucket"),
        (0.8, 2.0, "a bucket's bound"),
        (1.0, 4.0, "the largest value"),
    ],
)
def test_a_quantile_is_linear_within_its_bucket(q: float, expected: float, case: str) -> None:
    assert quantile_of(TEN, q) == pytest.approx(expected), case


def test_a_quantile_beyond_the_highest_bound_is_unknown() -> None:
    assert quantile_of({1.0: 0, math.inf: 5}, 0.5) is None
    assert quantile_of({1.0: 3, math.inf: 5}, 0.5) == pytest.approx(2.5 / 3)


@pytest.mark.parametrize("stages_s", [(20.0, 0.05, 0.2, 0.05), (2.1, 0.4, 0.6, 1.0), (290.0, 8.0, 3.0, 1.5)])
def test_the_median_of_the_whole_agrees_with_the_medians_of_its_stages(stages_s: tuple[float, ...]) -> None:
    histogram = StageHistogram("fresh_seconds", "help", FRESHNESS_BUCKETS_S, registry=None)
    for number in range(200):
        spread = 0.95 + number / 2000
        for stage, seconds in enumerate(stages_s):
            histogram.observe(str(stage), 1000 * seconds * spread)
        histogram.observe("whole", 1000 * sum(stages_s) * spread)
    medians = {
        name: quantile_of(histogram.buckets(name), 0.5) for name in (*map(str, range(len(stages_s))), "whole")
    }
    assert None not in medians.values()
    whole = medians.pop("whole")
    assert whole == pytest.approx(sum(stages_s), rel=0.06)
    assert whole == pytest.approx(sum(medians.values()), rel=0.12)  # type: ignore[arg-type]


@pytest.mark.parametrize("buckets", [{}, {1.0: 0, math.inf: 0}])
def test_a_quantile_of_nothing_is_none(buckets: dict[float, float]) -> None:
    assert quantile_of(buckets, 0.5) is None


def test_a_quantile_covers_the_time_since_the_previous_reading() -> None:
    recent = RecentQuantiles()
    assert recent.quantile(0.5) is None
    recent.add(0, {1.0: 100, 2.0: 100, math.inf: 100})
    assert recent.quantile(0.5) == 0.5
    recent.add(5, {1.0: 100, 2.0: 110, math.inf: 110})
    assert recent.quantile(0.5) == 1.5
    recent.add(10, {1.0: 100, 2.0: 110, math.inf: 110})
    assert recent.quantile(0.5) == 1.5, "both readings are within the window"


def test_readings_older_than_the_window_are_dropped() -> None:
    recent = RecentQuantiles(window_s=60)
    for at_s in range(0, 121, 5):
        slow = min(at_s, 30)  # values are slow until 30 s and fast later
        recent.add(at_s, {1.0: at_s - slow, 2.0: at_s, math.inf: at_s})
    assert recent.quantile(0.99) == pytest.approx(0.99)
    recent.add(185, {1.0: 90, 2.0: 120, math.inf: 120})
    assert recent.quantile(0.5) is None, "no value arrived within the window"


def test_counts_of_a_restarted_process_begin_at_zero() -> None:
    recent = RecentQuantiles()
    recent.add(0, {1.0: 100, 2.0: 100, math.inf: 100})
    recent.add(5, {1.0: 0, 2.0: 4, math.inf: 4})
    assert recent.quantile(0.5) == 1.5


def test_stage_times_are_observed_in_ms_and_exported_in_seconds() -> None:
    registry = CollectorRegistry()
    stages = StageHistogram("x_seconds", "help", registry=registry)
    for ms in (0.5, 1.5, 40.0, 400_000.0):
        stages.observe("pull", ms)
    buckets = {
        le: registry.get_sample_value("x_seconds_bucket", {"stage": "pull", "le": le})
        for le in ("0.0005", "0.05", "300.0", "+Inf")
    }
    assert buckets == {"0.0005": 1, "0.05": 3, "300.0": 3, "+Inf": 4}
    assert registry.get_sample_value("x_seconds_sum", {"stage": "pull"}) == pytest.approx(400.042)
    assert stages.buckets("pull")[0.05] == 3 and stages.buckets("pull")[math.inf] == 4
    assert freshness_histogram() is freshness_histogram(), "there must be one per process"
