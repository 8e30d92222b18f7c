"""Prometheus metrics of the joiner. With the local engine it counts itself; of a Flink job it exports Flink's
own numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge

from joiner.join import INTERNAL_ERROR
from joiner.outputs import Output
from joiner.rules import LATE_REASON
from joiner.state import END, PHASES
from roostream.runtime.clock import Clock
from roostream.runtime.event_time import START
from roostream.runtime.flink_rest import JobGauges
from roostream.runtime.kafka.topics import DEAD_LETTERS, Partition

_MAX_STILL_S = 60.0
_MAX_NAMED = 5


class EventTimeProgress:
    """Notices that records arrive while event time stands still: then nothing is closed, and no sample is
    written."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._watermark_ms: float | None = None
        self._num_records = 0.0
        self._still_since_s: float | None = None

    def observe(
        self, watermark_ms: float | None, num_records: float, partition_ms: Mapping[Partition, float]
    ) -> str:
        """Why no sample can be written; empty while event time advances or nothing arrives.

        `watermark_ms`: None before the first watermark. `num_records`: read so far; it begins again at 0 when
        a job restarts. `partition_ms`: event time of each partition, negative before its first record.
        """
        if watermark_ms != self._watermark_ms or num_records < self._num_records:
            self._watermark_ms, self._num_records, self._still_since_s = watermark_ms, num_records, None
        if num_records == self._num_records:
            return ""
        now_s = self.clock.monotonic_s()
        if self._still_since_s is None:
            self._still_since_s = now_s
        if now_s - self._still_since_s < _MAX_STILL_S:
            return ""
        slowest_ms = min(partition_ms.values(), default=0.0)
        names = [f"{topic}[{n}]" for (topic, n), ms in sorted(partition_ms.items()) if ms == slowest_ms]
        held_by = ", ".join(names[:_MAX_NAMED]) + (" and others" if len(names) > _MAX_NAMED else "")
        return (
            f"event time stands still while records arrive: {held_by or 'a partition'} is silent; every "
            "producer must send heartbeats to all partitions of the event topics"
        )


