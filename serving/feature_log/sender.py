"""Sends the feature log to Kafka: in order, at least once. The cursor never passes an undelivered record.

1 Read the entries after the last one sent and give them to the sink, at most `MAX_PENDING_*` at a time:
  while Kafka is unavailable, records wait on disk and not in memory.
2 Acknowledgments come in any order; the cursor moves over the delivered prefix only.
3 After a transient failure (broker gone, producer failed), everything after the cursor is sent again by a
  new sink. The joiner drops the duplicates.
4 A record that Kafka rejects for itself (too large, invalid time) would block all others. A broker rejects
  whole batches, so all pending records are sent again one by one; the one that is rejected alone is counted
  and skipped. Only a time of the last ten minutes is not: there the broker's clock is behind, and all wait.

`step` does a bounded amount of work; `run` is a thread that calls it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

from confluent_kafka import KafkaError, Producer

from roostream.errors import UnavailableError
from roostream.runtime.backoff import Backoff
from roostream.runtime.kafka import clients
from roostream.runtime.kafka.broker import Broker
from roostream.runtime.kafka.topics import name_of
from serving.feature_log.format import LogRecord
from serving.feature_log.log import FeatureLog, LogEntry
from serving.feature_log.segment import Cursor

log = logging.getLogger("roostream.serving.log")

MAX_PENDING_BYTES, MAX_PENDING_RECORDS, READ_BYTES = 32 << 20, 20_000, 1 << 20
POLL_S, IDLE_S = 0.02, 0.5
GATHER_S = 0.01  # between two steps, so that the thread seldom interrupts the scoring of requests
STUCK_S = 2.0  # at a stop: heartbeats wait only so long for an acknowledgment

WAIT_FOR_CLOCK_MS = 600_000
"""Age up to which a record waits although the broker refuses its time."""

Outcome: TypeAlias = Literal["delivered", "refused", "refused_time", "failed"]
DeliveryCallback: TypeAlias = Callable[[Outcome, str], None]
"""Called with (outcome, error text). `refused`: the record will never be accepted. `refused_time`: nor will
it, unless the broker's clock is wrong. `failed`: it may have been accepted; try again."""


# errors of the record itself: a retry would fail as well
_REFUSED = frozenset((KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE)) | {
    KafkaError.INVALID_RECORD,
    KafkaError.INVALID_MSG,
}


class KafkaSink:
    """Kafka, by one idempotent producer."""

    def __init__(self, producer: Producer, prefix: str) -> None:
        self.producer, self.prefix = producer, prefix

    @classmethod
    def open(cls, broker: Broker, prefix: str) -> KafkaSink:
        """Connect in the background; the producer waits for an unavailable broker."""
        return cls(clients.producer(broker), prefix)

    def send(self, record: LogRecord, done: DeliveryCallback) -> None:
        """Queue a record; `done` is called exactly once, from `poll` or `close`. The order within a partition
        is kept."""

        def on_delivery(error: KafkaError | None, _: Any) -> None:
            if error is None:
                done("delivered", "")
            elif error.code() == KafkaError.INVALID_TIMESTAMP:
                done("refused_time", error.str())
            else:
                done("refused" if error.code() in _REFUSED else "failed", error.str())

        clients.send(
            self.producer,
            name_of(self.prefix, record.topic),
            key=record.key or None,
            value=record.value,
            timestamp_ms=record.timestamp_ms,
            partition=record.partition,
            on_delivery=on_delivery,
        )

    def poll(self, timeout_s: float) -> None:
        """Run due callbacks; wait up to `timeout_s` for one. Raises ProducerFailedError, as `send` does."""
        clients.poll(self.producer, timeout_s)

    def close(self) -> None:
        """Drop what is queued or in flight: a late delivery would come after the first records of the next
        sink. `done` may not be called for it."""
        self.producer.purge(in_queue=True, in_flight=True)
        with contextlib.suppress(clients.ProducerFailedError):
            clients.poll(self.producer, 0)


class _Pending:
    __slots__ = ("after", "delivered", "size", "time_ms")

    def __init__(self, after: Cursor, record: LogRecord | None) -> None:
        self.after, self.delivered = after, False
        self.size, self.time_ms = (0, 0) if record is None else (len(record.value), record.timestamp_ms)


