"""The `rows` topic as the row follower reads it."""

from __future__ import annotations

from typing import Protocol

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from roo.errors import UnavailableError
from roo.wire import Record
from runtime import kafka
from runtime.broker import Broker
from runtime.topics import PARTITIONS, ROWS, name_of


class RowsGoneError(UnavailableError):
    """The topic no longer has what comes next: the rows have to be read from the shards again."""


class RowTopic(Protocol):
    """Used by one thread, but for `lag`."""

    def end_offsets(self) -> dict[int, int]:
        """Partition → next offset. UnavailableError while Kafka or the topic is away."""

    def start(self, offsets: dict[int, int]) -> None:
        """The next `poll` begins there."""

    def poll(self, timeout_s: float) -> list[Record]:
        """Records in order of their partitions; empty after `timeout_s`. Raises RowsGoneError."""

    def lag(self) -> int:
        """Records that were there and not taken at the last `poll`; any thread, asks nobody."""

    def close(self) -> None:
        """Idempotent."""


class KafkaRowTopic:
    """Without a group: every serving process reads every partition, and commits nothing."""

    MAX_RECORDS = 500

    def __init__(self, consumer: Consumer, prefix: str) -> None:
        self.consumer, self.topic = consumer, name_of(prefix, ROWS)
        self._positions: dict[int, int] = {}
        self._lag = 0

    @classmethod
    def open(cls, broker: Broker, prefix: str) -> KafkaRowTopic:
        return cls(kafka.consumer(broker, f"{prefix}serving-rows", auto_offset_reset="error"), prefix)

    def end_offsets(self) -> dict[int, int]:
        try:
            return kafka.end_offsets(self.consumer, self.topic, range(PARTITIONS[ROWS]), timeout_s=5.0)
        except KafkaException as error:
            raise UnavailableError(f"topic {self.topic}: {error.args[0].str()}") from None

    def start(self, offsets: dict[int, int]) -> None:
        self._positions = dict(offsets)
        self.consumer.assign([TopicPartition(self.topic, p, o) for p, o in offsets.items()])

    def poll(self, timeout_s: float) -> list[Record]:
        records = []
        for message in self.consumer.consume(self.MAX_RECORDS, timeout_s):
            error = message.error()
            if error is not None:
                if error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):
                    raise RowsGoneError(f"{self.topic} no longer has the next rows: {error.str()}")
                continue  # a state of the connection: the client goes on by itself
            partition, offset = message.partition(), message.offset()
            self._positions[partition] = offset + 1
            records.append(Record(ROWS, partition, offset, message.timestamp()[1], message.key(), message.value()))
        self._lag = self._behind()
        return records

    def lag(self) -> int:
        return self._lag

    def _behind(self) -> int:
        """By the polling thread only: with another thread in `consume`, the client's cached offsets can block for good."""
        total = 0
        for partition, position in self._positions.items():
            _, high = self.consumer.get_watermark_offsets(TopicPartition(self.topic, partition), cached=True)
            total += max(high - position, 0)
        return total

    def close(self) -> None:
        self.consumer.close()
