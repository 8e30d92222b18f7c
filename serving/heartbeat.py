"""Event time of a serving process, and heartbeats to every partition of both event topics, so that event time
advances where there is little traffic.

Heartbeats go through the feature log like impressions and engagements. They carry the in-flight watermark, so
within one process no heartbeat overtakes an event. Between processes the joiner's lateness bound applies.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable

from roostream.runtime.clock import Clock
from roostream.runtime.kafka.topics import all_partitions
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from serving.feature_log.format import TOPICS, LogRecord
from serving.feature_log.log import FeatureLog, LogFullError

logger = logging.getLogger("roostream.serving.log")


class InflightWatermark:
    """The watermark never overtakes a request in flight, and event time goes back only in `follow_clock`.

    Thread-safe. Call `open` before and `close` after each request; its log records carry the timestamp
    that `open` returned.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._lock = threading.Lock()
        self._last_ms = 0
        self._open: Counter[int] = Counter()  # timestamps of requests in flight → number of requests

    def open(self) -> int:
        """Return the current time in ms. If the wall clock goes back, the last timestamp is repeated until
        the clock has caught up."""
        with self._lock:
            stamp_ms = self._now_ms()
            self._open[stamp_ms] += 1
            return stamp_ms

    def close(self, stamp_ms: int) -> None:
        """The request is logged, or will never be."""
        with self._lock:
            self._open[stamp_ms] -= 1
            if not self._open[stamp_ms]:
                del self._open[stamp_ms]

    def horizon_ms(self) -> int:
        """Return the watermark: no record with an older timestamp will be logged."""
        with self._lock:
            return min((self._now_ms(), *self._open))

    def follow_clock(self) -> None:
        """Call when Kafka refuses a time that this clock has not reached: the clock was ahead before it went
        back. Event time goes back to it; otherwise all events would be refused until it has caught up."""
        with self._lock:
            self._last_ms = self.clock.now_ms()

    def _now_ms(self) -> int:
        self._last_ms = max(self._last_ms, self.clock.now_ms())
        return self._last_ms


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
