"""What tests of a whole joiner share: events into Kafka, and what comes out of its topics."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from roostream.runtime.kafka import clients
from roostream.runtime.kafka.broker import Broker
from roostream.runtime.kafka.topics import DEFAULT_PARTITIONS, name_of, partitions_of
from roostream.wire import records as wire
from roostream.wire.records import Record
from tests.joiner import generated

SETTINGS = {k: list(v) if isinstance(v, tuple) else v for k, v in generated.SETTINGS.items()}
"""For a configuration file."""

_WAIT_S = 90


def produce(bootstrap: str, prefix: str, records: list[Record]) -> None:
    client = clients.producer(Broker(bootstrap))
    for r in records:
        topic = name_of(prefix, r.topic)
        clients.send(
            client, topic, key=r.key, value=r.value, timestamp_ms=r.timestamp_ms, partition=r.partition
        )
    assert client.flush(30) == 0


def consume(bootstrap: str, prefix: str, topic: str, num_partitions: int = DEFAULT_PARTITIONS) -> list[Any]:
    """All that is in a topic now."""
    from confluent_kafka import OFFSET_BEGINNING, KafkaError, TopicPartition

    client = clients.consumer(Broker(bootstrap), "test", enable_partition_eof=True)
    name, partitions = name_of(prefix, topic), range(partitions_of(topic, num_partitions))
    client.assign([TopicPartition(name, p, OFFSET_BEGINNING) for p in partitions])
    messages: list[Any] = []
    ended: set[int] = set()
    while len(ended) < len(
        partitions
    ):  # of a topic with transactions, offsets don't tell how many records there are
        for m in client.consume(500, 1.0):
            if m.error() is None:
                messages.append(m)
            elif m.error().code() == KafkaError._PARTITION_EOF:  # noqa: SLF001 (its only name)
                ended.add(m.partition())
    client.close()
    return messages


def distinct(bootstrap: str, prefix: str, topic: str) -> dict[object, tuple[object, ...]]:
    """Id → (partition, key, timestamp, value); copies of an id have to be equal. A dead letter's id is the
    event's own bytes, and what is compared its reason and event: which of an event's copies came first
    differs from run to run."""
    found: dict[object, tuple[object, ...]] = {}
    for m in consume(bootstrap, prefix, topic):
        message = wire.decode(m.value())[1]
        if topic == "dead_letters":
            identity = (message.raw, message.reason)
            row = (message.topic, message.partition, message.event_id, message.request_id)
        else:
            stamp = m.timestamp()[1] if topic == "samples" else None
            identity, row = message.sample_id, (m.partition(), m.key(), stamp, m.value())
        assert found.setdefault(identity, row) == row, f"copies of {identity!r} in {topic} differ"
    return found


def wait(what: str, reached: Callable[[], Any], timeout_s: float = _WAIT_S) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not reached():
        assert time.monotonic() < deadline_s, f"{what} did not happen within {timeout_s} s"
        time.sleep(0.3)


def count(bootstrap: str, prefix: str, topic: str, num_partitions: int = DEFAULT_PARTITIONS) -> int:
    client = clients.consumer(Broker(bootstrap), "count")
    try:
        return sum(
            clients.end_offsets(
                client, name_of(prefix, topic), range(partitions_of(topic, num_partitions))
            ).values()
        )
    finally:
        client.close()
