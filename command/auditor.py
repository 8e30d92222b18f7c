"""The auditor: reads the topics from their start and keeps the sums of `command.accounts` current."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable

from confluent_kafka import Consumer, KafkaError, TopicPartition

from command.accounts import Accounts, Sums
from roo.errors import UnavailableError
from roo.schema import Schema
from roo.wire import Record
from runtime import kafka
from runtime.broker import Broker
from runtime.clock import Clock, SystemClock
from runtime.topics import CORRECTIONS, DEAD_LETTERS, ENGAGEMENTS, IMPRESSIONS, PARTITIONS, PREDICTIONS, SAMPLES, name_of

AUDITED = (IMPRESSIONS, ENGAGEMENTS, SAMPLES, CORRECTIONS, DEAD_LETTERS, PREDICTIONS)
_AT_ONCE = 2000


class Auditor:
    """Opens a consumer of its own at the first `poll`. Not thread-safe."""

    def __init__(
        self,
        broker: Broker,
        prefix: str,
        schema: Schema,
        *,
        settle_ms: int = 600_000,
        horizon_ms: int = 0,
        on_record: Callable[[Record], None] | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`settle_ms`, `horizon_ms`: see Accounts; `on_record` sees every record too, after the accounts."""
        self.broker, self.prefix, self.schema = broker, prefix, schema
        self.accounts = Accounts(prefix=prefix, settle_ms=settle_ms, horizon_ms=horizon_ms)
        self._on_record = on_record
        self._clock = clock or SystemClock()
        self._consumer: Consumer | None = None
        self._unread: set[tuple[str, int]] = set()  # partitions whose end hasn't been seen yet

    def poll(self, budget_s: float = 1.0) -> int:
        """Read what is there, for at most about `budget_s`; the number of records. 0 = up to date, or Kafka is away: a first
        call doesn't return before every partition's end has been seen, or the budget is over.

        Raises:
            UnavailableError: the topics can't be read at all (they don't exist, access is refused).
        """
        consumer = self._consumer or self._open()
        until_s, count = self._clock.monotonic_s() + budget_s, 0
        while True:
            messages = consumer.consume(_AT_ONCE, timeout=0.1)
            for message in messages:
                if message.error() is None:
                    self._add(message)
                    count += 1
                elif message.error().code() == KafkaError._PARTITION_EOF:
                    self._unread.discard((message.topic(), message.partition()))
                elif message.error().code() in (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError.TOPIC_AUTHORIZATION_FAILED):
                    raise UnavailableError(f"{message.topic()} can't be read: {message.error().str()}; is the prefix right?")
            if (not messages and not self._unread) or self._clock.monotonic_s() >= until_s:
                return count

    def open_with(self, consumer: Consumer, unread: Iterable[tuple[str, int]] = ()) -> Consumer:
        """Use this client, which has its partitions assigned and tells the end of the `unread` ones; `poll` opens one
        otherwise."""
        self._consumer, self._unread = consumer, set(unread)
        return consumer

    def sums(self, *, ended: bool = False) -> Sums:
        """As of the last `poll`; see Accounts.sums."""
        return self.accounts.sums(ended=ended)

    def close(self) -> None:
        """Idempotent; the sums stay."""
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None

    def _open(self) -> Consumer:
        consumer = kafka.consumer(self.broker, f"{self.prefix}auditor-{uuid.uuid4().hex[:12]}", enable_partition_eof=True)
        start = 0  # offsets that retention has passed lead to the oldest one there is
        places = [(name_of(self.prefix, t), p) for t in AUDITED for p in range(PARTITIONS[t])]
        consumer.assign([TopicPartition(t, p, start) for t, p in places])
        return self.open_with(consumer, places)

    def _add(self, message: object) -> None:
        topic = message.topic().removeprefix(self.prefix)  # type: ignore[attr-defined]
        timestamp_ms = message.timestamp()[1]  # type: ignore[attr-defined]
        value = message.value() or b""  # type: ignore[attr-defined]
        record = Record(topic, message.partition(), message.offset(), timestamp_ms, message.key(), value)  # type: ignore[attr-defined]
        self.accounts.add(record)
        if self._on_record is not None:
            self._on_record(record)
