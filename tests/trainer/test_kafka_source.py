"""The Kafka source over a client that is told what comes."""

from __future__ import annotations

import logging
from collections import deque
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from roo.errors import UnavailableError
from runtime.broker import Broker
from trainer.kafka_source import KafkaSource


class FakeMessage:
    def __init__(self, partition: int, offset: int, time_ms: int = 0, code: int | None = None) -> None:
        self._partition, self._offset, self._time_ms, self._code = partition, offset, time_ms, code

    def error(self) -> KafkaError | None:
        return None if self._code is None else KafkaError(self._code)

    def partition(self) -> int:
        return self._partition

    def offset(self) -> int:
        return self._offset

    def timestamp(self) -> tuple[int, int]:
        return 1, self._time_ms

    def key(self) -> bytes:
        return b"k"

    def value(self) -> bytes:
        return b"v"


def end(partition: int, offset: int) -> FakeMessage:
    return FakeMessage(partition, offset, code=KafkaError._PARTITION_EOF)


class FakeConsumer:
    def __init__(self, oldest: int = 0) -> None:
        self.oldest = oldest
        self.away = False
        self.coming: deque[list[FakeMessage]] = deque()
        self.assigned: dict[int, int] = {}
        self.paused: set[int] = set()

    def get_watermark_offsets(self, at: Any, timeout: float) -> tuple[int, int]:
        if self.away:
            raise KafkaException(KafkaError(KafkaError._TRANSPORT))
        return self.oldest, 100

    def assign(self, partitions: list[Any]) -> None:
        self.assigned = {at.partition: at.offset for at in partitions}

    def poll(self, timeout: float) -> FakeMessage | None:
        while self.coming and not self.coming[0]:
            self.coming.popleft()
        return self.coming[0].pop(0) if self.coming else None

    def consume(self, num_messages: int, timeout: float) -> list[FakeMessage]:
        return self.coming.popleft() if self.coming else []

    def pause(self, partitions: list[Any]) -> None:
        self.paused |= {at.partition for at in partitions}

    def resume(self, partitions: list[Any]) -> None:
        self.paused -= {at.partition for at in partitions}

    def close(self) -> None: ...


def opened(consumer: FakeConsumer, buffered: int = 4096) -> KafkaSource:
    source = KafkaSource(Broker("k:1"), "t.", "samples", group="g", buffered=buffered)
    source._consumer = consumer
    return source


def ends(source: KafkaSource, *behind: int) -> list[FakeMessage]:
    return [end(p, 0) for p in source.partitions if p not in behind]


def test_every_partition_is_assigned_at_its_offset_or_from_its_beginning() -> None:
    consumer = FakeConsumer(oldest=2)
    source = opened(consumer)
    source.seek({0: 7, 1: 2})
    assert consumer.assigned == {0: 7, 1: 2, 2: 2, 3: 2} == source.positions()
    assert source.topic == "t.samples"


def test_records_that_retention_deleted_are_counted_and_said(caplog: pytest.LogCaptureFixture) -> None:
    consumer = FakeConsumer(oldest=10)
    with caplog.at_level(logging.ERROR):
        opened(consumer).seek({0: 4, 1: 10})
    assert "offset 4 is gone, the oldest is 10: retention deleted 6 records" in caplog.text
    assert consumer.assigned[0] == 10 and len(caplog.records) == 1


def test_seeking_while_kafka_is_away_is_told_and_changes_nothing() -> None:
    consumer = FakeConsumer()
    consumer.away = True
    with pytest.raises(UnavailableError, match=r"does not say where t\.samples begins"):
        opened(consumer).seek({0: 1})
    assert consumer.assigned == {}


def test_records_are_merged_by_time_and_positions_follow() -> None:
    consumer = FakeConsumer()
    source = opened(consumer)
    source.seek({})
    consumer.coming.append([*ends(source, 0, 1), FakeMessage(1, 0, 30), FakeMessage(0, 0, 10), FakeMessage(0, 1, 20)])
    assert [r.timestamp_ms for r in source.poll(2, 0.5)] == [10, 20]
    consumer.coming.append([end(0, 2)])
    (record,) = source.poll(5, 0.5)
    assert record == ("samples", 1, 0, 30, b"k", b"v")
    assert source.positions() == {0: 2, 1: 1, 2: 0, 3: 0}


def test_what_was_fetched_before_a_seek_is_not_given() -> None:
    consumer = FakeConsumer()
    source = opened(consumer)
    source.seek({0: 5})
    consumer.coming.append([*ends(source, 0), FakeMessage(0, 3, 1), FakeMessage(0, 5, 2), FakeMessage(0, 5, 2)])
    assert [r.offset for r in source.poll(9, 0.5)] == [5]


def test_a_full_buffer_pauses_its_partition_until_there_is_room() -> None:
    consumer = FakeConsumer()
    source = opened(consumer, buffered=2)
    source.seek({})
    consumer.coming.append([*ends(source, 0, 1), FakeMessage(0, 0, 10), FakeMessage(0, 1, 11)])
    assert source.poll(9, 0.01) == [], "partition 1 has not spoken"
    assert consumer.paused == {0}
    consumer.coming.append([end(1, 0)])
    assert len(source.poll(9, 0.5)) == 2 and consumer.paused == set()


def test_one_partition_alone_in_exact_mode() -> None:
    consumer = FakeConsumer()
    source = opened(consumer)
    source.seek({})
    consumer.coming.append([FakeMessage(0, 0, 10), FakeMessage(1, 0, 5)])
    assert [r.partition for r in source.poll(9, 0.5, partition=0)] == [0]


def test_markers_of_transactions_are_not_lag() -> None:
    consumer = FakeConsumer()
    source = opened(consumer)
    source.seek({})
    consumer.coming.append([*ends(source, 0), FakeMessage(0, 0, 10), end(0, 2)])
    source.poll(9, 0.5)
    source.ends.known = {0: (2, 4, 10)}
    lag = source.lag()[0]
    assert (lag.records, lag.high_watermark, lag.position_ms) == (0, 4, 10)
    assert source.positions()[0] == 1 and source.end_offsets() == {0: 2}


def test_a_broker_that_is_away_is_waited_for() -> None:
    consumer = FakeConsumer()
    source = opened(consumer)
    source.seek({})
    consumer.coming.append([FakeMessage(0, 0, code=KafkaError._ALL_BROKERS_DOWN)])
    assert source.poll(9, 0.01) == []
    consumer.coming.append([*ends(source, 0), FakeMessage(0, 0, 10)])
    assert len(source.poll(9, 0.5)) == 1
    source.close()
