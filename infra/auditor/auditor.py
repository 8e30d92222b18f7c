"""The auditor: reads the topics, oldest record first, and updates the sums of `infra.auditor.accounts`.

1 continue from the saved state, or start at the oldest records
2 if retention has deleted records, do not audit events of that time: their counterparts may be missing
3 read; while too many inputs wait for the joiner, read only its outputs
4 results are partial until `is_current`: all end offsets of the start have been reached
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable

from infra.auditor.accounts import ALL, Accounts, Share
from infra.auditor.audit_file import Saved
from infra.auditor.sums import Sums
from roostream.errors import UnavailableError
from roostream.runtime.clock import Clock, SystemClock
from roostream.runtime.kafka.broker import Broker
from roostream.runtime.kafka.consumer import RecordConsumer
from roostream.runtime.kafka.kafka_consumer import ConsumerOptions, KafkaConsumer
from roostream.runtime.kafka.topics import (
    CORRECTIONS,
    DEAD_LETTERS,
    DEFAULT_PARTITIONS,
    ENGAGEMENTS,
    EVENTS,
    IMPRESSIONS,
    PREDICTIONS,
    SAMPLES,
    Partition,
    Progress,
    all_partitions,
)
from roostream.wire.records import Record

log = logging.getLogger("roostream.auditor")
AUDITED = (IMPRESSIONS, ENGAGEMENTS, SAMPLES, CORRECTIONS, DEAD_LETTERS, PREDICTIONS)
_POLL_RECORDS = 2000
_FIRST_RECORD_TIMEOUT_S = 5.0
_MAX_WAITING = 1_000_000


def partitions_of_share(share: Share, num_partitions: int) -> tuple[Partition, ...]:
    """What the auditor of a share reads of topics with `num_partitions` partitions."""
    audited = all_partitions(AUDITED, num_partitions)
    return tuple(p for p in audited if p[0] == DEAD_LETTERS or share.has(p[1]))


class Auditor:
    """Opens its own consumer at the first `poll`. Not thread-safe."""

    def __init__(
        self,
        broker: Broker,
        prefix: str,
        *,
        num_partitions: int = DEFAULT_PARTITIONS,
        settle_ms: int = 600_000,
        horizon_ms: int = 0,
        on_record: Callable[[Record], None] | None = None,
        clock: Clock | None = None,
        max_waiting: int = _MAX_WAITING,
        share: Share = ALL,
    ) -> None:
        """`settle_ms`, `horizon_ms`, `share`: see Accounts. `on_record` is called with every record after it
        was counted."""
        self.broker, self.prefix, self.num_partitions = broker, prefix, num_partitions
        self.max_waiting, self.share = max_waiting, share
        self.accounts = Accounts(settle_ms=settle_ms, horizon_ms=horizon_ms, share=share)
        self._horizon_ms = horizon_ms
        self._on_record = on_record
        self._clock = clock or SystemClock()
        self._consumer: RecordConsumer | None = None
        self._num_lost = self._lost_before = 0  # by this consumer; before it
        self.must_restart = False  # the counts are invalid; the next `poll` starts over
        self._goal: Progress = {}  # end offsets of the start, of partitions that have not reached them
        self._has_goal = False

    def poll(self, budget_s: float = 1.0) -> int:
        """Read for at most about `budget_s`. Returns the number of records; 0 = up to date, or Kafka is away.
        The first call returns once every partition's end was seen, or the budget is over.

        Raises:
            UnavailableError: the topics can't be read (missing, access denied), or Kafka is away at the first
            call; call again.
        """
        consumer = self._consumer or self._open()
        until_s, count = self._clock.monotonic_s() + budget_s, 0
        while True:
            if self.must_restart:
                self._begin(consumer)
            records = self._next(consumer)
            for record in records:
                self._add(record)
            count += len(records)
            self._check_progress(consumer)
            if (not records and consumer.at_end()) or self._clock.monotonic_s() >= until_s:
                return count

    def open_with(self, consumer: RecordConsumer, saved: Saved | None = None) -> RecordConsumer:
        """Use this consumer, from the `saved` state or the oldest records. Raises UnavailableError as
        `poll`."""
        if saved is not None:
            self.accounts.load(saved.numbers, saved.arrays)
        self._num_lost = consumer.num_lost
        self._lost_before = self.accounts.sums().lost_records - consumer.num_lost
        if saved is None:
            self._begin(consumer)
        else:
            consumer.seek(saved.progress, saved.leader_epochs)
        self._consumer = consumer
        self._check_progress(consumer)
        return consumer

    def is_current(self) -> bool:
        """Whether all end offsets of the start were reached; before, the sums are partial. False while the
        counts are invalid."""
        return self._has_goal and not self._goal and not self.must_restart

    def behind(self) -> int | None:
        """Number of unread records a moment ago; None = unknown."""
        lags = self._consumer.lag() if self._consumer is not None else {}
        return sum(lag.records for lag in lags.values()) if lags else None

    def sums(self, *, ended: bool = False) -> Sums:
        """As of the last `poll`, see Accounts.sums."""
        return self.accounts.sums(ended=ended)

    def saved(self, topics: dict[str, str]) -> Saved:
        """The state for `open_with`; `topics` as in `Saved`. Not while `must_restart`."""
        assert self._consumer is not None and not self.must_restart, "nothing was read yet"
        numbers, arrays = self.accounts.dump()
        progress = self._consumer.positions()
        return Saved(
            numbers=numbers,
            arrays=arrays,
            progress=progress,
            topics=topics,
            leader_epochs=self._consumer.leader_epochs(progress),
            share=self.share,
        )

    def close(self) -> None:
        """Idempotent; the sums stay."""
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None

    def open_consumer(self) -> RecordConsumer:
        """A consumer of the share's partitions and of the dead letters; `open_with` must follow."""
        options = ConsumerOptions(
            partitions=partitions_of_share(self.share, self.num_partitions),
            prefix=self.prefix,
            merge_by_time=True,
            track_end_offsets=True,
        )
        return KafkaConsumer.open(self.broker, f"{self.prefix}auditor-{uuid.uuid4().hex[:12]}", options)

    def _open(self) -> RecordConsumer:
        consumer = self.open_consumer()
        try:
            return self.open_with(consumer)
        except UnavailableError:
            consumer.close()
            raise

    def _begin(self, consumer: RecordConsumer) -> None:
        """Start over at the oldest records (2). **If it fails** (UnavailableError), the next `poll` tries
        again."""
        self.must_restart = True
        consumer.seek({})
        starts, ends, since_ms = consumer.positions(), consumer.end_offsets(), 0
        for p, at in starts.items():
            if at > 0:
                first = consumer.poll(2, _FIRST_RECORD_TIMEOUT_S, p) if at < ends[p] else []
                # The smaller of two times: a single time in the future must not leave all events out.
                oldest_ms = min((r.timestamp_ms for r in first), default=self._clock.now_ms())
                since_ms = max(since_ms, oldest_ms + self.accounts.settle_ms)
        if since_ms:
            consumer.seek(starts)
        self.accounts = Accounts(
            settle_ms=self.accounts.settle_ms,
            horizon_ms=self._horizon_ms,
            since_ms=since_ms,
            share=self.share,
        )
        self.accounts.lose(self._lost_before + consumer.num_lost)
        self._goal, self._has_goal, self.must_restart = {}, False, False

    def _next(self, consumer: RecordConsumer) -> list[Record]:
        if self.accounts.num_waiting < self.max_waiting:
            return consumer.poll(_POLL_RECORDS, 0.1)
        outputs = [p for p in consumer.partitions if p[0] not in EVENTS]
        return [record for p in outputs for record in consumer.poll(_POLL_RECORDS, 0.1 / len(outputs), p)]

    def _check_progress(self, consumer: RecordConsumer) -> None:
        """Start over after losses by retention, and update which end offsets of the start were reached
        (4)."""
        if lost := consumer.num_lost - self._num_lost:
            self._num_lost = consumer.num_lost
            log.error(
                "%d records were deleted before the auditor read them; starting over with the remaining ones",
                lost,
            )
            self._begin(consumer)
            return
        lags = consumer.lag() if not self.is_current() else {}
        if lags and not self._has_goal:
            self._goal, self._has_goal = {p: lag.stable_end for p, lag in lags.items()}, True
        self._goal = {p: end for p, end in self._goal.items() if p not in lags or lags[p].position < end}

    def _add(self, record: Record) -> None:
        self.accounts.add(record)
        if self._on_record is not None:
            self._on_record(record)
