"""The feature log's way to Kafka."""

from __future__ import annotations

from typing import Any

from confluent_kafka import KafkaError, Producer

from roostream.runtime.kafka import clients
from roostream.runtime.kafka.broker import Broker
from roostream.runtime.kafka.topics import name_of
from serving.feature_log.format import LogRecord
from serving.feature_log.sender import DeliveryCallback

# What Kafka will say again however often it is asked: the record itself is at fault.
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
    """One idempotent producer; `serving.feature_log.sender.LogSink`."""

    def __init__(self, producer: Producer, prefix: str) -> None:
        self.producer, self.prefix = producer, prefix

    @classmethod
    def open(cls, broker: Broker, prefix: str) -> KafkaSink:
        """Connects in the background: a broker that is away is waited for, by the producer."""
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
        """Also takes back what is on its way: a late delivery would come behind the next sink's first records."""
        self.producer.purge(in_queue=True, in_flight=True)
        self.producer.poll(0)
