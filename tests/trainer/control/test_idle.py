"""Idle holds: training is put on hold when there is nothing to read, and continues when there is. A trickle
of records must not toggle the hold."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roostream.errors import UnavailableError
from roostream.runtime.kafka.kafka_consumer import ConsumerOptions, KafkaConsumer
from roostream.runtime.kafka.topics import Partition
from roostream.wire.records import Record
from tests.runtime.fake_consumer import FakeConsumer, FakeMessage, end
from trainer.control.idle import Backlog, BacklogProbe, IdleAction, IdleDetector, IdleRule

P = ("samples", 0)
RULE = IdleRule(hold_s=60, min_records=100, max_wait_s=10, min_held_s=30)
UNKNOWN = None


def backlog(records: int = 0, end: int = 7) -> Backlog:
    return Backlog(records, {P: end})


def first_time_of(
    idle: IdleDetector,
    action: IdleAction,
    unread: Backlog | None,
    *,
    held: bool,
    begin_s: float,
    until_s: float,
) -> float | None:
    """The time at which the detector first advises this action. It is called once a second; None = never
    before `until_s`."""
    for second in itertools.count():
        now_s = begin_s + second
        if now_s >= until_s:
            return None
        if idle.observe(now_s, unread, held=held) is action:
            return now_s
    raise AssertionError


def test_training_is_held_after_the_configured_quiet_time() -> None:
    assert (
        first_time_of(IdleDetector(RULE), IdleAction.HOLD, backlog(), held=False, begin_s=100, until_s=300)
        == 160
    )


@pytest.mark.parametrize("unread", [backlog(1), backlog(5000), UNKNOWN])
def test_unread_records_or_an_unknown_backlog_never_hold(unread: Backlog | None) -> None:
    assert (
        first_time_of(IdleDetector(RULE), IdleAction.HOLD, unread, held=False, begin_s=0, until_s=1000)
        is None
    )


def test_zero_disables_idle_holds() -> None:
    assert (
        first_time_of(
            IdleDetector(IdleRule(hold_s=0)), IdleAction.HOLD, backlog(), held=False, begin_s=0, until_s=1000
        )
        is None
    )


def test_records_committed_between_two_readings_restart_the_quiet_time() -> None:
    idle = IdleDetector(RULE)
    assert first_time_of(idle, IdleAction.HOLD, backlog(end=7), held=False, begin_s=0, until_s=50) is None
    assert first_time_of(idle, IdleAction.HOLD, backlog(end=8), held=False, begin_s=50, until_s=300) == 110


@pytest.mark.parametrize("unknown_s", [1, 20])
def test_quiet_time_without_readings_does_not_count(unknown_s: int) -> None:
    idle = IdleDetector(RULE)
    assert first_time_of(idle, IdleAction.HOLD, backlog(), held=False, begin_s=0, until_s=50) is None
    assert (
        first_time_of(idle, IdleAction.HOLD, UNKNOWN, held=False, begin_s=50, until_s=50 + unknown_s) is None
    )
    assert (
        first_time_of(idle, IdleAction.HOLD, backlog(), held=False, begin_s=50 + unknown_s, until_s=300)
        == 110 + unknown_s
    )


@pytest.mark.parametrize("jump_s", [-7200.0, 7200.0])
def test_a_clock_jump_causes_no_hold(jump_s: float) -> None:
    idle = IdleDetector(RULE)
    assert first_time_of(idle, IdleAction.HOLD, backlog(), held=False, begin_s=10_000, until_s=10_030) is None
    begin_s = 10_030 + jump_s
    assert (
        first_time_of(idle, IdleAction.HOLD, backlog(), held=False, begin_s=begin_s, until_s=begin_s + 300)
        == begin_s + 60
    )


def test_many_records_end_the_hold_at_once_and_few_after_a_wait() -> None:
    for records, after_s in ((100, 0), (1, 10)):
        idle = IdleDetector(RULE)
        assert first_time_of(idle, IdleAction.RELEASE, backlog(), held=True, begin_s=0, until_s=40) is None
        assert (
            first_time_of(idle, IdleAction.RELEASE, backlog(records), held=True, begin_s=40, until_s=100)
            == 40 + after_s
        )


def test_a_hold_has_a_minimum_duration() -> None:
    assert (
        first_time_of(
            IdleDetector(RULE), IdleAction.RELEASE, backlog(5000), held=True, begin_s=0, until_s=100
        )
        == 30
    )


@given(st.lists(st.tuples(st.integers(1, 8), st.sampled_from([None, 0, 1, 150])), max_size=150))
def test_a_trickle_does_not_toggle_holds(stream: list[tuple[int, int | None]]) -> None:
    idle, held, now_s, end = IdleDetector(RULE), False, 0.0, 0
    changed_s = -RULE.min_held_s
    for gap_s, unread in stream:
        now_s, end = now_s + gap_s, end + (unread or 0)
        advice = idle.observe(now_s, None if unread is None else backlog(unread, end), held=held)
        if advice is not IdleAction.NOTHING:
            min_s = RULE.min_held_s if held else RULE.hold_s
            assert now_s - changed_s >= min_s and held == (advice is IdleAction.RELEASE)
            held, changed_s = not held, now_s


# `BacklogProbe` counts unread records without a worker. Transaction markers do not count.


A, B, LABELS = ("samples", 0), ("samples", 1), ("corrections", 0)


class FakeLog:
    """A fake `KafkaConsumer` for a `BacklogProbe`. Offsets in `records` are records; all other offsets below
    `ends` are transaction markers."""

    def __init__(self, ends: dict[Partition, int], records: Collection[tuple[Partition, int]] = ()) -> None:
        self.partitions, self.ends, self.records = tuple(ends), ends, set(records)
        self.oldest = dict.fromkeys(ends, 0)
        self.away = self.hangs = False
        self.num_seeks = 0
        self.positions: dict[Partition, int] = {}
        self.paused: set[Partition] = set()

    def bounds(self, *partitions: Partition) -> Mapping[Partition, tuple[int, int]]:
        if self.away:
            raise UnavailableError("Kafka is away")
        return {p: (self.oldest[p], self.ends[p]) for p in partitions}

    def seek(self, progress: Mapping[Partition, int]) -> None:
        self.num_seeks += 1
        assert progress.keys() == set(self.partitions) and not self.paused
        self.positions = dict(progress)

    def pause(self, partitions: Collection[Partition]) -> None:
        self.paused = set(partitions)

    def poll(self, max_records: int, timeout_s: float) -> list[Record]:
        if self.hangs:
            return []
        unread = sorted((p, at) for p, at in self.records if self.positions[p] <= at < self.ends[p])
        if unread:
            return [Record(*unread[0][0], unread[0][1], 0, b"", b"")]
        self.positions = dict(self.ends)
        return []

    def passed(self, partition: Partition) -> int:
        return self.positions[partition]


def probe_of(log: FakeLog) -> BacklogProbe:
    return BacklogProbe(log)  # type: ignore[arg-type]


def counts(probe: BacklogProbe, committed: Mapping[Partition, int], times: int = 3) -> list[int | None]:
    """Count the unread records several times."""
    backlogs = [probe.count(dict(committed)) for _ in range(times)]
    return [None if unread is None else unread.records for unread in backlogs]


def test_backlog_is_summed_over_all_partitions() -> None:
    log = FakeLog({A: 5000, B: 4000, LABELS: 9})
    assert counts(probe_of(log), {A: 1000, B: 4000}) == [4000, 4000, 4000]
    assert log.num_seeks == 0, "so many offsets cannot all be markers, so nothing is read"


def test_corrections_count_only_if_they_are_trained() -> None:
    log = FakeLog({A: 5, LABELS: 9}, {(LABELS, 8)})
    assert counts(probe_of(log), {A: 5}) == [0, 0, 0]
    assert counts(probe_of(log), {A: 5, LABELS: 6}) == [3, 3, 3]


def test_before_the_first_commit_the_whole_log_is_backlog() -> None:
    log = FakeLog({A: 12}, {(A, 11)})
    log.oldest[A] = 10
    assert counts(probe_of(log), {}) == [2, 2, 2]


def test_deleted_records_are_not_backlog() -> None:
    log = FakeLog({A: 50})
    log.oldest[A] = 50
    assert counts(probe_of(log), {A: 20}) == [0, 0, 0]


def test_transaction_markers_are_read_once_and_do_not_count() -> None:
    log = FakeLog({A: 11, B: 4})
    probe = probe_of(log)
    assert counts(probe, {A: 10, B: 3}) == [2, 0, 0] and log.num_seeks == 1
    assert log.paused == {A, B}, "the consumer must not fetch records between counts"
    log.ends[A] = 13
    log.records = {(A, 11)}
    assert counts(probe, {A: 10, B: 3}) == [2, 2, 2] and log.num_seeks == 2


def test_a_log_whose_end_went_back_is_read_again() -> None:
    log = FakeLog({A: 11})
    probe = probe_of(log)
    assert counts(probe, {A: 8}) == [3, 0, 0]
    log.ends[A], log.records = 9, {(A, 8), (A, 9), (A, 10)}
    assert counts(probe, {A: 8}) == [1, 1, 1]
    log.ends[A] = 11
    assert counts(probe, {A: 8}) == [3, 3, 3]


def test_backlog_is_unknown_when_kafka_is_unavailable() -> None:
    log = FakeLog({A: 11})
    probe = probe_of(log)
    log.hangs = True
    assert counts(probe, {A: 10}) == [1, None, None]
    log.away = True
    assert counts(probe, {A: 11}, 1) == [None]
    log.away = log.hangs = False
    assert counts(probe, {A: 10}) == [0, 0, 0]


@pytest.mark.parametrize(("is_record", "expected"), [(True, [1, 1, 1]), (False, [1, 0, 0])])
def test_the_backlog_probe_works_with_the_kafka_consumer(is_record: bool, expected: list[int]) -> None:
    """Offset 9 is committed. Offset 10 is a record, or a marker, which only the end of the partition
    reveals."""
    kafka = FakeConsumer(oldest=0, newest=11)
    reader = KafkaConsumer(kafka, ConsumerOptions(partitions=(A,)))  # type: ignore[arg-type]
    kafka.add_batch(FakeMessage(A, 10) if is_record else end(A, 11))
    assert counts(BacklogProbe(reader), {A: 10}) == expected
    assert kafka.assigned == {A: 10} and kafka.paused == {A}
