"""Daily statistics of features, and alerts about missing or shifted features."""

from __future__ import annotations

import dataclasses
from datetime import date

import pytest

from roostream.warehouse.statistics import FeatureDays, alerts
from roostream.wire.batch import Batch
from tests.models.model_cases import make_batch, make_schema

SCHEMA = make_schema("everything")
MONDAY, TUESDAY = date(2024, 1, 1), date(2024, 1, 2)


def batch_of(seed: int, requests: int = 300) -> Batch:
    return make_batch(SCHEMA, [3] * requests, seed)


def report_of(monday: Batch, tuesday: Batch) -> dict[str, dict[str, dict[str, float | None]]]:
    days = FeatureDays(SCHEMA)
    days.add(TUESDAY, tuesday)
    days.add(MONDAY, monday)
    return days.report()


def without(batch: Batch, column: int) -> Batch:
    present_BF = batch.nro_present_BF.copy()
    present_BF[:, column] = False
    return dataclasses.replace(batch, nro_present_BF=present_BF)


def test_each_day_reports_coverage_lengths_and_drift() -> None:
    batch = batch_of(1)
    report = report_of(batch, batch_of(2))
    assert list(report) == ["2024-01-01", "2024-01-02"] and list(report["2024-01-01"])[:2] == [
        "gap_s",
        "hour",
    ]
    history, lengths_R = report["2024-01-01"]["history"], batch.ro_lists.lengths_KN[1]
    assert history["coverage"] == pytest.approx(batch.ro_lists.present_KN[1].mean())
    assert history["length"] == pytest.approx(lengths_R.sum() / batch.ro_lists.present_KN[1].sum())
    assert history["longest"] == lengths_R.max() and history["moved"] is None, (
        "the first day has no previous day"
    )
    assert report["2024-01-02"]["ctr"]["rows"] == 900 and (report["2024-01-02"]["ctr"]["moved"] or 0) < 0.25
    assert alerts(report) == []


def test_a_missing_or_rarer_feature_raises_an_alert() -> None:
    messages = alerts(report_of(batch_of(1), without(batch_of(2), 0)))
    assert len(messages) == 1 and messages[0].startswith("2024-01-02: ctr is in no row; it was in 9")
    rarer = batch_of(2)
    rarer.nro_present_BF[::3, 1] = False
    (line, *_) = alerts(report_of(batch_of(1), rarer))
    assert line.startswith("2024-01-02: age_s is in 6") and line.endswith("the day before")
    never = alerts(report_of(without(batch_of(1), 0), without(batch_of(2), 0)))
    assert "2024-01-01: ctr is in no row" in never


def test_shifted_values_and_lengths_raise_an_alert_with_their_psi() -> None:
    other = batch_of(2)
    other.nro_float_BF[:, 1] *= 1000
    (line,) = alerts(report_of(batch_of(1), other))
    assert line.startswith("2024-01-02: age_s") and "PSI" in line
    longer = make_batch(SCHEMA, [3] * 600, 2, longest=60)
    lines = alerts(report_of(batch_of(1, 600), longer))
    assert any("history" in line and "lengths" in line for line in lines)


def test_days_with_few_rows_raise_no_alert() -> None:
    assert alerts(report_of(batch_of(1, 20), without(batch_of(2, 20), 0))) == []
    assert alerts(report_of(batch_of(1, 1), batch_of(2, 600))) == [], "a day is compared with one of few rows"
