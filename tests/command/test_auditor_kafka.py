"""The auditor's way from Kafka's messages to the accounts, with a consumer that lives in the test."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from confluent_kafka import KafkaError

from command.auditor import Auditor
from roo import roo_pb2 as pb
from roo import wire
from roo.errors import UnavailableError
from roo.ids import key_bytes
from roo.schema import schema_from_dict
from roo.wire import Record
from runtime.broker import Broker
from runtime.clock import FakeClock

SCHEMA = schema_from_dict({"label": [{"name": "click", "action": "click"}]})


class Message:
    def __init__(self, topic: str, value: bytes | None, offset: int = 0, error: KafkaError | None = None) -> None:
        self._fields = {"topic": topic, "value": value, "offset": offset, "error": error}

    def topic(self) -> object:
        return self._fields["topic"]

    def value(self) -> object:
        return self._fields["value"]

    def offset(self) -> object:
        return self._fields["offset"]

    def error(self) -> object:
        return self._fields["error"]

    def partition(self) -> int:
        return 1

    def key(self) -> bytes:
        return key_bytes(5, 0)

    def timestamp(self) -> tuple[int, int]:
        return 1, 1000


class FakeConsumer:
    def __init__(self, *batches: Sequence[Message]) -> None:
        self.batches, self.closed = list(batches), False

    def consume(self, num_messages: int, timeout: float) -> Sequence[Message]:
        return self.batches.pop(0) if self.batches else []

    def close(self) -> None:
        self.closed = True


def impression(offset: int, request: str) -> Message:
    message = pb.Impression(header=pb.Header(request_id=request, user_id=5, time_ms=1000))
    return Message("x.impressions", wire.encode(wire.IMPRESSION, message), offset)


def auditor(consumer: FakeConsumer, seen: list[Record] | None = None) -> Auditor:
    out = Auditor(Broker("nowhere:1"), "x.", SCHEMA, clock=FakeClock(), on_record=None if seen is None else seen.append)
    out.open_with(consumer)
    return out


def test_it_reads_until_there_is_nothing_more() -> None:
    seen: list[Record] = []
    a = auditor(FakeConsumer([impression(0, "a"), impression(1, "b")], [impression(2, "a")]), seen)
    assert a.poll() == 3 and a.poll() == 0
    assert a.sums().requests == a.sums().pending_requests == 2
    assert [(r.topic, r.partition, r.offset) for r in seen] == [("impressions", 1, n) for n in range(3)]


def test_a_first_call_does_not_take_a_slow_start_for_an_end() -> None:
    consumer = FakeConsumer(
        [], [], [impression(0, "a")], [Message("x.impressions", None, 1, KafkaError(KafkaError._PARTITION_EOF))]
    )
    a = auditor(FakeConsumer())
    a.open_with(consumer, [("x.impressions", 1)])
    assert a.poll() == 1 and not consumer.batches


def test_an_empty_value_is_an_input_that_can_not_be_read() -> None:
    a = auditor(FakeConsumer([Message("x.engagements", None)]))
    a.poll()
    assert a.sums().unread == 1 and not a.sums(ended=True).accounted


def test_a_budget_of_zero_is_one_look() -> None:
    a = auditor(FakeConsumer([impression(0, "a")], [impression(1, "b")]))
    assert a.poll(0.0) == 1 and a.poll(0.0) == 1


def test_a_broker_that_is_away_is_waited_for_and_a_topic_that_is_not_there_is_told() -> None:
    a = auditor(FakeConsumer([Message("x.samples", None, error=KafkaError(KafkaError._TRANSPORT))]))
    assert a.poll() == 0
    missing = auditor(FakeConsumer([Message("x.samples", None, error=KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART))]))
    with pytest.raises(UnavailableError, match=r"x.samples can't be read: .*is the prefix right"):
        missing.poll()


def test_the_sums_outlive_the_client() -> None:
    consumer = FakeConsumer([impression(0, "a")])
    a = auditor(consumer)
    a.poll()
    a.close()
    a.close()
    assert consumer.closed and a.sums().requests == 1
