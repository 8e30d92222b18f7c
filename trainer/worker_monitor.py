"""A worker's lag, state and quality: computed once a second by the loop's thread, read by beats and scrapes
in other threads.

`report["watch"]` of a heartbeat is monitoring as plain values, for the status page and `status`:

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

import dataclasses
from collections.abc import Mapping
from typing import Any

from roostream.runtime.clock import Clock
from roostream.runtime.metrics_collector import one_of
from trainer.metrics import DRIFT, SELECTION, SHADOW, SLICES, TASKS, WINDOWS, key_of
from trainer.monitoring import windowed_metrics
from trainer.monitoring.caught_up import (
    CaughtUpDetector,
    CaughtUpLimits,
    LagStatus,
    Observation,
    ReadPhase,
    TrainingState,
)
from trainer.monitoring.drift import DriftDetector
from trainer.monitoring.progressive_metrics import SHARED_SCORES
from trainer.monitoring.shadow import ShadowModel
from trainer.monitoring.windowed_metrics import LIVE, SLICE_WINDOW, without_scores
from trainer.read_bounds import ReadBounds
from trainer.worker import Worker

_EVERY_S = 1.0
_METRICS_EVERY_S = 5.0
_FRESH_S = 10.0  # an older observation counts as unknown, because the loop's thread hangs


class Monitor:
    """`observe` runs in the loop's thread; `report` and `metrics` return the last observation, in any
    thread."""

    def __init__(
        self, worker: Worker, clock: Clock, patience: CaughtUpLimits, drift: DriftDetector | None = None
    ) -> None:
        """`drift`: observes the batches that the worker scores; None = no drift detection."""
        self.worker, self.clock, self.drift = worker, clock, drift
        self.caught_up = CaughtUpDetector(patience)
        self._due_s = self._metrics_due_s = 0.0
        self._observed_s = clock.monotonic_s()
        self._progress = self.caught_up.observe({}, self._observed_s)
        self._metrics: dict[str, Any] = {}
        self._quality: dict[str, Any] = {"windows": {}, "slices": {}, "shadow": None}

    def observe(self, held: str = "") -> None:
        """Observe the worker, at most once a second. `held`: why training is on hold; reported at once."""
        now_s = self.clock.monotonic_s()
        if now_s < self._due_s and not held:
            return
        self._due_s = now_s + _EVERY_S
        source = self.worker.loop.source
        self._progress = self.caught_up.observe(
            source.lag(),
            now_s,
            expected=source.positions().keys(),
            held=held,
            obstacle=self.worker.broken,
            phase=read_phase(self.worker.read_bounds),
        )
        self._observed_s = now_s
        if now_s >= self._metrics_due_s:
            self._metrics_due_s = now_s + _METRICS_EVERY_S
            loop = self.worker.loop
            several = self.worker.lockstep is not None
            counted = loop.partitions.metrics()
            self._metrics = counted.mergeable_summary(SHARED_SCORES if several else 0)
            windows = loop.partitions.windowed.report(loop.watermark_ms)
            self._quality = quality_report(windows, loop.shadow, with_scores=several)

    @property
    def progress(self) -> Observation:
        """The last observation; unknown if it is too old."""
        silent_s = self.clock.monotonic_s() - self._observed_s
        if silent_s <= _FRESH_S:
            return self._progress
        reason = f"the training loop has not turned for {silent_s:.0f} s"
        return dataclasses.replace(
            self._progress,
            overall=LagStatus(
                state=TrainingState.UNKNOWN,
                reason=reason,
                in_state_s=silent_s - _FRESH_S,
                lost_records=self._progress.overall.lost_records,
            ),
            partitions={},
        )

    def report(self) -> dict[str, Any]:
        """Fields of a beat: the worker's report, its metrics and its liveness."""
        return {
            **self.worker.report(),
            "metrics": self._metrics,
            "watch": liveness_report(self.progress) | self._quality | {"drift": self._drift},
        }

    @property
    def _drift(self) -> dict[str, Any]:
        return self.drift.report() if self.drift else {}

    def metrics(self) -> dict[str, Any]:
        """Metrics of `trainer.metrics.WORKER`."""
        seen, loop, counts = self.progress, self.worker.loop, self.worker.loop.counts
        at = seen.overall
        by_partition = {
            f"{topic}-{number}": standing for (topic, number), standing in seen.partitions.items()
        }
        tasks = self._metrics.get("tasks", {})
        selection = loop.selection.report()
        return {
            "roostream_worker_requests_total": counts.requests,
            "roostream_worker_candidates_total": counts.candidates,
            "roostream_worker_frozen_total": counts.frozen,
            "roostream_worker_non_finite_total": counts.non_finite,
            "roostream_worker_dead_letters_total": counts.dead_letters,
            "roostream_worker_corrections_total": counts.corrections,
            "roostream_worker_rehearsed_total": counts.rehearsed,
            "roostream_worker_outcomes_total": dict(loop.outcomes.total),
            **{metric: selection.get(key_of(metric)) for metric in SELECTION},
            "roostream_worker_step": loop.num_steps,
            "roostream_worker_watermark_timestamp_seconds": _seconds(loop.watermark_ms),
            "roostream_worker_incarnation": self.worker.incarnation,
            "roostream_worker_training": self.worker.training,
            "roostream_worker_duplicates_total": counts.duplicates,
            "roostream_worker_lost_records_total": loop.source.num_lost,
            "roostream_worker_row_wait_share": loop.stages.of_loop("pull", "push") / counts.busy_s
            if counts.busy_s
            else 0.0,
            "roostream_worker_stage_seconds_total": loop.stages.seconds(),
            "roostream_worker_max_staleness": loop.feed.max_staleness,
            "roostream_worker_shared_rows_total": loop.feed.num_shared,
            "roostream_worker_lag_records": at.lag_records,
            "roostream_worker_lag_seconds": _seconds(at.lag_ms),
            "roostream_worker_hidden_records": at.hidden_records,
            "roostream_worker_retention_share": at.retention_share,
            "roostream_worker_arrived_per_second": at.arrival.value if at.arrival else None,
            "roostream_worker_consumed_per_second": at.consumption.value if at.consumption else None,
            "roostream_worker_drained_per_second": at.drain.value if at.drain else None,
            "roostream_worker_eta_seconds": at.eta.s,
            "roostream_worker_eta_low_seconds": at.eta.low_s,
            "roostream_worker_eta_high_seconds": at.eta.high_s,
            "roostream_worker_state": one_of(at.state, tuple(TrainingState)),
            "roostream_worker_state_seconds_total": {
                str(state): seconds for state, seconds in seen.state_seconds.items()
            },
            "roostream_worker_partition_lag_records": {
                name: standing.lag_records for name, standing in by_partition.items()
            },
            "roostream_worker_partition_lag_seconds": {
                name: _seconds(standing.lag_ms) for name, standing in by_partition.items()
            },
            "roostream_worker_partition_lost_records_total": {
                name: standing.lost_records for name, standing in by_partition.items()
            },
            **{
                metric: {task: values.get(key_of(metric)) for task, values in tasks.items()}
                for metric in TASKS
            },
            **quality_gauges(self._quality),
            **{metric: self._drift.get(key_of(metric, "drift_"), {}) for metric in DRIFT},
        }


def _seconds(ms: float | None) -> float | None:
    return None if ms is None else ms / 1000


def read_phase(bounds: ReadBounds) -> ReadPhase:
    """What the controller has assigned to the worker."""
    if bounds.is_initial:
        return ReadPhase.WAIT if bounds.is_trained else ReadPhase.HISTORY
    return ReadPhase.STREAM if bounds.phased else ReadPhase.READ


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
        for name in (windowed_metrics.SHADOW, LIVE)
        for task, numbers in shadow.get(name, {}).get(SLICE_WINDOW, {}).items()
    }
    groups = (("window_", WINDOWS, windows), ("slice_", SLICES, slices), ("shadow_", SHADOW, shadows))
    return {
        "roostream_worker_shadow_version": {shadow["version"]: 1} if shadow else {},
        **{
            metric: {labels: numbers[key_of(metric, group)] for labels, numbers in series.items()}
            for group, metrics, series in groups
            for metric in metrics
        },
    }
