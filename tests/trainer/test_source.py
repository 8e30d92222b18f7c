"""Partitions merged by event time, in bounded memory, without waiting for one that has ended."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from roo.wire import Record
from trainer.source import ListSource, Merge


def record(partition: int, offset: int, time_ms: int) -> Record:
    return Record("samples", partition, offset, time_ms, None, b"")


def times(records: list[Record]) -> list[int]:
    return [r.timestamp_ms for r in records]


def test_the_oldest_head_comes_first() -> None:
    merge = Merge([0, 1])
    for r in (record(0, 0, 10), record(0, 1, 30), record(1, 0, 20), record(1, 1, 40)):
        merge.offer(r)
    assert times(merge.take(3)) == [10, 20, 30]
    assert times(merge.take(3)) == [], "partition 0 is silent and could still hold 35"
    merge.reached_end(0)
    assert times(merge.take(3)) == [40]


def test_a_partition_at_its_end_holds_up_nobody() -> None:
    merge = Merge([0, 1, 2])
    merge.reached_end(1)
    merge.reached_end(2)
    merge.offer(record(0, 0, 10))
    assert times(merge.take(5)) == [10]
    merge.offer(record(1, 0, 5))
    merge.offer(record(0, 1, 20))
    assert times(merge.take(5)) == [5], "partition 1 speaks again: its next may be older than 20"
    merge.reached_end(1)
    assert times(merge.take(5)) == [20]


def test_buffers_are_bounded_by_room() -> None:
    merge = Merge([0, 1], buffered=2)
    merge.offer(record(0, 0, 10))
    assert (merge.room(0), merge.room(1)) == (1, 2)
    merge.offer(record(0, 1, 11))
    assert merge.room(0) == 0


def test_one_partition_can_be_taken_alone() -> None:
    merge = Merge([0, 1])
    merge.offer(record(0, 0, 50))
    merge.offer(record(1, 0, 10))
    assert times(merge.take_of(0, 5)) == [50]
    merge.clear()
    assert merge.take_of(1, 5) == []


@given(st.lists(st.lists(st.integers(0, 50), max_size=10).map(sorted), min_size=1, max_size=4), st.integers(1, 7))
def test_sorted_partitions_come_out_sorted_whatever_arrives_first(partitions: list[list[int]], poll: int) -> None:
    merge = Merge(range(len(partitions)))
    out: list[Record] = []
    for p in reversed(range(len(partitions))):  # the last partition's records all arrive before the first one's
        for offset, time_ms in enumerate(partitions[p]):
            merge.offer(record(p, offset, time_ms))
        merge.reached_end(p) if not partitions[p] else None
        out += merge.take(poll)
    for p in range(len(partitions)):
        merge.reached_end(p)
    while taken := merge.take(poll):
        out += taken
    assert times(out) == sorted(t for partition in partitions for t in partition)


def test_a_list_source_gives_what_kafka_would() -> None:
    source = ListSource([record(0, 0, 10), record(1, 0, 5), record(0, 1, 20)], num_partitions=2)
    assert source.end_offsets() == {0: 2, 1: 1}
    assert times(source.poll(2, 0)) == [5, 10]
    assert source.positions() == {0: 1, 1: 1}
    lag = source.lag()
    assert (lag[0].records, lag[0].event_ms, lag[1].records) == (1, 10, 0)
    source.seek({0: 0})
    assert times(source.poll(9, 0, partition=0)) == [10, 20]
    source.append([record(1, 1, 7)])
    assert times(source.poll(9, 0)) == [5, 7]
    source.close()
