"""Fakes of what serving depends on: Kafka, Redis, the row replica and the topic of rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from roostream.errors import UnavailableError
from roostream.online.entity_fields import EntityFields
from roostream.runtime.kafka.consumer import MemoryConsumer, RecordsGoneError
from roostream.runtime.kafka.topics import ROWS, Partition, Progress
from roostream.schema.schema import Schema
from roostream.wire.lookup import Lookup, StackLookup
from roostream.wire.records import Record
from serving.feature_log.format import LogRecord
from serving.feature_log.sender import DeliveryCallback, Outcome
from serving.online_features.hydration import Hydrated, HydrationRequest


class FakeSink:
    """A fake Kafka producer. `plan` returns the outcome of each record; None = there is no outcome yet."""

    def __init__(
        self, delivered: list[LogRecord], plan: Callable[[LogRecord], Outcome | None] = lambda _: "delivered"
    ) -> None:
        self.delivered, self.plan, self.closed = delivered, plan, False
        self.queue: list[tuple[LogRecord, DeliveryCallback]] = []

    def send(self, record: LogRecord, done: DeliveryCallback) -> None:
        self.queue.append((record, done))

    def poll(self, timeout_s: float) -> None:
        """Call back with the outcomes. Like a broker, refuse the whole batch if it has one refused record."""
        queue, self.queue = self.queue, []
        outcomes = [self.plan(record) for record, _ in queue]
        refused = "refused" in outcomes
        for (record, done), outcome in zip(queue, outcomes, strict=True):
            if outcome is None:
                self.queue.append((record, done))
            elif outcome == "delivered" and not refused:
                self.delivered.append(record)
                done("delivered", "")
            else:
                done("refused" if refused else outcome, "a fault of the test")

    def close(self) -> None:
        """Drop what has no outcome yet. Like Kafka's client, call back for it."""
        self.closed = True
        queue, self.queue = self.queue, []
        for _, done in queue:
            done("failed", "dropped")


class FakeHydrator:
    """Returns the same online features for every user and item. With `unavailable`, it fails as Redis
    does."""

    def __init__(
        self, ro: Mapping[str, object] | None = None, nro: Mapping[str, float] | None = None
    ) -> None:
        self.ro, self.nro, self.unavailable, self.num_reads = dict(ro or {}), dict(nro or {}), False, 0

    def read(
        self, user_id: int, item_ids: np.ndarray, time_ms: int, fields: EntityFields
    ) -> tuple[dict[str, object], dict[str, np.ndarray]]:
        self.num_reads += 1
        if self.unavailable:
            raise UnavailableError("Redis is away")
        return dict(self.ro), {
            name: np.full(len(item_ids), value, np.float32) for name, value in self.nro.items()
        }

    def read_all(self, requests: Sequence[HydrationRequest]) -> list[Hydrated]:
        """Read the features of several requests, counted as one read."""
        num_reads, out = self.num_reads + 1, list[Hydrated]()
        for user_id, item_ids, time_ms, fields in requests:
            try:
                out.append(self.read(user_id, np.asarray(item_ids), time_ms, fields))
            except UnavailableError as error:
                out.append(error)
        self.num_reads = num_reads
        return out


class FakeRows:
    """A fake row replica. Its rows are a pseudo-random function of table, id and `salt`."""

    def __init__(self, schema: Schema) -> None:
        self.schema, self.salt = schema, 0

    def gather(self, lookup: Lookup) -> dict[str, np.ndarray]:
        return {stack: self._rows(stack, entry) for stack, entry in lookup.stacks.items()}

    def _rows(self, stack: str, entry: StackLookup) -> np.ndarray:
        dim = self.schema.stacks[stack][0].dim
        keys_UD = (
            entry.id_U[:, None] * 31
            + entry.table_U[:, None].astype(np.int64) * 7
            + np.arange(dim) * 13
            + self.salt
        )
        return (np.sin(keys_UD.astype(np.float64) % 1000) * 0.5).astype(np.float32)


class FakeRowTopic(MemoryConsumer):
    """The `rows` topic in memory. The next `outages` calls of `end_offsets` fail, and the next `losses` polls
    find that the records at their offset were deleted.
    """

    PARTITION = (ROWS, 0)

    def __init__(self) -> None:
        super().__init__([self.PARTITION], skip_lost_records=False)
        self.outages = self.losses = 0
        self.on_poll: Callable[[], object] = lambda: None
        self.on_outage: Callable[[], object] = lambda: None

    def add(self, value: bytes, bucket: int | None = None) -> None:
        key = None if bucket is None else bucket.to_bytes(8, "little")
        self.append([Record(*self.PARTITION, super().end_offsets()[self.PARTITION], 0, key, value)])

    def end_offsets(self) -> Progress:
        if self.outages:
            self.outages -= 1
            self.on_outage()
            raise UnavailableError("Kafka is away")
        return super().end_offsets()

    def poll(self, max_records: int, timeout_s: float, partition: Partition | None = None) -> list[Record]:
        self.on_poll()
        if self.losses:
            self.losses -= 1
            raise RecordsGoneError("the place is gone")
        return super().poll(max_records, timeout_s, partition)
