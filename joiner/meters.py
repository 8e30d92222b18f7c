"""What the joiner exports: `roostream_joiner_*`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge

from joiner.build import Output
from joiner.rules import LATE
from joiner.state import END
from roostream.runtime.event_time import START
from roostream.runtime.flink_rest import LATE_REQUESTS


class Meters:
    """Counts of the local engine; of a Flink job what its REST interface tells."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.records = Counter("roostream_joiner_records", "records read", registry=registry)
        self.lost = Gauge(
            "roostream_joiner_lost_records",
            "events that Kafka no longer had when they were to be joined",
            registry=registry,
        )
        self.outputs = Counter(
            "roostream_joiner_outputs", "records written", ["topic", "why"], registry=registry
        )
        self.watermark = Gauge(
            "roostream_joiner_watermark_timestamp_seconds",
            "event time that all partitions have reached",
            registry=registry,
        )
        self.keys = Gauge("roostream_joiner_keys", "users with state", registry=registry)
        self.running = Gauge("roostream_joiner_running", "1 while events are joined", registry=registry)
        self.late = Gauge(
            f"roostream_joiner_{LATE_REQUESTS}",
            "samples since the job's last restart whose request came after its own close: nothing could be waited for",
            registry=registry,
        )
        self.restarts = Gauge(
            "roostream_joiner_job_restarts", "restarts of the Flink job by Flink", registry=registry
        )
        self.checkpoints = Gauge(
            "roostream_joiner_checkpoints", "completed checkpoints of the Flink job", registry=registry
        )

    def read(self, num_records: int, num_lost: int) -> None:
        """`num_lost`: in all, as the reader counts."""
        self.records.inc(num_records)
        self.lost.set(num_lost)

    def wrote(self, outputs: Iterable[Output]) -> None:
        for output in outputs:
            self.outputs.labels(output.topic, output.why).inc()
            if output.why == LATE:
                self.late.inc()

    def state(self, watermark_ms: int, num_keys: int) -> None:
        if START < watermark_ms < END:
            self.watermark.set(watermark_ms / 1000)
        self.keys.set(num_keys)
        self.running.set(1)

    def job(self, running: bool, gauges: Mapping[str, float]) -> None:
        """What `FlinkRest.gauges` gave."""
        self.running.set(running)
        for name, gauge, scale in (
            ("restarts", self.restarts, 1.0),
            ("checkpoints", self.checkpoints, 1.0),
            ("watermark_ms", self.watermark, 1e-3),
            (LATE_REQUESTS, self.late, 1.0),
        ):
            if name in gauges:
                gauge.set(gauges[name] * scale)
