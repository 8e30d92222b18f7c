"""Sends records of the feature log to Kafka."""

from __future__ import annotations

from typing import Any

from confluent_kafka import KafkaError, Producer

from roostream.runtime.kafka import clients
from roostream.runtime.kafka.broker import Broker
from roostream.runtime.kafka.topics import name_of
from serving.feature_log.format import LogRecord
from serving.feature_log.sender import DeliveryCallback

# errors of the record itself: a retry would fail as well
_REFUSED = frozenset(
    (
        KafkaError.MSG_SIZE_TOO_LARGE,
        KafkaError.INVALID_TIMESTAMP,
        KafkaError.INVALID_RECORD,
        KafkaError.INVALID_MSG,
        KafkaError.RECORD_LIST_TOO_LARGE,
    )
)


class KafkaSink:
    """A `serving.feature_log.sender.LogSink` with one idempotent producer."""

    def __init__(self, producer: Producer, prefix: str) -> None:
        self.producer, self.prefix = producer, prefix

    @classmethod
    def open(cls, broker: Broker, prefix: str) -> KafkaSink:
        """Connect in the background; the producer waits for an unavailable broker."""
        return cls(clients.producer(broker), prefix)

    def send(self, record: LogRecord, done: DeliveryCallback) -> None:
        def on_delivery(error: KafkaError | None, _: Any) -> None:
            if error is None:
                done("delivered", "")
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
        self.producer.poll(timeout_s)

    def close(self) -> None:
        """Close and purge records in flight: a late delivery would come after the first records of the next
        sink."""
        self.producer.purge(in_queue=True, in_flight=True)
        self.producer.poll(0)
