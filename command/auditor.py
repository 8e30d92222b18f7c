"""The auditor: reads the topics from their start and keeps the sums of `command.accounts` current."""

from __future__ import annotations

import uuid
from collections.abc import Callable

from command.accounts import Accounts
from command.sums import Sums
from roo.errors import UnavailableError
from roo.schema import Schema
from roo.wire import Record
from runtime.clock import Clock, SystemClock
from runtime.kafka.broker import Broker
from runtime.kafka.reader import KafkaReader
from runtime.kafka.reading import Reading
from runtime.kafka.record_reader import RecordReader
from runtime.kafka.topics import (
    CORRECTIONS,
    DEAD_LETTERS,
    DEFAULT_PARTITIONS,
    ENGAGEMENTS,
    IMPRESSIONS,
    PREDICTIONS,
    SAMPLES,
    all_partitions,
)

AUDITED = (IMPRESSIONS, ENGAGEMENTS, SAMPLES, CORRECTIONS, DEAD_LETTERS, PREDICTIONS)
_AT_ONCE = 2000


class Auditor:
    """Opens a reader of its own at the first `poll`. Not thread-safe."""

    def __init__(
        self,
        broker: Broker,
        prefix: str,
        schema: Schema,
        *,
        num_partitions: int = DEFAULT_PARTITIONS,
        settle_ms: int = 600_000,
        horizon_ms: int = 0,
        on_record: Callable[[Record], None] | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`settle_ms`, `horizon_ms`: see Accounts; `on_record` sees every record too, after the accounts."""
        self.broker, self.prefix, self.schema = broker, prefix, schema
        self.num_partitions = num_partitions
        self.accounts = Accounts(settle_ms=settle_ms, horizon_ms=horizon_ms)
        self._on_record = on_record
        self._clock = clock or SystemClock()
        self._reader: RecordReader | None = None

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
            records = reader.poll(_AT_ONCE, 0.1)
            for record in records:
                self._add(record)
            count += len(records)
            if (not records and reader.at_end()) or self._clock.monotonic_s() >= until_s:
                return count

    def open_with(self, reader: RecordReader) -> RecordReader:
        """Use this reader, from its beginning; `poll` opens one otherwise. UnavailableError as `poll`."""
        reader.seek({})
        self._reader = reader
        return reader

    def sums(self, *, ended: bool = False) -> Sums:
        """As of the last `poll`; see Accounts.sums."""
        return self.accounts.sums(ended=ended)

    def close(self) -> None:
        """Idempotent; the sums stay."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _open(self) -> RecordReader:
        partitions = all_partitions(AUDITED, self.num_partitions)
        group = f"{self.prefix}auditor-{uuid.uuid4().hex[:12]}"
        reader = KafkaReader.open(self.broker, group, Reading(partitions=partitions, prefix=self.prefix))
        try:
            return self.open_with(reader)
        except UnavailableError:
            reader.close()
            raise

    def _add(self, record: Record) -> None:
        self.accounts.add(record)
        if self._on_record is not None:
            self._on_record(record)
