"""How a worker is doing: computed once a second by the loop's thread, read by beats and scrapes from others."""

from __future__ import annotations

import dataclasses
from typing import Any

from runtime.clock import Clock
from runtime.exports import one_of
from trainer.monitoring.caught_up import CaughtUp, Liveness, Report
from trainer.monitoring.quality import QUALITY, summary
from trainer.worker import Worker

_EVERY_S = 1.0
_METRICS_EVERY_S = 5.0

LABELS: dict[str, str | tuple[str, ...]] = {
    "state": "state",
    "partition_lag_records": "partition",
    "stage_seconds": ("stage", "thread"),
    **{name.replace("@", "_"): "task" for name in QUALITY},
}
"""Label of each gauge that has one."""


class Monitor:
    """`observe` when time allows; `report` and `gauges` are of the last observation."""

    def __init__(self, worker: Worker, clock: Clock, *, bound_ms: int) -> None:
        self.worker, self.clock = worker, clock
        self.caught_up = CaughtUp(bound_ms=bound_ms)
        self._due_s = self._metrics_due_s = 0.0
        self._progress = self.caught_up.observe({}, clock.monotonic_s())
        self._metrics: dict[str, Any] = {}
        self._partition_lag: dict[str, int] = {}

    def observe(self) -> None:
        """In the loop's thread; does nothing until its second is over."""
        now_s = self.clock.monotonic_s()
        if now_s < self._due_s:
            return
        self._due_s = now_s + _EVERY_S
        lags = self.worker.loop.source.lag()
        self._partition_lag = {f"{topic}-{number}": lag.records for (topic, number), lag in lags.items()}
        self._progress = self.caught_up.observe(lags, now_s)
        if now_s >= self._metrics_due_s:
            self._metrics_due_s = now_s + _METRICS_EVERY_S
            self._metrics = summary(self.worker.loop.report())

    @property
    def progress(self) -> Report:
        return self._progress

    def report(self) -> dict[str, Any]:
        """What a beat carries: the worker's own report and how live it is."""
        at = self._progress
        return {
            **self.worker.report(),
            "state": str(at.state),
            "lag_records": at.lag_records,
            "lag_ms": at.lag_ms,
            "drained_per_s": at.drained_per_s,
            "eta_s": at.eta_s,
            "metrics": self._metrics,
        }

    def gauges(self) -> dict[str, Any]:
        """For `Exports`."""
        at, loop, counts = self._progress, self.worker.loop, self.worker.loop.counts
        tasks = self._metrics.get("tasks", {})
        by_task = {name.replace("@", "_"): {task: values.get(name) for task, values in tasks.items()} for name in QUALITY}
        return {
            **{name: value for name, value in dataclasses.asdict(counts).items() if name != "busy_s"},
            "step": self.worker.loop.num_steps,
            "watermark_ms": self.worker.loop.watermark_ms,
            "incarnation": self.worker.incarnation,
            "training": int(self.worker.training),
            "duplicates": self.worker.loop.own.num_skipped,
            "lost_records": self.worker.loop.source.num_lost,
            "row_wait_share": loop.stages.of_loop("pull", "push") / counts.busy_s if counts.busy_s else 0.0,
            "stage_seconds": loop.stages.seconds(),
            "most_staleness": loop.feed.most_staleness,
            "shared_rows": loop.feed.num_shared,
            "lag_records": at.lag_records,
            "lag_ms": at.lag_ms,
            "drained_per_s": at.drained_per_s,
            "eta_s": at.eta_s,
            "state": one_of(at.state, tuple(Liveness)),
            "partition_lag_records": self._partition_lag,
            **by_task,
        }