class JoinerMetrics:
    """Metrics of the joiner, whichever engine runs the join."""

    def __init__(self, registry: CollectorRegistry) -> None:
        gauge, counter = partial(Gauge, registry=registry), partial(Counter, registry=registry)
        self.records = counter("roostream_joiner_records_total", "records read")
        self.lost = gauge(
            "roostream_joiner_lost_records", "events that Kafka deleted before they were joined"
        )
        self.outputs = counter("roostream_joiner_outputs_total", "records written", ["topic", "reason"])
        self.outputs.labels(DEAD_LETTERS, INTERNAL_ERROR)  # an alert sees an increase only from 0
        self.watermark = gauge(
            "roostream_joiner_watermark_timestamp_seconds", "event time that all partitions have reached"
        )
        self.partition_watermark = gauge(
            "roostream_joiner_partition_watermark_timestamp_seconds",
            "event time that a partition has reached; absent before its first record",
            ["topic", "partition"],
        )
        self.watermark_pending = gauge(
            "roostream_joiner_watermark_pending_seconds",
            "event time that has been reached, but whose due requests are not processed yet",
        )
        self.keys = gauge("roostream_joiner_keys", "users with state (local engine only)")
        self.requests = gauge("roostream_joiner_requests", "requests in the state, by phase", ["phase"])
        self.running = gauge(
            "roostream_joiner_running", "1 while events are joined; 0 also while Flink does not answer"
        )
        self.late = gauge(
            "roostream_joiner_late_requests",
            "samples, since the job's last restart, of requests that arrived after their own close",
        )
        self.restarts = gauge("roostream_joiner_job_restarts", "restarts of the Flink job by Flink")
        self.checkpoints = gauge("roostream_joiner_checkpoints", "completed checkpoints of the Flink job")
        self.failed_checkpoints = gauge(
            "roostream_joiner_failed_checkpoints", "failed checkpoints of the Flink job"
        )
        self.checkpoint = gauge(
            "roostream_joiner_checkpoint_timestamp_seconds",
            "when the newest checkpoint or snapshot was completed",
        )
        self.checkpoint_duration = gauge(
            "roostream_joiner_checkpoint_duration_seconds", "how long the newest checkpoint or snapshot took"
        )
        self.checkpoint_bytes = gauge(
            "roostream_joiner_checkpoint_bytes", "bytes that the newest checkpoint or snapshot wrote"
        )
        self.state_bytes = gauge(
            "roostream_joiner_state_bytes",
            "size of the join's state, serialized, at the newest checkpoint or snapshot",
        )
        self.failed_commits = counter(
            "roostream_joiner_failed_commits_total",
            "transactions of outputs that could not be committed: the outputs are lost",
        )
        self.task_time = counter(
            "roostream_joiner_task_seconds_total", "time of the join's Flink tasks, by state", ["state"]
        )
        self.rules_changed = gauge(
            "roostream_joiner_rules_changed",
            "1 if the state was restored from a job with other rules (see the log)",
        )
        self._seen: dict[str, float] = {}  # totals of Flink that are in our counters already

    def count_outputs(self, outputs: Iterable[Output]) -> None:
        for output in outputs:
            self.outputs.labels(output.topic, output.reason).inc()
            if output.reason == LATE_REASON:
                self.late.inc()

    def set_state(
        self,
        watermark_ms: int,
        num_keys: int,
        num_requests: Sequence[int],
        partition_ms: Mapping[Partition, float],
    ) -> None:
        """Of the local engine. `num_requests`: by phase."""
        if START < watermark_ms < END:
            self.watermark.set(watermark_ms / 1000)
        self.keys.set(num_keys)
        for phase, num in zip(PHASES, num_requests, strict=True):
            self.requests.labels(phase).set(num)
        self._set_partitions(partition_ms)
        self.running.set(1)

    def set_snapshot(self, time_ms: int, duration_s: float, num_bytes: int, rules_changed: bool) -> None:
        """The local engine has written a snapshot, which contains its complete state."""
        self.checkpoint.set(time_ms / 1000)
        self.checkpoint_duration.set(duration_s)
        self.checkpoint_bytes.set(num_bytes)
        self.state_bytes.set(num_bytes)
        self.rules_changed.set(rules_changed)

    def set_job(self, gauges: JobGauges) -> None:
        """Of a Flink job, besides `running`."""
        values = gauges.values
        for name, gauge, scale in (
            ("restarts", self.restarts, 1.0),
            ("checkpoints", self.checkpoints, 1.0),
            ("failed_checkpoints", self.failed_checkpoints, 1.0),
            ("checkpoint_ms", self.checkpoint, 1e-3),
            ("checkpoint_duration_ms", self.checkpoint_duration, 1e-3),
            ("checkpoint_bytes", self.checkpoint_bytes, 1.0),
            ("state_bytes", self.state_bytes, 1.0),
            ("watermark_ms", self.watermark, 1e-3),
            ("watermark_pending_ms", self.watermark_pending, 1e-3),
            ("rules_changed", self.rules_changed, 1.0),
        ):
            if name in values:
                gauge.set(values[name] * scale)
        for phase in PHASES:
            if f"requests_{phase}" in values:
                # A subtask's own count may be negative after a change of parallelism; the sum is right.
                self.requests.labels(phase).set(max(0.0, values[f"requests_{phase}"]))
        self._set_partitions(gauges.partition_ms)
        self._count("records", values.get("records"), self.records)
        self._count("commits", values.get("failedCommittables"), self.failed_commits)
        for state in ("busy", "backpressured", "idle"):
            self._count(state, values.get(f"{state}_ms"), self.task_time.labels(state), 1e-3)
        for (topic, reason), total in gauges.outputs.items():
            self._count(f"{topic} {reason}", total, self.outputs.labels(topic, reason))
            if reason == LATE_REASON:
                self.late.set(total)

    def _set_partitions(self, partition_ms: Mapping[Partition, float]) -> None:
        for (topic, partition), ms in partition_ms.items():
            if ms > 0:
                self.partition_watermark.labels(topic, str(partition)).set(ms / 1000)

    def _count(self, name: str, total: float | None, counter: Counter, scale: float = 1.0) -> None:
        """Add what a total of Flink has grown by. It begins again at 0 when the job restarts."""
        if total is not None:
            before = self._seen.get(name, 0.0)
            counter.inc((total - before if total >= before else total) * scale)
            self._seen[name] = total
