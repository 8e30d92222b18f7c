"""Event time of a partition and of all: no single event carries it away, the slowest producer holds it, idle
ones don't."""

from __future__ import annotations

from joiner.local_engine import PartitionTime, Watermarks
from roostream.runtime.event_time import START

MAX_MS, SILENT_MS = 1_000, 5_000


def after(*times_ms: int) -> PartitionTime:
    split = PartitionTime()
    for time_ms in times_ms:
        split.event(time_ms, MAX_MS)
    return split


def test_an_event_moves_the_time_of_its_partition_and_an_older_one_does_not() -> None:
    assert after(100, 300, 200).newest_ms == 300


def test_one_event_from_far_ahead_moves_nothing_whatever_follows() -> None:
    assert after(100, 10**10).newest_ms == 100
    assert after(100, 10**10, 200).newest_ms == 200
    assert after(100, 10**10, 200, 10**10, 300).newest_ms == 300, "the one before it was an ordinary one"


def test_a_step_of_the_bound_is_no_jump() -> None:
    assert after(100, 100 + MAX_MS).newest_ms == 1_100 and after(100, 101 + MAX_MS).newest_ms == 100


def test_a_pause_of_the_whole_partition_is_believed_with_the_second_event_behind_it() -> None:
    assert after(100, 50_000, 50_007).newest_ms == 50_000
    assert after(100, 50_000, 50_007, 50_008).newest_ms == 50_008
    assert after(100, 10**10, 50_000, 50_001).newest_ms == 50_001, "the smaller of the two"


def test_of_several_producers_the_slowest_holds_the_partition() -> None:
    split = PartitionTime()
    split.heartbeat(1_000, "a", SILENT_MS)
    split.heartbeat(1_100, "b", SILENT_MS)
    split.heartbeat(4_000, "a", SILENT_MS)
    split.event(4_100, MAX_MS)
    assert split.reached_ms(SILENT_MS) == 1_100
    split.heartbeat(900, "b", SILENT_MS)
    assert split.reached_ms(SILENT_MS) == 1_100, "a heartbeat that comes again says nothing new"
    split.heartbeat(4_050, "b", SILENT_MS)
    assert split.reached_ms(SILENT_MS) == 4_000


def test_a_producer_that_is_silent_for_too_long_holds_nothing_and_is_forgotten() -> None:
    split = PartitionTime()
    for producer in "ab":
        split.heartbeat(1_000, producer, SILENT_MS)
    split.heartbeat(6_000, "a", SILENT_MS)
    assert split.reached_ms(SILENT_MS) == 1_000, "just not too long"
    split.event(6_001, MAX_MS)
    assert split.reached_ms(SILENT_MS) == 6_001
    split.heartbeat(6_001, "a", SILENT_MS)
    assert set(split.heartbeats) == {"a"}


def test_heartbeats_without_a_name_and_end_markers_are_nobody_s() -> None:
    split = PartitionTime()
    split.heartbeat(1_000, "", SILENT_MS)
    split.heartbeat(1_100, "a", SILENT_MS)
    assert split.reached_ms(SILENT_MS) == 1_100
    split.heartbeat(1_050, "b", SILENT_MS)
    split.end_marker(1_200)
    assert split.reached_ms(SILENT_MS) == 1_200, "whoever beat before has ended too"


ONE, TWO, THREE = ("impressions", 0), ("impressions", 1), ("impressions", 2)


def test_the_watermark_is_the_slowest_busy_partition_s_and_never_goes_back() -> None:
    marks = Watermarks([ONE, TWO], 10)
    assert marks.observe(ONE, 500) == START
    assert [marks.observe(TWO, 300), marks.observe(ONE, 600), marks.observe(TWO, 550)] == [289, 289, 539]
    assert marks.observe(TWO, 200) == 539
    assert [marks.observe(TWO, 560), marks.observe(TWO, 700), marks.observe(ONE, 900)] == [549, 589, 689]


def test_a_partition_that_was_idle_holds_the_watermark_again_once_it_speaks() -> None:
    marks = Watermarks([ONE, TWO], 0)
    marks.observe(ONE, 500)
    marks.observe(TWO, 500)
    marks.set_idle(TWO)
    assert marks.observe(ONE, 1_000) == 999
    assert marks.observe(TWO, 600) == 999
    assert marks.observe(ONE, 5_000) == 999, "the slow one is back"
    assert marks.observe(TWO, 5_000) == 4_999


def test_idle_partitions_are_nobody_s_measure_of_being_ahead() -> None:
    marks = Watermarks([ONE, TWO, THREE], 0)
    for partition, reached_ms in ((ONE, 100), (TWO, 7_000), (THREE, 5_000)):
        marks.observe(partition, reached_ms)
    assert marks.ahead_ms(TWO) == 6_900
    marks.set_idle(ONE)
    assert (marks.ahead_ms(TWO), marks.ahead_ms(THREE)) == (2_000, 0)
