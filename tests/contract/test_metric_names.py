"""Metrics that dashboards and alerts go by have base units, and moments rather than ages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

INFRA = Path(__file__).resolve().parents[2] / "infra"
FILES = [*sorted((INFRA / "dashboards").glob("*.json")), *sorted((INFRA / "alerts").glob("*.yml"))]
NAME = re.compile(r"\broostream_[a-z0-9_]+")
OTHER_UNITS = re.compile(
    r"_(ms|us|ns|s|minutes|hours|kb|mb|gb|kib|mib|percent)(_total|_bucket|_sum|_count)?$"
)
OTHER_FORMS = re.compile(r"_age(_|$)|_quantile(_|$)")  # a moment, a histogram


def named() -> set[str]:
    return {name for file in FILES for name in NAME.findall(file.read_text(encoding="utf-8"))}


def test_units_are_base_units() -> None:
    assert len(named()) > 30
    assert {name for name in named() if OTHER_UNITS.search(name)} == set()


@pytest.mark.parametrize(
    "wrong", ["roostream_x_ms", "roostream_x_ms_bucket", "roostream_lag_s", "roostream_used_percent"]
)
def test_another_unit_would_be_found(wrong: str) -> None:
    assert OTHER_UNITS.search(wrong)


def test_moments_are_told_rather_than_ages_and_histograms_rather_than_quantiles() -> None:
    assert {name for name in named() if OTHER_FORMS.search(name)} == set()
