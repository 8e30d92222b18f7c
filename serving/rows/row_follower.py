"""Follows embedding rows: bootstrap from the shards, then deltas and barriers from the `rows` topic.

1 Note the end offsets of the topic.
2 Stream all rows from the shards into the replica.
3 Apply the topic from the noted offsets. The replica drops deltas that the shards' answers already contained.
4 A bucket with a missed or refused record is read from its shard again, while the topic is followed.
5 If deltas alone cannot keep the replica up to date (a barrier says so, or the topic lost the next offset),
  start again at 1. Requests use the rows in memory meanwhile; a row never goes back to an older version
  (guarantee G4).

The rows are known to be current when the whole topic is applied, no bucket is stale, and every shard answers:
a silent shard may have rows that were not published. The age of the rows counts from the last such moment.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import numpy as np

from roostream.errors import RoostreamError, SchemaError, UnavailableError, WireError
from roostream.runtime.backoff import Backoff
from roostream.runtime.clock import Clock, MonotonicToWallTime
from roostream.runtime.kafka.consumer import RecordConsumer, RecordsGoneError
from roostream.runtime.kafka.kafka_consumer import ConsumerOptions
from roostream.runtime.kafka.topics import ROWS, all_partitions
from roostream.runtime.log_rate_limit import LogRateLimit
from roostream.runtime.rpc.transport import Transport
from roostream.wire import records as wire
from roostream.wire.lookup import Lookup
from roostream.wire.records import Record

log = logging.getLogger("roostream.serving.rows")

POLL_S = 0.1
REPAIR_EVERY_S = 5.0
# Interval of checks that shards answer, after success and after a failure.
ASK_EVERY_S, ASK_AGAIN_S = (1.0, 5.0)
_ASK_TIMEOUT_S = 0.5
_MAX_OLDER_S = 30.0  # a shard that is restored a moment later than the others catches up within this time
_POLL_RECORDS = 500
_RETRIED = UnavailableError, WireError, SchemaError  # the shards may get a wider table before serving does


class RowReplica(Protocol):
    """Implemented by `param_server.replica.replica.Replica` and the other classes of that package."""

    @property
    def needs_bootstrap(self) -> bool: ...

    @property
    def num_rows(self) -> int: ...

    @property
    def incarnation(self) -> int:
        """The newest incarnation of which rows or barriers were applied."""

    def apply(self, message: Any) -> bool:
        """Apply a RowDelta or Barrier; False if it was not newer. May set `needs_bootstrap`. RoostreamError:
        nothing changed."""

    def bootstrap(self, transports: Sequence[Transport]) -> None:
        """Read all rows of all shards. UnavailableError: call again."""

    @property
    def stale(self) -> Collection[Any]:
        """Buckets with a missed record."""

    def mark_stale(self, bucket: int) -> None:
        """A record of this bucket was refused."""

    def repair(self, transports: Sequence[Transport]) -> None:
        """Read the stale buckets from their shards. UnavailableError, TransportError: call again."""

    def gather(self, lookup: Lookup) -> dict[str, np.ndarray]: ...


def rows_consumer_options(prefix: str, num_partitions: int) -> ConsumerOptions:
    """Read the whole topic; lost records must not be skipped."""
    return ConsumerOptions(
        partitions=all_partitions((ROWS,), num_partitions),
        prefix=prefix,
        skip_lost_records=False,
        track_end_offsets=True,
    )


class RowFollower:
    """`run` is a thread; attributes may be read from others."""

    def __init__(
        self,
        replica: RowReplica,
        topic: RecordConsumer,
        shards: Sequence[Transport],
        observe: Callable[[str, float], None],
        clock: Clock,
        wait_for_topic: Callable[[threading.Event], None] = lambda stop: None,
    ) -> None:
        """`wait_for_topic`: returns once the topic exists, or when the event is set."""
        self.replica, self.topic, self.shards = replica, topic, shards
        self.observe, self.clock, self.wait_for_topic = observe, clock, wait_for_topic
        self.ready = False  # True from the first complete bootstrap on
        self.current_s: float | None = None  # monotonic time when the rows were last known to be current
        self.num_applied = self.num_refused = self.num_bootstraps = self.num_repaired = 0
        self._backoff = Backoff(what="rows of the shards", clock=clock)
        self._log_rate_limit = LogRateLimit(clock.monotonic_s)
        self._repair_at_s = self._ask_at_s = 0.0
        self._shards_are_current = False
        self._older_since_s: float | None = None  # since when a shard's incarnation is older than the rows
        self._warned_of = -1  # the incarnation that the last warning named
        self._wall = MonotonicToWallTime(clock)

    def run(self, stop: threading.Event) -> None:
        """Run until `stop`. A shard whose answers cannot be read, or that has another schema, is waited for
        like one that is away.

        The rows in memory stay in use meanwhile, and their age tells how old they are. Raises ConfigError:
        the topic has another number of partitions than the settings.
        """
        self.wait_for_topic(stop)
        while not stop.is_set():
            try:
                self._backoff.until(self.bootstrap, _RETRIED, stop)
            except UnavailableError:  # stopped while waiting for shards or the topic
                return
            self._follow(stop)

    def bootstrap(self) -> None:
        """Steps 1 to 3. UnavailableError: rows that have arrived are used; call again."""
        offsets = self.topic.end_offsets()
        self.replica.bootstrap(self.shards)
        self.topic.seek(offsets)
        self.num_bootstraps += 1
        self.ready = True
        log.info("%d rows read from %d shards", self.replica.num_rows, len(self.shards))

    def age_s(self) -> float | None:
        """Time since the rows were known to be current; None = never. Any thread."""
        return None if self.current_s is None else max(self.clock.monotonic_s() - self.current_s, 0.0)

    def current_time_s(self) -> float | None:
        """Unix time at which the rows were last known to be current. Any thread."""
        return None if self.current_s is None else self._wall.of(self.current_s) / 1000

    def lag(self) -> int | None:
        """Records of the topic that are not applied yet; None = unknown (before the bootstrap, or Kafka is
        away). Any thread."""
        behind = self.topic.lag() if self.ready else {}
        return sum(at.records for at in behind.values()) if behind else None

    def step(self) -> int:
        """Apply available records, or wait POLL_S; return their number. Raises RecordsGoneError (step 5)."""
        records = self.topic.poll(_POLL_RECORDS, POLL_S)
        for record in records:
            self._take(record)
        if self.replica.needs_bootstrap:
            raise RecordsGoneError("deltas alone cannot bring the replica up to date")
        if self.replica.stale and self.clock.monotonic_s() >= self._repair_at_s:
            self._repair()
        if self.lag() == 0 and not self.replica.stale and self._all_are_current():
            self.current_s = self.clock.monotonic_s()
        return len(records)

    def _all_are_current(self) -> bool:
        """Whether every shard answered when it was last asked, and none is older than the rows in memory."""
        if self.clock.monotonic_s() >= self._ask_at_s:
            try:
                self._shards_are_current = all([self._is_current(shard) for shard in self.shards])
                self._older_since_s = None if self._shards_are_current else self._older_since_s
            except RoostreamError as error:
                log.debug("a shard does not answer: %s", error)
                self._shards_are_current = False
            wait_s = ASK_EVERY_S if self._shards_are_current else ASK_AGAIN_S
            self._ask_at_s = self.clock.monotonic_s() + wait_s
        return self._shards_are_current

    def _is_current(self, shard: Transport) -> bool:
        """Ask a shard whether its incarnation is at least that of the rows in memory. An older one has not
        been restored yet. Or the checkpoint store was replaced: then the shard's deltas have smaller versions
        than the rows in memory, and are ignored. Raises RoostreamError: the shard does not answer."""
        header, _ = shard.call("owners", {}, timeout_s=_ASK_TIMEOUT_S)
        incarnation, known = int(header["incarnation"]), self.replica.incarnation
        if incarnation >= known:
            return True
        now_s = self.clock.monotonic_s()
        self._older_since_s = now_s if self._older_since_s is None else self._older_since_s
        if now_s - self._older_since_s > _MAX_OLDER_S and incarnation != self._warned_of:
            self._warned_of = incarnation
            log.warning(
                "a shard is in incarnation %d, but rows of incarnation %d are in memory, which are not known "
                "to be current: the shard waits to be restored (`roostream status` tells for what), or the "
                "checkpoint store was replaced; in that case restart serving",
                incarnation,
                known,
            )
        return False

    def _repair(self) -> None:
        """Step 4, at most once in REPAIR_EVERY_S."""
        self._repair_at_s, missed = self.clock.monotonic_s() + REPAIR_EVERY_S, len(self.replica.stale)
        try:
            self.replica.repair(self.shards)
            self.num_repaired += missed
            log.warning(
                "%d stale buckets were read from their shards again, because records were missed", missed
            )
        except _RETRIED as error:
            log.warning(
                "%d buckets are stale because records were missed, and their shards cannot be read: %s",
                missed,
                error,
            )

    def _follow(self, stop: threading.Event) -> None:
        try:
            while not stop.is_set():
                self.step()
        except UnavailableError as error:  # step 5; RecordsGoneError is one
            log.warning("reading all rows from the shards again: %s", error)

    def _take(self, record: Record) -> None:
        try:
            kind, message = wire.decode(record.value)
            if kind not in (wire.ROW_DELTA, wire.BARRIER):
                raise WireError("unknown_type", f"expected a row delta or a barrier, got type {kind}")
            applied = self.replica.apply(message)
        except RoostreamError as error:
            self.num_refused += 1
            text = "rows record at %d/%d refused: %s"
            self._log_rate_limit.warning(
                log, type(error).__name__, text, record.partition, record.offset, error
            )
            self.replica.mark_stale(int.from_bytes(record.key or b"\xff" * 8, "little"))
            return
        self.num_applied += applied
        if applied and kind == wire.ROW_DELTA:
            self._observe(message)

    def _observe(self, delta: Any) -> None:
        """Freshness in ms, now that the delta is servable."""
        now_ms = self.clock.now_ms()
        for stage, since_ms in (
            ("trained_to_servable", delta.oldest_trained_ms),
            ("engagement_to_servable", delta.oldest_engagement_ms),
        ):
            if since_ms > 0:
                self.observe(stage, float(max(now_ms - since_ms, 0)))
