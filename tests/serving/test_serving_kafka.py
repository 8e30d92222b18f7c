"""The two Kafka adapters over clients that answer as librdkafka does."""

from __future__ import annotations

from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from roo.errors import UnavailableError
from runtime.broker import Broker
from serving.feature_log.format import LogRecord
from serving.feature_log.topics import LogTopics
from serving.row_topic import KafkaRowTopic, RowsGoneError


class Producer:
    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.calls: list[str] = []

    def produce(self, topic: str, **arguments: Any) -> None:
        self.sent.append({"topic": topic, **arguments})

    def poll(self, timeout_s: float) -> None:
        self.calls.append("poll")

    def flush(self, timeout_s: float) -> None:
        self.calls.append("flush")

    def purge(self, **arguments: Any) -> None:
        self.calls.append("purge")


OUTCOMES = [
    (None, "delivered"),
    (KafkaError.MSG_SIZE_TOO_LARGE, "refused"),
    (KafkaError.INVALID_TIMESTAMP, "refused"),
    (KafkaError._MSG_TIMED_OUT, "failed"),
    (KafkaError._UNKNOWN_TOPIC, "failed"),
    (KafkaError._FATAL, "failed"),
    (KafkaError._PURGE_QUEUE, "failed"),
]


@pytest.mark.parametrize(("code", "outcome"), OUTCOMES)
def test_only_what_a_record_is_at_fault_for_is_refused(code: int | None, outcome: str) -> None:
    producer = Producer()
    sink = LogTopics(producer, "p-")
    seen: list[str] = []
    sink.send(LogRecord("impressions", -1, 5, b"userkey!", b"v"), lambda o, _: seen.append(o))
    (sent,) = producer.sent
    sent["on_delivery"](None if code is None else KafkaError(code), None)
    assert seen == [outcome]
    assert (sent["topic"], sent["key"], sent["value"], sent["timestamp"]) == ("p-impressions", b"userkey!", b"v", 5)
    assert "partition" not in sent, "the key decides"


def test_heartbeats_go_to_the_partition_that_they_name() -> None:
    producer = Producer()
    LogTopics(producer, "").send(LogRecord("engagements", 3, 5, b"", b"v"), lambda *_: None)
    assert producer.sent[0]["partition"] == 3 and producer.sent[0]["key"] is None


def test_a_closed_sink_takes_back_what_is_on_its_way() -> None:
    producer = Producer()
    sink = LogTopics(producer, "")
    sink.poll(0.1)
    sink.flush(1.0)
    sink.close()
    assert producer.calls == ["poll", "flush", "purge", "poll"]


class Message:
    def __init__(self, partition: int, offset: int, error: int | None = None) -> None:
        self._at, self._error = (partition, offset), error

    def error(self) -> KafkaError | None:
        return None if self._error is None else KafkaError(self._error)

    def partition(self) -> int:
        return self._at[0]

    def offset(self) -> int:
        return self._at[1]

    def timestamp(self) -> tuple[int, int]:
        return 1, 99

    def key(self) -> bytes:
        return b"k"

    def value(self) -> bytes:
        return b"v"


class Consumer:
    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.assigned: list[tuple[int, int]] = []
        self.away = self.closed = False

    def get_watermark_offsets(self, at: Any, **_: Any) -> tuple[int, int]:
        if self.away:
            raise KafkaException(KafkaError(KafkaError._TRANSPORT))
        return 0, 10 + at.partition

    def assign(self, places: list[Any]) -> None:
        self.assigned = [(p.partition, p.offset) for p in places]

    def consume(self, count: int, timeout_s: float) -> list[Message]:
        messages, self.messages = self.messages, []
        return messages

    def close(self) -> None:
        self.closed = True


def test_rows_are_read_from_where_the_topic_ended() -> None:
    consumer = Consumer()
    topic = KafkaRowTopic(consumer, "p-")
    topic.start(topic.end_offsets())
    assert topic.topic == "p-rows" and consumer.assigned == [(0, 10), (1, 11), (2, 12), (3, 13)]
    assert topic.lag() == 0
    consumer.messages = [Message(0, 10), Message(2, 12, KafkaError._PARTITION_EOF), Message(2, 12)]
    records = topic.poll(0.1)
    assert [(r.partition, r.offset, r.timestamp_ms, r.value) for r in records] == [(0, 10, 99, b"v"), (2, 12, 99, b"v")]
    topic.start(dict.fromkeys(range(4), 8))
    assert topic.poll(0.1) == []
    assert topic.lag() == 2 + 3 + 4 + 5
    topic.close()
    assert consumer.closed


@pytest.mark.parametrize("code", [KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE])
def test_a_lost_place_is_told(code: int) -> None:
    consumer = Consumer()
    topic = KafkaRowTopic(consumer, "")
    consumer.messages = [Message(0, 10, code)]
    with pytest.raises(RowsGoneError, match="no longer has the next rows"):
        topic.poll(0.1)


def test_kafka_away_is_unavailable() -> None:
    consumer = Consumer()
    consumer.away = True
    with pytest.raises(UnavailableError, match="topic rows: "):
        KafkaRowTopic(consumer, "").end_offsets()


def test_opening_connects_to_nobody() -> None:
    KafkaRowTopic.open(Broker("127.0.0.1:1"), "").close()
    LogTopics.open(Broker("127.0.0.1:1"), "").close()
