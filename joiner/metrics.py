"""Prometheus metrics of the joiner. With the local engine it counts itself; of a Flink job it exports Flink's
own gauges."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge

from joiner.outputs import Output
from joiner.rules import LATE_REASON
from joiner.state import END
from roostream.runtime.event_time import START
from roostream.runtime.flink_rest import LATE_REQUESTS


class JoinerMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.records = Counter("roostream_joiner_records_total", "records read", registry=registry)
        self.lost = Gauge(
            "roostream_joiner_lost_records",
            "events that Kafka deleted before they were joined",
            registry=registry,
        )
        self.outputs = Counter(
            "roostream_joiner_outputs_total", "records written", ["topic", "reason"], registry=registry
        )
        self.watermark = Gauge(
            "roostream_joiner_watermark_timestamp_seconds",
            "event time that all partitions have reached",
            registry=registry,
        )
        self.keys = Gauge("roostream_joiner_keys", "users with state", registry=registry)
        self.running = Gauge("roostream_joiner_running", "1 while events are joined", registry=registry)
        self.late = Gauge(
            "roostream_joiner_late_requests",
            "samples, since the job's last restart, of requests that arrived after their own close",
            registry=registry,
        )
        self.restarts = Gauge(
            "roostream_joiner_job_restarts", "restarts of the Flink job by Flink", registry=registry
        )
        self.checkpoints = Gauge(
            "roostream_joiner_checkpoints", "completed checkpoints of the Flink job", registry=registry
        )

    def count_outputs(self, outputs: Iterable[Output]) -> None:
        for output in outputs:
            self.outputs.labels(output.topic, output.reason).inc()
            if output.reason == LATE_REASON:
                self.late.inc()

    def set_state(self, watermark_ms: int, num_keys: int) -> None:
        if START < watermark_ms < END:
            self.watermark.set(watermark_ms / 1000)
        self.keys.set(num_keys)
        self.running.set(1)

    def set_job(self, running: bool, gauges: Mapping[str, float]) -> None:
        """`gauges`: of `FlinkRest.gauges`."""
        self.running.set(running)
        for name, gauge, scale in (
            ("restarts", self.restarts, 1.0),
            ("checkpoints", self.checkpoints, 1.0),
            ("watermark_ms", self.watermark, 1e-3),
            (LATE_REQUESTS, self.late, 1.0),
        ):
            if name in gauges:
                gauge.set(gauges[name] * scale)
