"""Metrics in dashboards and alerts use base units, timestamps instead of ages, and histograms instead of
quantiles."""

from __future__ import annotations

import re
from pathlib import Path

INFRA = Path(__file__).resolve().parents[2] / "infra"
FILES = [*sorted((INFRA / "dashboards").glob("*.json")), *sorted((INFRA / "alerts").glob("*.yml"))]
NAME = re.compile(r"\broostream_[a-z0-9_]+")
OTHER_UNITS = re.compile(
    r"_(ms|us|ns|s|minutes|hours|kb|mb|gb|kib|mib|percent)(_total|_bucket|_sum|_count)?$"
)
OTHER_FORMS = re.compile(r"_age(_|$)|_quantile(_|$)")  # a timestamp or a histogram should be used instead


def metric_names() -> set[str]:
    return {name for file in FILES for name in NAME.findall(file.read_text(encoding="utf-8"))}


def test_units_are_base_units() -> None:
    assert len(metric_names()) > 30
    assert {name for name in metric_names() if OTHER_UNITS.search(name)} == set()


def test_no_metric_is_an_age_or_a_quantile() -> None:
    assert {name for name in metric_names() if OTHER_FORMS.search(name)} == set()
