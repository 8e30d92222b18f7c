"""The topic `rows` in Kafka, to which shards publish changed embedding rows: a `RowsTopic` (publish.py)."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Sequence

from confluent_kafka import KafkaError, Producer

from param_server.publish import Message
from roostream.errors import UnavailableError
from roostream.runtime.clock import Clock, SystemClock
from roostream.runtime.kafka import clients
from roostream.runtime.kafka.broker import Broker
from roostream.runtime.kafka.kafka_consumer import ConsumerOptions, KafkaConsumer
from roostream.runtime.kafka.topics import ROWS, name_of

log = logging.getLogger("roostream.publish")
_READ_RECORDS = 500
_WARN_AFTER_S = 5.0
_STOP_AFTER_S = 2.0  # after a stop, for messages in flight


class KafkaRows:
    """The topic in Kafka. Clients are created when needed, and again after an error that ends them."""

    def __init__(self, broker: Broker, prefix: str, clock: Clock | None = None) -> None:
        self.broker, self.prefix, self.clock = broker, prefix, clock or SystemClock()
        self.topic = name_of(prefix, ROWS)
        self._producer: Producer | None = None

    def deliver(self, messages: Sequence[Message], stop: threading.Event) -> list[int]:
        """Append messages to their partitions; return their offsets, in the order of `messages`. Logs a
        warning if Kafka takes more than 5 s.

        **If it fails** (UnavailableError): some messages may be there. The producer that lost a message is
        dropped, and the next call creates another.
        """
        if not messages:
            return []
        if self._producer is None:  # its truth value says whether events wait
            self._producer = clients.producer(self.broker)
        try:
            outcome = self._sent(self._producer, messages, stop)
        except clients.ProducerFailedError:
            self._producer = None
            raise
        offsets = [o for n in range(len(messages)) if isinstance(o := outcome[n], int)]
        if len(offsets) < len(messages):
            self._producer = None  # an idempotent producer cannot continue after a lost message
            error = next(o for o in outcome.values() if not isinstance(o, int))
            raise UnavailableError(f"topic {self.topic} at {self.broker} rejected rows: {error.str()}")
        return offsets

    def _sent(
        self, producer: Producer, messages: Sequence[Message], stop: threading.Event
    ) -> dict[int, int | KafkaError]:
        """Number of each message → its offset, or why it was refused."""
        outcome: dict[int, int | KafkaError] = {}
        for n, message in enumerate(messages):

            def delivered(error: KafkaError | None, record: object, n: int = n) -> None:
                outcome[n] = error or record.offset()  # type: ignore[attr-defined]

            clients.send(
                producer,
                self.topic,
                key=message.bucket.to_bytes(8, "little"),
                value=message.value,
                timestamp_ms=self.clock.now_ms(),
                partition=message.partition,
                on_delivery=delivered,
            )
        self._await(producer, outcome, len(messages), stop)
        return outcome

    def bounds(self, partition: int, stop: threading.Event) -> tuple[int, int]:
        """The first offset that is kept, and the end offset."""
        with contextlib.closing(self._consumer(partition)) as consumer:
            return consumer.bounds((ROWS, partition))[ROWS, partition]

    def read(self, partition: int, start: int, end: int, stop: threading.Event) -> Iterator[bytes]:
        """The values of the records `start` to `end` (exclusive). Records without a value are skipped. While
        the broker is away it waits.

        Raises:
            RecordsGoneError: retention has deleted records from `start` on.
            UnavailableError: `stop` was set.
        """
        rows_partition = (ROWS, partition)
        with contextlib.closing(self._consumer(partition)) as consumer:
            consumer.seek({rows_partition: start})
            while consumer.passed(rows_partition) < end:
                if stop.is_set():
                    raise UnavailableError("stopped while reading rows back")
                for record in consumer.poll(_READ_RECORDS, 0.2):
                    if record.value and record.offset < end:
                        yield record.value

    def close(self) -> None:
        self._producer = None

    def _consumer(self, partition: int) -> KafkaConsumer:
        options = ConsumerOptions(
            partitions=((ROWS, partition),), prefix=self.prefix, skip_lost_records=False
        )
        return KafkaConsumer.open(self.broker, f"{self.topic}-shard", options)

    def _await(
        self, producer: Producer, outcome: dict[int, int | KafkaError], wanted: int, stop: threading.Event
    ) -> None:
        """Wait until `outcome` has an entry for each of the `wanted` messages."""
        began_s, warned = self.clock.monotonic_s(), False
        while len(outcome) < wanted:
            clients.poll(producer, 0.1)
            if stop.is_set() and self.clock.monotonic_s() - began_s > _STOP_AFTER_S:
                raise UnavailableError("stopped while row deltas were in flight")
            if not warned and self.clock.monotonic_s() - began_s > _WARN_AFTER_S:
                warned = True
                log.warning(
                    "waiting for Kafka at %s to acknowledge %d row deltas", self.broker, wanted - len(outcome)
                )
        if warned:
            log.info(
                "Kafka at %s acknowledged the row deltas after %.1f s",
                self.broker,
                self.clock.monotonic_s() - began_s,
            )
