"""Serving's Kafka producer and the options of its consumer, with a fake of librdkafka's producer."""

from __future__ import annotations

from typing import Any

import pytest
from confluent_kafka import KafkaError

from serving.feature_log.format import LogRecord
from serving.feature_log.sender import KafkaSink
from serving.rows.row_follower import rows_consumer_options


class FakeProducer:
    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.calls: list[str] = []

    def produce(self, topic: str, **arguments: Any) -> None:
        self.sent.append({"topic": topic, **arguments})

    def poll(self, timeout_s: float) -> None:
        self.calls.append("poll")

    def purge(self, **arguments: Any) -> None:
        self.calls.append("purge")


OUTCOMES = [
    (None, "delivered"),
    (KafkaError.MSG_SIZE_TOO_LARGE, "refused"),
    (KafkaError.INVALID_TIMESTAMP, "refused_time"),
    (KafkaError._MSG_TIMED_OUT, "failed"),  # noqa: SLF001
    (KafkaError._UNKNOWN_TOPIC, "failed"),  # noqa: SLF001
    (KafkaError._FATAL, "failed"),  # noqa: SLF001
    (KafkaError._PURGE_QUEUE, "failed"),  # noqa: SLF001
]


@pytest.mark.parametrize(("code", "outcome"), OUTCOMES)
def test_only_errors_of_the_record_itself_reject_it(code: int | None, outcome: str) -> None:
    producer = FakeProducer()
    sink = KafkaSink(producer, "p-")
    seen: list[str] = []
    sink.send(LogRecord("impressions", -1, 5, b"userkey!", b"v"), lambda o, _: seen.append(o))
    (sent,) = producer.sent
    sent["on_delivery"](None if code is None else KafkaError(code), None)
    assert seen == [outcome]
    assert (sent["topic"], sent["key"], sent["value"], sent["timestamp"]) == (
        "p-impressions",
        b"userkey!",
        b"v",
        5,
    )
    assert "partition" not in sent, "without a partition, the key decides"


def test_heartbeats_go_to_their_partition() -> None:
    producer = FakeProducer()
    KafkaSink(producer, "").send(LogRecord("engagements", 3, 5, b"", b"v"), lambda *_: None)
    assert producer.sent[0]["partition"] == 3 and producer.sent[0]["key"] is None


def test_a_closed_sink_returns_undelivered_records() -> None:
    producer = FakeProducer()
    sink = KafkaSink(producer, "")
    sink.poll(0.1)
    sink.close()
    assert producer.calls == ["poll", "purge", "poll"]


def test_the_rows_topic_is_read_from_the_start_without_skips() -> None:
    options = rows_consumer_options("p-", 4)
    assert (
        options.partitions == (("rows", 0), ("rows", 1), ("rows", 2), ("rows", 3))
        and options.topic_names() == "p-rows"
    )
    assert not options.skip_lost_records and options.track_end_offsets
