"""A worker's lag, state and quality: computed once a second by the loop's thread, read by beats and scrapes
in other threads."""

from __future__ import annotations

import dataclasses
from typing import Any

from roostream.runtime.clock import Clock
from roostream.runtime.metrics_collector import one_of
from trainer.monitoring.caught_up import (
    CaughtUpDetector,
    CaughtUpLimits,
    LagStatus,
    Observation,
    ReadPhase,
    TrainingState,
)
from trainer.monitoring.drift import DriftDetector
from trainer.monitoring.progressive_metrics import METRIC_NAMES, summarize
from trainer.monitoring.report import liveness_report, quality_gauges, quality_report
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
            counted = loop.partitions.metrics()
            self._metrics = {**summarize(counted.report()), "sums": counted.sums()}
            self._quality = quality_report(loop.partitions.windowed.report(loop.watermark_ms), loop.shadow)

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
        """Values of `trainer.metrics.WORKER`."""
        seen, loop, counts = self.progress, self.worker.loop, self.worker.loop.counts
        at = seen.overall
        by_partition = {
            f"{topic}-{number}": standing for (topic, number), standing in seen.partitions.items()
        }
        tasks = self._metrics.get("tasks", {})
        by_task = {
            name.replace("@", "_"): {task: values.get(name) for task, values in tasks.items()}
            for name in METRIC_NAMES
        }
        return {
            **{name: value for name, value in dataclasses.asdict(counts).items() if name != "busy_s"},
            "outcomes": dict(loop.outcomes.total),
            **{name: value for name, value in loop.selection.report().items() if value is not None},
            "step": self.worker.loop.num_steps,
            "watermark_ms": self.worker.loop.watermark_ms,
            "incarnation": self.worker.incarnation,
            "training": int(self.worker.training),
            "duplicates": self.worker.loop.partitions.num_skipped,
            "lost_records": self.worker.loop.source.num_lost,
            "row_wait_share": loop.stages.of_loop("pull", "push") / counts.busy_s if counts.busy_s else 0.0,
            "stage_seconds": loop.stages.seconds(),
            "max_staleness": loop.feed.max_staleness,
            "shared_rows": loop.feed.num_shared,
            "lag_records": at.lag_records,
            "lag_ms": at.lag_ms,
            "hidden_records": at.hidden_records,
            "retention_share": at.retention_share,
            "arrived_per_s": at.arrival.value if at.arrival else None,
            "consumed_per_s": at.consumption.value if at.consumption else None,
            "drained_per_s": at.drain.value if at.drain else None,
            "eta_s": at.eta.s,
            "eta_low_s": at.eta.low_s,
            "eta_high_s": at.eta.high_s,
            "state": one_of(at.state, tuple(TrainingState)),
            "state_s": {str(state): seconds for state, seconds in seen.state_seconds.items()},
            "partition_lag_records": {name: standing.lag_records for name, standing in by_partition.items()},
            "partition_lag_ms": {name: standing.lag_ms for name, standing in by_partition.items()},
            "partition_lost_records": {
                name: standing.lost_records for name, standing in by_partition.items()
            },
            **by_task,
            **quality_gauges(self._quality),
            **{f"drift_{name}": values for name, values in self._drift.items()},
        }


def read_phase(bounds: ReadBounds) -> ReadPhase:
    """What the controller has assigned to the worker."""
    if bounds.is_initial:
        return ReadPhase.WAIT if bounds.is_trained else ReadPhase.HISTORY
    return ReadPhase.STREAM if bounds.phased else ReadPhase.READ
