"""The auditor's way from a reader to the accounts."""

from __future__ import annotations

import pytest

from command.auditor import Auditor
from roo import roo_pb2 as pb
from roo import wire
from roo.errors import UnavailableError
from roo.ids import key_bytes
from roo.schema_file import schema_from_dict
from roo.wire import Record
from runtime.clock import FakeClock
from runtime.kafka.broker import Broker
from runtime.kafka.record_reader import MemoryReader, RecordReader
from runtime.kafka.topics import Partition

SCHEMA = schema_from_dict({"label": [{"name": "click", "action": "click"}]})


SEEN = [("impressions", 0), ("impressions", 1), ("engagements", 1)]


def impression(offset: int, request: str, partition: int = 1) -> Record:
    message = pb.Impression(header=pb.Header(request_id=request, user_id=5, time_ms=1000))
    return Record("impressions", partition, offset, 1000, key_bytes(5, 0, ""), wire.encode(wire.IMPRESSION, message))


def auditor(reader: RecordReader, seen: list[Record] | None = None) -> Auditor:
    out = Auditor(Broker("nowhere:1"), "x.", SCHEMA, clock=FakeClock(), on_record=None if seen is None else seen.append)
    out.open_with(reader)
    return out


def test_it_reads_until_there_is_nothing_more() -> None:
    seen: list[Record] = []
    reader = MemoryReader(SEEN, [impression(0, "a"), impression(1, "b")])
    a = auditor(reader, seen)
    assert a.poll() == 2 and a.poll() == 0
    reader.append([impression(2, "a")])
    assert a.poll() == 1
    assert a.sums().requests == a.sums().pending_requests == 2
    assert [(r.topic, r.partition, r.offset) for r in seen] == [("impressions", 1, n) for n in range(3)]


def test_a_first_call_does_not_take_a_slow_start_for_an_end() -> None:
    class Slow(MemoryReader):
        polls = 0

        def poll(self, max_records: int, timeout_s: float, partition: Partition | None = None) -> list[Record]:
            self.polls += 1
            return super().poll(max_records, timeout_s, partition) if self.polls > 2 else []

    assert auditor(Slow(SEEN, [impression(0, "a")])).poll() == 1


def test_an_empty_value_is_an_input_that_can_not_be_read() -> None:
    a = auditor(MemoryReader(SEEN, [Record("engagements", 1, 0, 1000, None, b"")]))
    a.poll()
    assert a.sums().unread == 1 and not a.sums(ended=True).accounted


def test_a_budget_of_zero_is_one_look() -> None:
    class OneByOne(MemoryReader):
        def poll(self, max_records: int, timeout_s: float, partition: Partition | None = None) -> list[Record]:
            return super().poll(1, timeout_s, partition)

    a = auditor(OneByOne(SEEN, [impression(0, "a"), impression(1, "b")]))
    assert a.poll(0.0) == 1 and a.poll(0.0) == 1 and a.poll(0.0) == 0


def test_a_broker_that_is_away_is_waited_for_and_at_the_first_call_told() -> None:
    reader = MemoryReader(SEEN, [impression(0, "a")])
    a = auditor(reader)
    reader.away = True
    assert a.poll(0.0) == 0
    reader.away = False
    assert a.poll() == 1
    with pytest.raises(UnavailableError, match=r"x\.impressions-0"):
        Auditor(Broker("127.0.0.1:1"), "x.", SCHEMA).poll(0.0)


def test_the_sums_outlive_the_reader() -> None:
    a = auditor(MemoryReader(SEEN, [impression(0, "a")]))
    a.poll()
    a.close()
    a.close()
    assert a.sums().requests == 1
