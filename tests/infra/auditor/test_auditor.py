"""The auditor over a consumer in memory: reading to the end, restarts from its file, retention and
outages."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from infra.auditor import audit_file
from infra.auditor.auditor import AUDITED, Auditor
from roostream.errors import UnavailableError
from roostream.runtime.clock import FakeClock
from roostream.runtime.kafka.broker import Broker
from roostream.runtime.kafka.consumer import MemoryConsumer, PartitionLag, RecordConsumer
from roostream.runtime.kafka.topics import Partition, Progress, all_partitions
from roostream.schema.ids import key_bytes, sample_id
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.records import Record

PARTITIONS_READ = [("impressions", 0), ("impressions", 1), ("engagements", 1)]


def impression(offset: int, request: str, partition: int = 1) -> Record:
    message = pb.Impression(header=pb.Header(request_id=request, user_id=5, time_ms=1000))
    return Record(
        "impressions", partition, offset, 1000, key_bytes(5, 0, ""), wire.encode(wire.IMPRESSION, message)
    )


def auditor(reader: RecordConsumer, read_records: list[Record] | None = None) -> Auditor:
    created = Auditor(
        Broker("nowhere:1"),
        "x.",
        clock=FakeClock(),
        on_record=None if read_records is None else read_records.append,
    )
    created.open_with(reader)
    return created


def test_the_auditor_reads_until_the_end_of_the_topics() -> None:
    read_records: list[Record] = []
    reader = MemoryConsumer(PARTITIONS_READ, [impression(0, "a"), impression(1, "b")])
    a = auditor(reader, read_records)
    assert a.poll() == 2 and a.poll() == 0
    reader.append([impression(2, "a")])
    assert a.poll() == 1
    assert a.sums().requests == a.sums().pending_requests == 2
    assert [(r.topic, r.partition, r.offset) for r in read_records] == [
        ("impressions", 1, n) for n in range(3)
    ]


def test_the_first_poll_waits_for_a_slow_consumer() -> None:
    class SlowConsumer(MemoryConsumer):
        polls = 0

        def poll(
            self, max_records: int, timeout_s: float, partition: Partition | None = None
        ) -> list[Record]:
            self.polls += 1
            return super().poll(max_records, timeout_s, partition) if self.polls > 2 else []

    assert auditor(SlowConsumer(PARTITIONS_READ, [impression(0, "a")])).poll() == 1


def test_an_unavailable_broker_is_awaited_after_the_first_call() -> None:
    reader = MemoryConsumer(PARTITIONS_READ, [impression(0, "a")])
    a = auditor(reader)
    reader.away = True
    assert a.poll(0.0) == 0
    reader.away = False
    assert a.poll() == 1
    with pytest.raises(UnavailableError, match=r"x\.impressions"):
        Auditor(Broker("127.0.0.1:1"), "x.").poll(0.0)


ALL = all_partitions(AUDITED, 2)
T0 = 1_700_000_000_000
KEY = key_bytes(5, 0, "")
TOPICS = {"x.impressions": "id 1"}


def traffic(first: int, count: int, start: int = 0) -> list[Record]:
    """Requests of one user, one per second, each with a sample ten seconds later. Offsets begin at
    `start`."""
    out = []
    for n in range(count):
        name, at = f"r{first + n}", T0 + (first + n) * 1000
        header = pb.Header(request_id=name, user_id=5, time_ms=at)
        sample = pb.Sample(header=header, sample_id=sample_id(KEY, name), close_ms=at + 10_000)
        impression_value = wire.encode(wire.IMPRESSION, pb.Impression(header=header))
        out.append(Record("impressions", 1, start + n, at, KEY, impression_value))
        out.append(Record("samples", 1, start + n, at + 10_000, KEY, wire.encode(wire.SAMPLE, sample)))
    return out


def test_a_partial_sum_is_never_reported_as_the_sum() -> None:
    class SingleRecordConsumer(MemoryConsumer):
        def poll(
            self, max_records: int, timeout_s: float, partition: Partition | None = None
        ) -> list[Record]:
            return super().poll(1, timeout_s, partition)

    reader = SingleRecordConsumer(ALL, traffic(0, 3))
    a = auditor(reader)
    for _ in range(5):
        assert a.poll(0.0) == 1 and not a.is_current()
    reader.append(traffic(60, 3, start=3))
    assert a.poll(0.0) == 1 and a.is_current(), (
        "records that arrived after the start are not needed for the sum"
    )
    assert a.behind() == 6


def test_the_audit_is_not_current_before_end_offsets_are_known() -> None:
    class ConsumerWithoutLag(MemoryConsumer):
        def lag(self) -> dict[Partition, PartitionLag]:
            return {}

    a = auditor(ConsumerWithoutLag(ALL, traffic(0, 3)))
    a.poll()
    assert not a.is_current() and a.behind() is None


def test_the_auditor_continues_from_its_file(tmp_path: Path) -> None:
    reader = MemoryConsumer(ALL, traffic(0, 5))
    first = auditor(reader)
    first.poll()
    audit_file.write(tmp_path, first.saved(TOPICS))
    reader.append(traffic(5, 5, start=5))
    read_records: list[Record] = []
    second = Auditor(Broker("nowhere:1"), "x.", clock=FakeClock(), on_record=read_records.append)
    second.open_with(reader, audit_file.read(tmp_path, TOPICS))
    assert not second.is_current()
    second.poll()
    assert second.is_current() and len(read_records) == 10
    assert (second.sums().requests, second.sums().samples, second.sums(ended=True).accounted) == (
        10,
        10,
        True,
    )


class EpochConsumer(MemoryConsumer):
    """A consumer whose records were written in leader epoch 3. It stores the epochs that the latest `seek`
    was given."""

    sought_epochs: Mapping[Partition, int] = {}

    def seek(self, progress: Mapping[Partition, int], leader_epochs: Mapping[Partition, int] = {}) -> None:
        self.sought_epochs = leader_epochs
        super().seek(progress, leader_epochs)

    def leader_epochs(self, at: Progress) -> dict[Partition, int]:
        return {partition: 3 for partition, offset in at.items() if offset}


def test_the_audit_file_has_leader_epochs_that_reveal_a_truncated_log(tmp_path: Path) -> None:
    reader = EpochConsumer(ALL, traffic(0, 5))
    first = auditor(reader)
    first.poll()
    saved = first.saved(TOPICS)
    audit_file.write(tmp_path, saved)
    Auditor(Broker("nowhere:1"), "x.", clock=FakeClock()).open_with(reader, audit_file.read(tmp_path, TOPICS))
    assert (
        reader.sought_epochs == {partition: 3 for partition, offset in saved.progress.items() if offset} != {}
    )


@pytest.mark.parametrize("damage", ["bit", "cut", "empty", "format", "topics"])
def test_an_unusable_audit_file_restarts_the_audit_with_a_warning(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    a = auditor(MemoryConsumer(ALL, traffic(0, 5)))
    a.poll()
    if damage == "format":
        monkeypatch.setattr(audit_file, "FORMAT", 0)
    audit_file.write(tmp_path, a.saved(TOPICS))
    monkeypatch.undo()
    file = tmp_path / audit_file.NAME
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= damage == "bit"
    file.write_bytes({"cut": data[:-9], "empty": b""}.get(damage, data))
    assert audit_file.read(tmp_path, {} if damage == "topics" else TOPICS) is None
    assert "reading the" in caplog.text


def test_after_retention_only_later_records_are_audited() -> None:
    reader = MemoryConsumer(ALL, traffic(0, 100))
    reader.trim(("samples", 1), 20)
    a = Auditor(Broker("nowhere:1"), "x.", settle_ms=15_000, clock=FakeClock())
    a.open_with(reader)
    a.poll()
    sums = a.sums(ended=True)
    assert sums.since_ms == T0 + 30_000 + 15_000
    assert sums.accounted and sums.requests == sums.samples == 100 - 45


def test_a_record_of_the_future_is_not_the_begin_of_the_audit() -> None:
    """It is kept longest: retention deletes what is older than its newest record."""
    at = ("samples", 20)
    records = [
        record._replace(timestamp_ms=T0 + 10**9) if (record.topic, record.offset) == at else record
        for record in traffic(0, 100)
    ]
    reader = MemoryConsumer(ALL, records)
    reader.trim(("samples", 1), 20)
    a = Auditor(Broker("nowhere:1"), "x.", settle_ms=15_000, clock=FakeClock())
    a.open_with(reader)
    a.poll()
    assert a.sums().since_ms == T0 + 31_000 + 15_000 and a.sums().requests == 100 - 46


def test_an_emptied_topic_does_not_count_as_lost() -> None:
    reader = MemoryConsumer(ALL, traffic(0, 10))
    reader.trim(("samples", 1), 10)
    a = Auditor(Broker("nowhere:1"), "x.", settle_ms=1000, clock=FakeClock(T0 + 10**6))
    a.open_with(reader)
    a.poll()
    assert a.sums(ended=True).accounted and a.sums().requests == 0


def test_records_that_were_deleted_unread_restart_the_sums(caplog: pytest.LogCaptureFixture) -> None:
    reader = MemoryConsumer(ALL, traffic(0, 10))
    a = Auditor(Broker("nowhere:1"), "x.", settle_ms=1000, clock=FakeClock())
    a.open_with(reader)
    a.poll()
    reader.append(traffic(10, 100, start=10))
    reader.trim(("impressions", 1), 50)
    with caplog.at_level(logging.ERROR):
        a.poll()
        a.poll()
    sums = a.sums(ended=True)
    assert sums.lost_records == 40 and "40 records were deleted" in caplog.text
    assert sums.accounted and sums.requests == sums.samples == 110 - 51 and a.is_current()


def test_an_outage_during_a_restart_counts_nothing_twice(tmp_path: Path) -> None:
    class FailingConsumer(MemoryConsumer):
        should_fail = False

        def end_offsets(self) -> Progress:
            if self.should_fail:
                raise UnavailableError("injected")
            return super().end_offsets()

    reader = FailingConsumer(ALL, traffic(0, 10))
    a = Auditor(Broker("nowhere:1"), "x.", settle_ms=1000, clock=FakeClock())
    a.open_with(reader)
    a.poll()
    reader.append(traffic(10, 100, start=10))
    reader.trim(("impressions", 1), 50)
    reader.should_fail = True
    for _ in range(2):
        with pytest.raises(UnavailableError, match="injected"):
            a.poll()
        assert a.must_restart
    reader.should_fail = False
    a.poll()
    sums = a.sums(ended=True)
    assert (sums.lost_records, sums.accounted, sums.requests, sums.samples) == (40, True, 59, 59)
    audit_file.write(tmp_path, a.saved(TOPICS))
    b = Auditor(Broker("nowhere:1"), "x.", settle_ms=1000, clock=FakeClock())
    b.open_with(reader, audit_file.read(tmp_path, TOPICS))
    assert b.sums().lost_records == 40


def test_with_too_many_pending_events_only_outputs_are_read() -> None:
    inputs = [r for r in traffic(0, 500) if r.topic == "impressions"]
    outputs = [r for r in traffic(0, 500) if r.topic == "samples"]
    reader = MemoryConsumer(ALL, inputs)
    a = Auditor(Broker("nowhere:1"), "x.", clock=FakeClock(), max_waiting=100)
    a.open_with(SmallBatchConsumer(reader))
    for _ in range(50):
        a.poll(0.0)
    assert 100 <= a.accounts.num_waiting < 120 and a.behind() == 500 - a.accounts.num_waiting
    reader.append(outputs)
    while a.poll(0.0):
        pass
    assert a.sums(ended=True).accounted and a.sums().samples == 500


class SmallBatchConsumer:
    """A consumer that returns at most ten records per poll."""

    def __init__(self, reader: MemoryConsumer) -> None:
        self.reader = reader

    def poll(self, max_records: int, timeout_s: float, partition: Partition | None = None) -> list[Record]:
        return self.reader.poll(10, timeout_s, partition)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.reader, name)
