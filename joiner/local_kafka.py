"""The local engine's Kafka side."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, KafkaError, TopicPartition

from joiner.build import Output
from joiner.local_watermark import Split
from roo.errors import UnavailableError
from roo.wire import Record
from runtime import kafka
from runtime.broker import Broker
from runtime.topics import EVENTS, PARTITIONS, name_of

_POLL = 512


class KafkaSource:
    """Reads all partitions with manual assignment; offsets are the snapshot's, never the group's."""

    def __init__(self, broker: Broker, prefix: str) -> None:
        self.prefix = prefix
        self._topic_of = {name_of(prefix, topic): topic for topic in EVENTS}
        # A position before the oldest record (retention was shorter than the outage) starts at the oldest.
        self._consumer = kafka.consumer(broker, f"{prefix}roostream-joiner")
        self._held: set[Split] = set()

    def start(self, offsets: Mapping[Split, int]) -> None:
        splits = [(topic, partition) for topic in EVENTS for partition in range(PARTITIONS[topic])]
        self._consumer.assign([self._place(s, offsets.get(s, 0) or OFFSET_BEGINNING) for s in splits])

    def poll(self, timeout_s: float) -> Sequence[Record]:
        return [r for m in self._consumer.consume(_POLL, timeout_s) if (r := self._record(m)) is not None]

    def hold(self, splits: set[Split]) -> None:
        if release := self._held - splits:
            self._consumer.resume([self._place(s) for s in release])
        if more := splits - self._held:
            self._consumer.pause([self._place(s) for s in more])
        self._held = set(splits)

    def close(self) -> None:
        self._consumer.close()

    def _place(self, split: Split, *offset: int) -> TopicPartition:
        return TopicPartition(name_of(self.prefix, split[0]), split[1], *offset)

    def _record(self, message: Any) -> Record | None:
        if error := message.error():
            if error.code() in (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError.TOPIC_AUTHORIZATION_FAILED):
                raise UnavailableError(f"topic {message.topic()} can't be read ({error.str()}); create the topics first")
            return None  # a state (end of partition, broker away): librdkafka goes on by itself
        return Record(
            self._topic_of[message.topic()],
            message.partition(),
            message.offset(),
            message.timestamp()[1],
            message.key(),
            message.value(),
        )


class KafkaSink:
    """Queues outputs in an idempotent producer."""

    def __init__(self, broker: Broker, prefix: str) -> None:
        self.prefix = prefix
        self._producer = kafka.producer(broker)
        self._failed = ""

    def write(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            kafka.send(
                self._producer,
                name_of(self.prefix, output.topic),
                key=output.key,
                value=output.value,
                timestamp_ms=output.timestamp_ms or 0,  # librdkafka: 0 = now
                on_delivery=self._delivered,
            )

    def flush(self, stop: threading.Event) -> bool:
        while self._producer.flush(0.2):
            if stop.is_set():
                return False
        if self._failed:
            raise UnavailableError(f"Kafka refused a record of the joiner: {self._failed}; fix it and start again")
        return True

    def _delivered(self, error: KafkaError | None, message: Any) -> None:
        if error is not None:
            self._failed = f"{message.topic()}: {error.str()}"
