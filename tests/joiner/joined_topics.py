"""Support for tests of a whole joiner: write events to Kafka and read its output topics."""

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
"""The generator's join settings in the form of a configuration file."""

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
    """All records that are in a topic now."""
    from confluent_kafka import OFFSET_BEGINNING, KafkaError, TopicPartition

    client = clients.consumer(Broker(bootstrap), "test", enable_partition_eof=True)
    name, partitions = name_of(prefix, topic), range(partitions_of(topic, num_partitions))
    client.assign([TopicPartition(name, p, OFFSET_BEGINNING) for p in partitions])
    messages: list[Any] = []
    ended: set[int] = set()
    while len(ended) < len(
        partitions
    ):  # in a topic with transactions, offsets don't tell the number of records
        for m in client.consume(500, 1.0):
            if m.error() is None:
                messages.append(m)
            elif m.error().code() == KafkaError._PARTITION_EOF:  # noqa: SLF001 (its only name)
                ended.add(m.partition())
    client.close()
    return messages


def distinct(bootstrap: str, prefix: str, topic: str) -> dict[object, tuple[object, ...]]:
    """Id → (partition, key, timestamp, value). Copies of an id must be equal. A dead letter's id is the bytes
    of its event and its reason; its offset is not compared, because it differs from run to run which copy of
    an event comes first."""
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


def wait(event: str, condition: Callable[[], Any], timeout_s: float = _WAIT_S) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"{event} did not happen within {timeout_s} s"
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
