"""What is to be read is seen without a worker, and markers of transactions aren't taken for it."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import pytest

from roostream.errors import UnavailableError
from roostream.runtime.kafka.kafka_consumer import ConsumerOptions, KafkaConsumer
from roostream.runtime.kafka.topics import Partition
from roostream.wire.records import Record
from tests.runtime.fake_consumer import FakeConsumer, FakeMessage, end
from trainer.control.idle import BacklogProbe

A, B, LABELS = ("samples", 0), ("samples", 1), ("corrections", 0)


class Offsets:
    """A `KafkaConsumer` for a `BacklogProbe`. Offsets in `records` are records; all others below `ends` are
    markers of transactions."""

    def __init__(self, ends: dict[Partition, int], records: Collection[tuple[Partition, int]] = ()) -> None:
        self.partitions, self.ends, self.records = tuple(ends), ends, set(records)
        self.oldest = dict.fromkeys(ends, 0)
        self.away = self.hangs = False
        self.num_seeks = 0
        self.at: dict[Partition, int] = {}
        self.held: set[Partition] = set()

    def bounds(self, *partitions: Partition) -> Mapping[Partition, tuple[int, int]]:
        if self.away:
            raise UnavailableError("Kafka is away")
        return {p: (self.oldest[p], self.ends[p]) for p in partitions}

    def seek(self, progress: Mapping[Partition, int]) -> None:
        self.num_seeks += 1
        assert progress.keys() == set(self.partitions) and not self.held
        self.at = dict(progress)

    def pause(self, partitions: Collection[Partition]) -> None:
        self.held = set(partitions)

    def poll(self, max_records: int, timeout_s: float) -> list[Record]:
        if self.hangs:
            return []
        found = sorted((p, at) for p, at in self.records if self.at[p] <= at < self.ends[p])
        if found:
            return [Record(*found[0][0], found[0][1], 0, b"", b"")]
        self.at = dict(self.ends)
        return []

    def passed(self, partition: Partition) -> int:
        return self.at[partition]


def probe(log: Offsets) -> BacklogProbe:
    return BacklogProbe(log)  # type: ignore[arg-type]


def counts(lookout: BacklogProbe, committed: Mapping[Partition, int], looks: int = 3) -> list[int | None]:
    seen = [lookout.look(dict(committed)) for _ in range(looks)]
    return [None if unread is None else unread.records for unread in seen]


def test_backlog_is_summed_over_all_partitions() -> None:
    log = Offsets({A: 5000, B: 4000, LABELS: 9})
    assert counts(probe(log), {A: 1000, B: 4000}) == [4000, 4000, 4000]
    assert log.num_seeks == 0, "so many offsets aren't markers"


def test_corrections_count_only_if_they_are_trained() -> None:
    log = Offsets({A: 5, LABELS: 9}, {(LABELS, 8)})
    assert counts(probe(log), {A: 5}) == [0, 0, 0]
    assert counts(probe(log), {A: 5, LABELS: 6}) == [3, 3, 3]


def test_before_the_first_commit_the_whole_log_is_backlog() -> None:
    log = Offsets({A: 12}, {(A, 11)})
    log.oldest[A] = 10
    assert counts(probe(log), {}) == [2, 2, 2]


def test_deleted_records_are_not_backlog() -> None:
    log = Offsets({A: 50})
    log.oldest[A] = 50
    assert counts(probe(log), {A: 20}) == [0, 0, 0]


def test_transaction_markers_are_read_once_and_do_not_count() -> None:
    log = Offsets({A: 11, B: 4})
    lookout = probe(log)
    assert counts(lookout, {A: 10, B: 3}) == [2, 0, 0] and log.num_seeks == 1
    assert log.held == {A, B}, "nothing is fetched for nobody"
    log.ends[A] = 13
    log.records = {(A, 11)}
    assert counts(lookout, {A: 10, B: 3}) == [2, 2, 2] and log.num_seeks == 2


def test_a_log_whose_end_went_back_is_read_again() -> None:
    log = Offsets({A: 11})
    lookout = probe(log)
    assert counts(lookout, {A: 8}) == [3, 0, 0]
    log.ends[A], log.records = 9, {(A, 8), (A, 9), (A, 10)}
    assert counts(lookout, {A: 8}) == [1, 1, 1]
    log.ends[A] = 11
    assert counts(lookout, {A: 8}) == [3, 3, 3]


def test_backlog_is_unknown_when_kafka_is_unavailable() -> None:
    log = Offsets({A: 11})
    lookout = probe(log)
    log.hangs = True
    assert counts(lookout, {A: 10}) == [1, None, None]
    log.away = True
    assert counts(lookout, {A: 11}, 1) == [None]
    log.away = log.hangs = False
    assert counts(lookout, {A: 10}) == [0, 0, 0]


@pytest.mark.parametrize(("is_record", "expected"), [(True, [1, 1, 1]), (False, [1, 0, 0])])
def test_the_kafka_consumer_implements_the_sample_log(is_record: bool, expected: list[int]) -> None:
    """Offset 9 is committed; 10 is a record, or a marker that only the end of the partition tells of."""
    kafka = FakeConsumer(oldest=0, newest=11)
    reader = KafkaConsumer(kafka, ConsumerOptions(partitions=(A,)))  # type: ignore[arg-type]
    kafka.bring(FakeMessage(A, 10) if is_record else end(A, 11))
    assert counts(BacklogProbe(reader), {A: 10}) == expected
    assert kafka.assigned == {A: 10} and kafka.paused == {A}
