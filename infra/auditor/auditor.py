"""The auditor: reads the topics, oldest record first, and keeps the sums of `infra.auditor.accounts` current.

1 go on from what was saved, or from the oldest records
2 where retention has deleted records, leave out all events of before them: their counterparts may be gone
3 read; while too many inputs wait for the joiner, read its outputs only
4 nothing is told of a part: `is_current` once every end that was there at the start has been passed
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable

from infra.auditor.accounts import Accounts
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
    Progress,
    all_partitions,
)
from roostream.wire.records import Record

log = logging.getLogger("roostream.auditor")
AUDITED = (IMPRESSIONS, ENGAGEMENTS, SAMPLES, CORRECTIONS, DEAD_LETTERS, PREDICTIONS)
_AT_ONCE = 2000
_FIRST_S = 5.0
_MAX_WAITING = 1_000_000


class Auditor:
    """Opens a reader of its own at the first `poll`. Not thread-safe."""

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
    ) -> None:
        """`settle_ms`, `horizon_ms`: see Accounts; `on_record` sees every record too, after the accounts."""
        self.broker, self.prefix, self.num_partitions, self.max_waiting = (
            broker,
            prefix,
            num_partitions,
            max_waiting,
        )
        self.accounts = Accounts(settle_ms=settle_ms, horizon_ms=horizon_ms)
        self._horizon_ms = horizon_ms
        self._on_record = on_record
        self._clock = clock or SystemClock()
        self._reader: RecordConsumer | None = None
        self._num_lost = self._lost_before = 0  # by this reader; before it
        self.begins_anew = False  # what was counted is of no use: the next `poll` reads everything
        self._goal: Progress = {}  # the ends that were there at the start, of partitions that have not passed them
        self._has_goal = False

    def poll(self, budget_s: float = 1.0) -> int:
        """Read what is there, for at most about `budget_s`; the number of records. 0 = up to date, or Kafka is away: a first
        call doesn't return before every partition's end has been seen, or the budget is over.

        Raises:
            UnavailableError: the topics can't be read at all (they don't exist, access is refused), or Kafka is away at the first
                call; call again.
        """
        reader = self._reader or self._open()
        until_s, count = self._clock.monotonic_s() + budget_s, 0
        while True:
            if self.begins_anew:
                self._begin(reader)
            records = self._next(reader)
            for record in records:
                self._add(record)
            count += len(records)
            self._look(reader)
            if (not records and reader.at_end()) or self._clock.monotonic_s() >= until_s:
                return count

    def open_with(self, reader: RecordConsumer, saved: Saved | None = None) -> RecordConsumer:
        """Use this reader, from what was `saved` or its beginning; `poll` opens one otherwise. UnavailableError as `poll`."""
        if saved is not None:
            self.accounts.load(saved.numbers, saved.arrays)
        self._num_lost = reader.num_lost
        self._lost_before = self.accounts.sums().lost_records - reader.num_lost
        if saved is None:
            self._begin(reader)
        else:
            reader.seek(saved.progress)
        self._reader = reader
        self._look(reader)
        return reader

    def is_current(self) -> bool:
        """Whether every end that was there at the start has been passed: until then the sums are those of a part."""
        return self._has_goal and not self._goal

    def behind(self) -> int | None:
        """Records that are there and were not read a moment ago; None = Kafka does not tell."""
        lags = self._reader.lag() if self._reader is not None else {}
        return sum(lag.records for lag in lags.values()) if lags else None

    def sums(self, *, ended: bool = False) -> Sums:
        """As of the last `poll`; see Accounts.sums."""
        return self.accounts.sums(ended=ended)

    def saved(self, topics: dict[str, str]) -> Saved:
        """What `open_with` goes on from; `topics` as `Saved` has them. Not while it `begins_anew`."""
        assert self._reader is not None and not self.begins_anew, "nothing was read yet"
        numbers, arrays = self.accounts.dump()
        return Saved(numbers=numbers, arrays=arrays, progress=self._reader.positions(), topics=topics)

    def close(self) -> None:
        """Idempotent; the sums stay."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def open_reader(self) -> RecordConsumer:
        """One of all audited topics; `open_with` must follow."""
        reading = ConsumerOptions(
            partitions=all_partitions(AUDITED, self.num_partitions),
            prefix=self.prefix,
            merge_by_time=True,
            track_end_offsets=True,
        )
        return KafkaConsumer.open(self.broker, f"{self.prefix}auditor-{uuid.uuid4().hex[:12]}", reading)

    def _open(self) -> RecordConsumer:
        reader = self.open_reader()
        try:
            return self.open_with(reader)
        except UnavailableError:
            reader.close()
            raise

    def _begin(self, reader: RecordConsumer) -> None:
        """New accounts, from the oldest records (2). **If it fails** (UnavailableError), the next `poll` tries again first."""
        self.begins_anew = True
        reader.seek({})
        starts, ends, since_ms = reader.positions(), reader.end_offsets(), 0
        for p, at in starts.items():
            if at > 0:
                first = reader.poll(1, _FIRST_S, p) if at < ends[p] else []
                oldest_ms = first[0].timestamp_ms if first else self._clock.now_ms()
                since_ms = max(since_ms, oldest_ms + self.accounts.settle_ms)
        if since_ms:
            reader.seek(starts)
        self.accounts = Accounts(
            settle_ms=self.accounts.settle_ms, horizon_ms=self._horizon_ms, since_ms=since_ms
        )
        self.accounts.lose(self._lost_before + reader.num_lost)
        self._goal, self._has_goal, self.begins_anew = {}, False, False

    def _next(self, reader: RecordConsumer) -> list[Record]:
        if self.accounts.num_waiting < self.max_waiting:
            return reader.poll(_AT_ONCE, 0.1)
        outputs = [p for p in reader.partitions if p[0] not in EVENTS]
        return [record for p in outputs for record in reader.poll(_AT_ONCE, 0.1 / len(outputs), p)]

    def _look(self, reader: RecordConsumer) -> None:
        """Note what retention has taken, and how far the ends of the start are (4)."""
        if lost := reader.num_lost - self._num_lost:
            self._num_lost = reader.num_lost
            log.error(
                "%d records were deleted before the auditor read them: it begins anew with what is left", lost
            )
            self._begin(reader)
            return
        lags = reader.lag() if not self.is_current() else {}
        if lags and not self._has_goal:
            self._goal, self._has_goal = {p: lag.stable_end for p, lag in lags.items()}, True
        self._goal = {p: end for p, end in self._goal.items() if p not in lags or lags[p].position < end}

    def _add(self, record: Record) -> None:
        self.accounts.add(record)
        if self._on_record is not None:
            self._on_record(record)
