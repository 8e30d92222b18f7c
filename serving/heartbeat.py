"""Heartbeats to every partition of both event topics, so that event time advances where there is little
traffic.

Heartbeats go through the feature log like impressions and engagements. They carry the in-flight watermark, so
within one process no heartbeat overtakes an event. Between processes the joiner's lateness bound applies.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from roostream.runtime.clock import Clock
from roostream.runtime.kafka.topics import all_partitions
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from serving.feature_log.format import TOPICS, LogRecord
from serving.feature_log.log import FeatureLog, LogFullError
from serving.inflight_watermark import InflightWatermark

logger = logging.getLogger("roostream.serving.log")


def beat(log: FeatureLog, watermark: InflightWatermark, producer: str, num_partitions: int) -> None:
    """Append one heartbeat per partition. Raises LogFullError: some partitions may be missing; the next call
    retries all."""
    time_ms = watermark.horizon_ms()
    value = wire.encode(wire.HEARTBEAT, pb.Heartbeat(time_ms=time_ms, producer=producer))
    for topic, partition in all_partitions(TOPICS, num_partitions):
        log.append(LogRecord(topic, partition, time_ms, b"", value))


def run(beat_once: Callable[[], None], interval_ms: int, clock: Clock, stop: threading.Event) -> None:
    """Call `beat_once` every `interval_ms` until `stop`. A full log is reported once; heartbeats resume when
    it has space."""
    full = False
    while not stop.is_set():
        try:
            beat_once()
            full = False
        except LogFullError as error:
            if not full:
                logger.warning("heartbeats are paused: %s", error)
            full = True
        clock.sleep(interval_ms / 1000, stop)