class LogSender:
    """Owns the log's cursor. Not thread-safe: call all methods from one thread."""

    def __init__(
        self,
        log: FeatureLog,
        open_sink: Callable[[], KafkaSink],
        backoff: Backoff | None = None,
        on_future_time: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_future_time` is called when a record is skipped whose time this machine's clock has not
        reached."""
        self.log, self.open_sink, self.on_future_time = log, open_sink, on_future_time
        self.num_sent = self.num_refused = self.num_damaged = 0
        self._backoff = backoff or Backoff(what="Kafka (feature log)")
        self._sink: KafkaSink | None = None
        self._pending: deque[_Pending] = deque()
        self._pending_bytes = 0
        self._next = log.cursor
        self._alone_until = -1  # entries before this sequence number are sent one by one
        self._trouble: tuple[Outcome, str] | None = None

    @property
    def idle(self) -> bool:
        """Whether everything appended is acknowledged."""
        return not self._pending and self._next.sequence == self.log.end.sequence

    def run(self, stop: threading.Event) -> None:
        """Run until `stop` is set. A record is sent at most about GATHER_S after it was appended."""
        while not stop.is_set():
            self.log.appended.clear()
            try:
                self.step(stop)
            except UnavailableError:
                if not stop.is_set():
                    raise
            if self.idle:
                self.log.appended.wait(IDLE_S)
            stop.wait(GATHER_S)

    def step(self, stop: threading.Event | None = None) -> None:
        """Send what fits, process acknowledgments. Waits about POLL_S at most, or as the backoff says."""
        sink = self._sink = self._sink or self.open_sink()
        try:
            for entry in self._readable():
                self._send(sink, entry)
            if self._pending:
                sink.poll(POLL_S)
        except clients.ProducerFailedError as error:
            self._trouble = ("failed", str(error))
        self._advance()
        if self._trouble is not None:
            self._begin_again(stop)

    def drain(self, timeout_s: float, clock_s: Callable[[], float]) -> int:
        """Deliver the rest for at most `timeout_s`, also if Kafka is unavailable at first. Call it once
        nothing is appended any more. Return the number of impressions and engagements that are left.

        Heartbeats are not worth waiting for an outage to end: if nothing else is left, draining ends after
        STUCK_S without an acknowledgment.
        """
        events = self.log.unacknowledged_events()
        now_s = acknowledged_s = clock_s()
        end_s = now_s + timeout_s
        while not self.idle and now_s < end_s:
            before = self.log.cursor.sequence
            only_heartbeats = not events or events[-1] < before
            if only_heartbeats and now_s >= acknowledged_s + STUCK_S:
                break
            self.step()
            now_s = clock_s()
            acknowledged_s = now_s if self.log.cursor.sequence > before else acknowledged_s
        return sum(number >= self.log.cursor.sequence for number in events)

    def close(self) -> None:
        sink, self._sink = self._sink, None  # first: what it calls back for now is no trouble of the next one
        if sink is not None:
            sink.close()

    def _readable(self) -> list[LogEntry]:
        """Step 1: the next entries that fit into memory."""
        if self._next.sequence <= self._alone_until:  # the record after them too: it waits for the last one
            return [] if self._pending else self.log.read(self._next, 1)
        if self._pending_bytes >= MAX_PENDING_BYTES or len(self._pending) >= MAX_PENDING_RECORDS:
            return []
        return self.log.read(self._next, READ_BYTES)

    def _send(self, sink: KafkaSink, entry: LogEntry) -> None:
        pending = _Pending(entry.after, entry.record)
        self._pending.append(pending)
        self._pending_bytes += pending.size
        self._next = entry.after
        if entry.record is None:
            self.num_damaged += 1
            pending.delivered = True
            log.error("feature log: record %d is damaged on disk and skipped", entry.after.sequence - 1)
            return

        def done(outcome: Outcome, error: str) -> None:
            if outcome == "delivered":
                pending.delivered = True
            elif sink is self._sink and (self._trouble is None or outcome == "failed"):
                self._trouble = (outcome, error)

        sink.send(entry.record, done)

    def _advance(self) -> None:
        """Step 2."""
        after: Cursor | None = None
        while self._pending and self._pending[0].delivered:
            pending = self._pending.popleft()
            self._pending_bytes -= pending.size
            self.num_sent += 1
            after = pending.after
        if after is not None:
            self.log.acknowledge(after)
            self._backoff.reached()

    def _begin_again(self, stop: threading.Event | None) -> None:
        """Steps 3 and 4: replace the sink and read pending entries again."""
        assert self._trouble is not None
        (outcome, error), self._trouble = self._trouble, None
        if outcome != "failed" and self._alone_until < self._pending[0].after.sequence:
            self._alone_until = self._pending[-1].after.sequence
        elif outcome == "refused_time" and 0 <= self._age_ms() <= WAIT_FOR_CLOCK_MS:
            outcome, error = "failed", f"{error}: compare the clocks of the broker and of this machine"
        elif outcome != "failed":
            self.num_refused += 1
            if outcome == "refused_time" and self._age_ms() < 0:
                self.on_future_time()
            log.error(
                "Kafka rejects record %d of the feature log: %s; skipped",
                self._pending[0].after.sequence - 1,
                error,
            )
            self.log.acknowledge(self._pending[0].after)
        self.close()
        self._pending.clear()
        self._pending_bytes = 0
        self._next = self.log.cursor
        if outcome == "failed":
            self._backoff.wait(error, stop)

    def _age_ms(self) -> int:
        return self._backoff.clock.now_ms() - self._pending[0].time_ms
