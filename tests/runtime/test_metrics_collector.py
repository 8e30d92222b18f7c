"""State read when it is scraped, under the names that status and dashboards know."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from roostream.runtime.metrics_collector import MetricsCollector, one_of


def shown(exports: MetricsCollector) -> str:
    registry = CollectorRegistry()
    exports.register(registry)
    return generate_latest(registry).decode()


def test_numbers_are_gauges_of_the_moment_of_the_scrape() -> None:
    state: dict[str, Any] = {"rows": 3}
    registry = CollectorRegistry()
    MetricsCollector("shard", lambda: state, {}).register(registry)
    assert "roostream_shard_rows 3.0\n" in generate_latest(registry).decode()
    state["rows"] = 4
    assert "roostream_shard_rows 4.0\n" in generate_latest(registry).decode()


def test_labels_counters_and_helps_are_as_they_are_declared() -> None:
    read = {
        "rows": {"d16": 7, "d4": 1},
        "http": {"200": 5},
        "rate": {("served", "total"): 0.5},
        "ready": True,
    }
    labels = {"rows": "stack", "http": "outcome", "rate": ("order", "window")}
    text = shown(
        MetricsCollector("x", lambda: read, labels, helps={"rows": "rows in memory"}, counters={"http"})
    )
    for line in (
        "# HELP roostream_x_rows rows in memory",
        "# TYPE roostream_x_rows gauge",
        'roostream_x_rows{stack="d16"} 7.0',
        "# TYPE roostream_x_http_total counter",
        'roostream_x_http_total{outcome="200"} 5.0',
        'roostream_x_rate{order="served",window="total"} 0.5',
        "# HELP roostream_x_ready ready",
        "roostream_x_ready 1.0",
    ):
        assert f"{line}\n" in text


@pytest.mark.parametrize(
    ("ours", "line"),
    [
        ("lag_ms", "lag_seconds 1.5"),
        ("eta_s", "eta_seconds 1500.0"),
        ("read_per_s", "read_per_second 1500.0"),
        ("watermark_ms", "watermark_timestamp_seconds 1.5"),
        ("committed_at_ms", "committed_timestamp_seconds 1.5"),
        ("rows", "rows 1500.0"),
    ],
)
def test_times_are_exported_in_seconds(ours: str, line: str) -> None:
    assert f"roostream_x_{line}\n" in shown(MetricsCollector("x", lambda: {ours: 1500}, {}))


def test_what_is_no_number_is_left_out() -> None:
    read = {"state": "RUNNING", "auc": {"click": None}, "ne": {"click": 0.9, "read": None}}
    text = shown(MetricsCollector("x", lambda: read, {"auc": "task", "ne": "task"}))
    assert (
        "state" not in text
        and "auc" not in text
        and 'task="read"' not in text
        and 'task="click"} 0.9' in text
    )


def test_what_is_shown_can_be_taken_back() -> None:
    registry, exports = CollectorRegistry(), MetricsCollector("x", lambda: {"rows": 1}, {})
    exports.register(registry)
    assert b"roostream_x_rows 1.0" in generate_latest(registry)
    exports.unregister()
    exports.unregister()
    assert generate_latest(registry) == b""


def test_a_state_is_one_of_its_names() -> None:
    assert one_of("b", ("a", "b")) == {"a": 0, "b": 1}
