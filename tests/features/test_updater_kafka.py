"""The Kafka side of the updater, over a consumer in memory."""

from __future__ import annotations

from typing import Any

from confluent_kafka import OFFSET_BEGINNING, KafkaError, TopicPartition

from features import event_source
from features.event_source import KafkaEvents
from features.store import PLACES
from runtime.broker import Broker
from runtime.topics import ENGAGEMENTS, IMPRESSIONS


class Message:
    def __init__(self, topic: str, partition: int, offset: int, time_ms: int = 0, error: int | None = None) -> None:
        self._place, self._offset, self._time_ms = (topic, partition), offset, time_ms
        self._error = None if error is None else KafkaError(error)

    def topic(self) -> str:
        return self._place[0]

    def partition(self) -> int:
        return self._place[1]

    def offset(self) -> int:
        return self._offset

    def timestamp(self) -> tuple[int, int]:
        return 1, self._time_ms

    def key(self) -> bytes:
        return b"k"

    def value(self) -> bytes:
        return b"v"

    def error(self) -> KafkaError | None:
        return self._error


class FakeConsumer:
    def __init__(self) -> None:
        self.polls: list[list[Message]] = []
        self.assigned: dict[tuple[str, int], int] = {}
        self.paused: set[tuple[str, int]] = set()
        self.closed = False

    def assign(self, places: list[TopicPartition]) -> None:
        self.assigned = {(p.topic, p.partition): p.offset for p in places}

    def consume(self, count: int, timeout: float) -> list[Message]:
        return self.polls.pop(0) if self.polls else []

    def pause(self, places: list[TopicPartition]) -> None:
        self.paused |= {(p.topic, p.partition) for p in places}

    def resume(self, places: list[TopicPartition]) -> None:
        self.paused -= {(p.topic, p.partition) for p in places}

    def close(self) -> None:
        self.closed = True


def ends() -> list[Message]:
    return [Message(f"p.{topic}", p, 0, error=KafkaError._PARTITION_EOF) for topic, p in PLACES]


def opened() -> tuple[KafkaEvents, FakeConsumer]:
    consumer = FakeConsumer()
    options: dict[str, Any] = {}

    def open_consumer(broker: Broker, group: str, **given: Any) -> Any:
        options.update(given, group=group)
        return consumer

    source = KafkaEvents(Broker("b:1"), "p.", open_consumer=open_consumer)
    source.seek({(IMPRESSIONS, 2): 7})
    assert options == {"enable_partition_eof": True, "group": "p.features"}
    return source, consumer


def test_every_partition_of_both_topics_is_read_from_where_redis_says() -> None:
    _, consumer = opened()
    assert consumer.assigned == {
        (f"p.{topic}", p): 7 if (topic, p) == (IMPRESSIONS, 2) else OFFSET_BEGINNING for topic, p in PLACES
    }


def test_records_come_merged_once_every_partition_has_spoken() -> None:
    source, consumer = opened()
    consumer.polls = [[Message("p.impressions", 0, 5, 20), Message("p.engagements", 1, 6, 10)], ends()]
    assert source.poll(10, 0) == []
    records = source.poll(10, 0)
    assert [(r.topic, r.partition, r.offset, r.timestamp_ms) for r in records] == [
        (ENGAGEMENTS, 1, 6, 10),
        (IMPRESSIONS, 0, 5, 20),
    ]


def test_errors_of_the_client_are_waited_out() -> None:
    source, consumer = opened()
    consumer.polls = [[Message("p.impressions", 0, 5, error=KafkaError._TRANSPORT)]]
    assert source.poll(10, 0) == []


def test_a_full_partition_is_paused_until_there_is_room_again() -> None:
    source, consumer = opened()
    most = event_source._BUFFERED
    consumer.polls = [[Message("p.impressions", 0, n, n) for n in range(most)], ends()]
    source.poll(10, 0)
    assert consumer.paused == {("p.impressions", 0)}
    while len(source.poll(most // 4, 0)) == most // 4 and consumer.paused:
        pass
    assert consumer.paused == set()


def test_a_seek_forgets_what_was_fetched_and_close_is_idempotent() -> None:
    source, consumer = opened()
    consumer.polls = [[Message("p.impressions", 0, 5, 20)], ends()]
    source.poll(10, 0)
    source.seek({})
    assert source.poll(10, 0) == []
    source.close()
    source.close()
    assert consumer.closed
