"""`report["watch"]` of a worker's heartbeat: monitoring as plain values, for the status page and `status`.

    state, reason, in_state_s    overall state (trainer/monitoring/caught_up.py)
    state_seconds                {state: seconds in it since the worker started}
    lag_records, hidden_records  up to the last stable offset, and from there to the high watermark
    lag_ms, lost_records         event time; records deleted before they were read
    retention_share              lag / records kept by retention; null before it deletes, 1 = records are lost
    arrival_per_s, consumption_per_s, drain_per_s    null, or [value, low, high] (95 %; null: unknown)
    eta_s                        [value, low, high]; value null = unknown, only high null = no upper bound
    windows                      {"1h" | "1d" | "all": {task: numbers}}, event-time windows that end at the
                                 watermark; at most MAX_TASKS tasks. Numbers: candidates, base_rate, ne,
                                 ne_online (against the base rate known before), auc, calibration, sums;
                                 of several workers also scores, for the AUC of all
    slices                       {slice: {value: {"1h" | "all": {task: numbers}}}}
    shadow                       null, or {version, rows: "live", shadow: {"1h" | "all": …}, live: {…}}: a
                                 frozen dense part and the model in training, on the same candidates and rows
    drift                        {} or a report of `DriftDetector`
    partitions                   [{topic, partition, all of the above but state_seconds}], at most MAX_ROWS

Unknown numbers are null. The size is bounded, whatever the schema.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.monitoring.caught_up import LagStatus, Observation
from trainer.monitoring.shadow import ShadowModel
from trainer.monitoring.windowed_metrics import LIVE, SHADOW, SLICE_WINDOW, without_scores

MAX_ROWS = 256
MAX_TASKS = 4


def liveness_report(observation: Observation) -> dict[str, Any]:
    """The part of the report on lag and state."""
    rows = [
        {"topic": topic, "partition": number, **status_fields(at)}
        for (topic, number), at in observation.partitions.items()
    ]
    return {
        **status_fields(observation.overall),
        "state_seconds": {str(state): seconds for state, seconds in observation.state_seconds.items()},
        "partitions": rows[:MAX_ROWS],
    }


def quality_report(
    metrics: Mapping[str, Any], shadow: ShadowModel | None, *, with_scores: bool = False
) -> dict[str, Any]:
    """The part on prediction quality; `metrics`: `WindowedMetrics.report`. `with_scores`: include what the
    controller needs for the AUC over several workers."""

    def few(windows: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        return {
            window: {
                task: dict(numbers) if with_scores else without_scores(numbers)
                for task, numbers in list(tasks.items())[:MAX_TASKS]
            }
            for window, tasks in windows.items()
        }

    copies = (
        {name: few(windows) for name, windows in metrics["shadow"].items()} if metrics.get("shadow") else {}
    )
    return {
        "windows": few(metrics["windows"]),
        "slices": {
            slice_: {v: few(windows) for v, windows in values.items()}
            for slice_, values in metrics["slices"].items()
        },
        "shadow": {"version": shadow.version, "rows": "live", **copies} if shadow else None,
    }


def status_fields(status: LagStatus) -> dict[str, Any]:
    """A status as plain values."""
    return {
        "state": str(status.state),
        "reason": status.reason,
        "in_state_s": status.in_state_s,
        "lag_records": status.lag_records,
        "hidden_records": status.hidden_records,
        "lag_ms": status.lag_ms,
        "lost_records": status.lost_records,
        "retention_share": status.retention_share,
        "arrival_per_s": None if status.arrival is None else list(status.arrival),
        "consumption_per_s": None if status.consumption is None else list(status.consumption),
        "drain_per_s": None if status.drain is None else list(status.drain),
        "eta_s": list(status.eta),
    }


MAX_TASKS_OF_SLICES = 2  # as gauges; a heartbeat has more


def quality_gauges(quality: Mapping[str, Any]) -> dict[str, Any]:
    """Gauges of a `quality_report`; slices and shadow of the last hour.

    Label `of`: "shadow", or "live" for the model in training on the same candidates.
    """
    windows = {
        (window, task): numbers
        for window, tasks in quality["windows"].items()
        for task, numbers in tasks.items()
    }
    slices = {
        (slice_, value, task): numbers
        for slice_, values in quality["slices"].items()
        for value, by_window in values.items()
        for task, numbers in list(by_window.get(SLICE_WINDOW, {}).items())[:MAX_TASKS_OF_SLICES]
    }
    shadow = quality["shadow"] or {}
    shadows = {
        (name, task): numbers
        for name in (SHADOW, LIVE)
        for task, numbers in shadow.get(name, {}).get(SLICE_WINDOW, {}).items()
    }
    return {
        "roostream_worker_window_candidates": _column(windows, "candidates"),
        "roostream_worker_window_base_rate": _column(windows, "base_rate"),
        "roostream_worker_window_ne": _column(windows, "ne"),
        "roostream_worker_window_ne_online": _column(windows, "ne_online"),
        "roostream_worker_window_auc": _column(windows, "auc"),
        "roostream_worker_window_calibration": _column(windows, "calibration"),
        "roostream_worker_slice_candidates": _column(slices, "candidates"),
        "roostream_worker_slice_ne": _column(slices, "ne"),
        "roostream_worker_slice_auc": _column(slices, "auc"),
        "roostream_worker_slice_calibration": _column(slices, "calibration"),
        "roostream_worker_shadow_candidates": _column(shadows, "candidates"),
        "roostream_worker_shadow_ne": _column(shadows, "ne"),
        "roostream_worker_shadow_auc": _column(shadows, "auc"),
        "roostream_worker_shadow_calibration": _column(shadows, "calibration"),
        "roostream_worker_shadow_version": {shadow["version"]: 1} if shadow else {},
    }


def _column(series: Mapping[Any, Mapping[str, Any]], name: str) -> dict[Any, Any]:
    return {key: numbers[name] for key, numbers in series.items()}
