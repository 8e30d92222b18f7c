"""Merging partitions by event time in bounded memory, without waiting for a partition that has ended."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from roostream.runtime.kafka.timestamp_merge import TimestampMerge
from roostream.wire.records import Record

IMPRESSIONS, P0, P1, P2 = ("impressions", 0), ("samples", 0), ("samples", 1), ("samples", 2)


def record(partition: tuple[str, int], offset: int, time_ms: int) -> Record:
    return Record(*partition, offset, time_ms, None, b"")


def times(records: list[Record]) -> list[int]:
    return [r.timestamp_ms for r in records]


def test_equal_times_are_ordered_by_partition() -> None:
    merge = TimestampMerge([IMPRESSIONS, P0])
    merge.offer(record(P0, 0, 10))
    merge.offer(record(IMPRESSIONS, 0, 10))
    merge.reached_end(P0)
    merge.reached_end(IMPRESSIONS)
    assert [r.topic for r in merge.take(2)] == ["impressions", "samples"]


def test_a_partition_at_its_end_delays_no_other() -> None:
    merge = TimestampMerge([P0, P1, P2])
    merge.reached_end(P1)
    merge.reached_end(P2)
    merge.offer(record(P0, 0, 10))
    assert times(merge.take(5)) == [10]
    merge.offer(record(P1, 0, 5))
    merge.offer(record(P0, 1, 20))
    assert times(merge.take(5)) == [5], "the next record of partition 1 may be older than 20"
    merge.reached_end(P1)
    assert times(merge.take(5)) == [20]


def test_a_closed_partition_delays_no_other() -> None:
    merge = TimestampMerge([P0, P1])
    for r in (record(P0, 0, 10), record(P1, 0, 20), record(P0, 1, 30)):
        merge.offer(r)
    assert times(merge.take(9, lambda p: p == P0)) == [20] and merge.head(P1) is None
    assert times(merge.take(9, lambda p: p == P1 or merge.head(p) == 1)) == [10], (
        "the predicate must be evaluated for each record"
    )
    assert times(merge.take_from(P0, 9, lambda p: merge.head(p) == 1)) == []
    assert times(merge.take_from(P0, 9)) == [30]


def test_a_partition_is_drained_when_all_records_are_returned() -> None:
    merge = TimestampMerge([P0])
    merge.offer(record(P0, 0, 10))
    merge.reached_end(P0)
    assert merge.at_end(P0) and not merge.is_drained(P0)
    merge.take(1)
    assert merge.is_drained(P0)


def test_buffers_are_bounded_by_number_of_records() -> None:
    merge = TimestampMerge([P0, P1], max_buffered=2)
    merge.offer(record(P0, 0, 10))
    assert (merge.num_free(P0), merge.num_free(P1)) == (1, 2)
    merge.offer(record(P0, 1, 11))
    assert merge.num_free(P0) == 0


def test_buffers_are_bounded_by_bytes() -> None:
    merge = TimestampMerge([P0, P1], max_buffered=10, max_buffered_bytes=1000)
    for offset in range(3):
        merge.offer(record(P0, offset, 10)._replace(value=bytes(300)))
    assert (merge.num_free(P0), merge.num_free(P1)) == (1, 10), "the partition has a tenth of the bytes left"
    merge.offer(record(P0, 3, 10)._replace(value=bytes(5000)))
    assert merge.num_free(P0) == 0, "one record larger than the limit is accepted, and no more"
    merge.reached_end(P1)
    merge.take(1)
    assert merge.num_free(P0) == 0
    merge.take_from(P0, 2)
    merge.take_any(1)
    assert merge.num_free(P0) == 10
    merge.offer(record(P0, 4, 10)._replace(value=bytes(900)))
    merge.clear()
    assert merge.num_free(P0) == 10


def test_one_partition_or_all_can_be_read() -> None:
    merge = TimestampMerge([P0, P1])
    for n, p in enumerate((P0, P1, P1)):
        merge.offer(record(p, max(n - 1, 0), 50 - n))
    assert times(merge.take_from(P0, 5)) == [50]
    assert times(merge.take_any(1)) == [49]
    merge.clear()
    assert merge.take_any(5) == []


@given(
    st.lists(st.lists(st.integers(0, 50), max_size=10).map(sorted), min_size=1, max_size=4), st.integers(1, 7)
)
def test_sorted_partitions_are_merged_in_order(partitions: list[list[int]], poll: int) -> None:
    names = [("samples", p) for p in range(len(partitions))]
    merge = TimestampMerge(names)
    out: list[Record] = []
    for name, times_ms in reversed(
        list(zip(names, partitions, strict=True))
    ):  # the last partition's records arrive before the first partition's
        for offset, time_ms in enumerate(times_ms):
            merge.offer(record(name, offset, time_ms))
        merge.reached_end(name) if not times_ms else None
        out += merge.take(poll)
    for name in names:
        merge.reached_end(name)
    while taken := merge.take(poll):
        out += taken
    assert times(out) == sorted(t for partition in partitions for t in partition)
