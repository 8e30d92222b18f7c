"""Metrics that are read from a program's state at each scrape."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from roostream.errors import UnavailableError
from roostream.runtime.metrics_collector import MetricsCollector, MetricSpec, one_of

SPECS = {
    "roostream_x_rows": MetricSpec("rows in memory", ("stack",)),
    "roostream_x_rate": MetricSpec("click rate", ("order", "window")),
    "roostream_x_http_total": MetricSpec("calls", ("outcome",)),
    "roostream_x_ready": MetricSpec("1 once it is ready"),
}


def scrape(collector: MetricsCollector) -> str:
    registry = CollectorRegistry()
    registry.register(collector)
    return generate_latest(registry).decode()


def test_names_labels_types_and_help_texts_are_exported() -> None:
    state: dict[str, Any] = {
        "roostream_x_rows": {"d16": 7, "d4": None},
        "roostream_x_http_total": {"200": 5},
        "roostream_x_rate": {("served", "total"): 0.5},
        "roostream_x_ready": True,
    }
    text = scrape(MetricsCollector(lambda: state, SPECS))
    for line in (
        "# HELP roostream_x_rows rows in memory",
        "# TYPE roostream_x_rows gauge",
        'roostream_x_rows{stack="d16"} 7.0',
        "# TYPE roostream_x_http_total counter",
        'roostream_x_http_total{outcome="200"} 5.0',
        'roostream_x_rate{order="served",window="total"} 0.5',
        "roostream_x_ready 1.0",
    ):
        assert f"{line}\n" in text
    assert "d4" not in text, "a metric without a value must be omitted"


def test_a_failed_reading_spares_the_scrape_and_recovers(caplog: pytest.LogCaptureFixture) -> None:
    should_fail = True

    def read() -> dict[str, Any]:
        if should_fail:
            raise UnavailableError("expected Kafka to answer")
        return {"roostream_x_ready": 1}

    registry = CollectorRegistry(auto_describe=True)
    with caplog.at_level(logging.WARNING):
        registry.register(MetricsCollector(read, SPECS))
        registry.register(MetricsCollector(lambda: {"roostream_x_rows": {"d4": 3}}, SPECS))
        for _ in range(3):
            text = generate_latest(registry).decode()
            assert 'rows{stack="d4"} 3.0' in text and "x_ready" not in text
    assert len(caplog.records) == 1, "there must be one warning until the reading recovers"
    should_fail = False
    assert "roostream_x_ready 1.0" in generate_latest(registry).decode()


def test_a_state_is_exported_as_one_of_its_names() -> None:
    assert one_of("b", ("a", "b")) == {"a": 0, "b": 1}
