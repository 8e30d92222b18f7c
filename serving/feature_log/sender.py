"""From the feature log to Kafka: in order, at least once, the cursor behind what is delivered and never beyond.

1 Entries are read behind the last one sent and given to the sink, at most `MAX_PENDING_*` of them at a time: while Kafka is
  away they wait on disk, not in memory.
2 Acknowledgements come in any order; the cursor moves over the delivered prefix only.
3 A delivery that failed in a way that can pass (broker gone, producer fenced): everything behind the cursor is sent again by
  a new sink. Some of it arrives twice; the joiner drops those.
4 A record that Kafka refuses for what it is (too large, its time) would block all behind it. Since a broker refuses whole
  batches, everything pending is sent again one by one, and what is refused alone is counted and passed over.

`step` does a bounded piece of work; a thread of `run` calls it, tests call it themselves.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Literal, Protocol, TypeAlias

from roostream.errors import UnavailableError
from roostream.runtime.backoff import Backoff
from serving.feature_log.format import LogRecord
from serving.feature_log.log import FeatureLog, LogEntry
from serving.feature_log.segment import Cursor

log = logging.getLogger("roostream.serving.log")

MAX_PENDING_BYTES, MAX_PENDING_RECORDS, READ_BYTES = 32 << 20, 20_000, 1 << 20
POLL_S, IDLE_S = 0.02, 0.5
STUCK_S = 2.0  # at a stop: without an acknowledgement for so long, Kafka is away

Outcome: TypeAlias = Literal["delivered", "refused", "failed"]
DeliveryCallback: TypeAlias = Callable[[Outcome, str], None]
"""(outcome, error text). `refused`: this record will never be taken. `failed`: it may or may not have been; try again."""


class LogSink(Protocol):
    def send(self, record: LogRecord, done: DeliveryCallback) -> None:
        """Queue one record; `done` is called exactly once, from `poll` or `close`. Order of a partition is kept."""

    def poll(self, timeout_s: float) -> None:
        """Call what is due; wait up to `timeout_s` for something."""

    def close(self) -> None:
        """Forget what is queued; `done` may not be called for it. The sink isn't used again."""


class _Pending:
    __slots__ = ("after", "delivered", "size")

    def __init__(self, after: Cursor, size: int) -> None:
        self.after, self.size, self.delivered = after, size, False


class LogSender:
    """Owns the log's cursor. Not thread-safe: all calls but `stop` from one thread."""

    def __init__(
        self, log: FeatureLog, open_sink: Callable[[], LogSink], backoff: Backoff | None = None
    ) -> None:
        self.log, self.open_sink = log, open_sink
        self.num_sent = self.num_refused = self.num_damaged = 0
        self._backoff = backoff or Backoff(what="Kafka (feature log)")
        self._sink: LogSink | None = None
        self._pending: deque[_Pending] = deque()
        self._pending_bytes = 0
        self._next = log.cursor
        self._alone_until = -1  # sequence: entries before it are sent one by one
        self._trouble: tuple[Outcome, str] | None = None

    @property
    def idle(self) -> bool:
        """Everything appended is acknowledged."""
        return not self._pending and self._next.sequence == self.log.end.sequence

    def run(self, stop: threading.Event) -> None:
        """Until `stop` is set."""
        while not stop.is_set():
            self.log.appended.clear()
            try:
                self.step(stop)
            except UnavailableError:
                if not stop.is_set():
                    raise
            if self.idle:
                self.log.appended.wait(IDLE_S)

    def step(self, stop: threading.Event | None = None) -> None:
        """Send what there is room for, take what has been acknowledged; waits at most about POLL_S, or as the backoff says."""
        sink = self._sink = self._sink or self.open_sink()
        for entry in self._readable():
            self._send(sink, entry)
        if self._pending:
            sink.poll(POLL_S)
            self._advance()
        if self._trouble is not None:
            self._begin_again(stop)

    def drain(self, timeout_s: float, clock_s: Callable[[], float]) -> int:
        """Deliver what is left, for at most `timeout_s` and while Kafka takes something every STUCK_S; the number of records that
        stay in the log for the next start."""
        now_s = begin_s = taken_s = clock_s()
        over = threading.Event()
        while not self.idle and now_s < begin_s + timeout_s and now_s < taken_s + STUCK_S:
            before = self.log.cursor.sequence
            try:
                self.step(over)
            except UnavailableError:
                break
            now_s = clock_s()
            taken_s = now_s if self.log.cursor.sequence > before else taken_s
        return self.log.backlog_records

    def close(self) -> None:
        if self._sink is not None:
            self._sink.close()
            self._sink = None

    def _readable(self) -> list[LogEntry]:
        """Step 1: the next entries, as far as there is room for them in memory."""
        if self._next.sequence < self._alone_until:
            return [] if self._pending else self.log.read(self._next, 1)
        if self._pending_bytes >= MAX_PENDING_BYTES or len(self._pending) >= MAX_PENDING_RECORDS:
            return []
        return self.log.read(self._next, READ_BYTES)

    def _send(self, sink: LogSink, entry: LogEntry) -> None:
        pending = _Pending(entry.after, 0 if entry.record is None else len(entry.record.value))
        self._pending.append(pending)
        self._pending_bytes += pending.size
        self._next = entry.after
        if entry.record is None:
            self.num_damaged += 1
            pending.delivered = True
            log.error("feature log: record %d is damaged on disk and passed over", entry.after.sequence - 1)
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
        """Steps 3 and 4; the sink is replaced, pending entries are read again."""
        assert self._trouble is not None
        (outcome, error), self._trouble = self._trouble, None
        if outcome == "refused" and self._alone_until > self._pending[0].after.sequence - 1:
            self.num_refused += 1
            log.error(
                "Kafka refuses record %d of the feature log: %s; passed over",
                self._pending[0].after.sequence - 1,
                error,
            )
            self.log.acknowledge(self._pending[0].after)
        elif outcome == "refused":
            self._alone_until = self._pending[-1].after.sequence
        self.close()
        self._pending.clear()
        self._pending_bytes = 0
        self._next = self.log.cursor
        if outcome == "failed":
            self._backoff.wait(error, stop)
