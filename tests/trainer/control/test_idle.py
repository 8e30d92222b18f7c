"""Training is held when there is surely nothing to read, and goes on when there is; between the two nothing
flaps."""

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


def some(records: int = 0, end: int = 7) -> Backlog:
    return Backlog(records, {P: end})


def first(
    idle: IdleDetector,
    advice: IdleAction,
    unread: Backlog | None,
    *,
    held: bool,
    begin_s: float,
    until_s: float,
) -> float | None:
    """When it is given first, looking each second; None = not before `until_s`."""
    for second in itertools.count():
        now_s = begin_s + second
        if now_s >= until_s:
            return None
        if idle.observe(now_s, unread, held=held) is advice:
            return now_s
    raise AssertionError


def test_training_is_held_after_the_configured_quiet_time() -> None:
    assert first(IdleDetector(RULE), IdleAction.HOLD, some(), held=False, begin_s=100, until_s=300) == 160


@pytest.mark.parametrize("unread", [some(1), some(5000), UNKNOWN])
def test_unread_records_or_an_unknown_backlog_never_hold(unread: Backlog | None) -> None:
    assert first(IdleDetector(RULE), IdleAction.HOLD, unread, held=False, begin_s=0, until_s=1000) is None


def test_zero_disables_idle_holds() -> None:
    assert (
        first(IdleDetector(IdleRule(hold_s=0)), IdleAction.HOLD, some(), held=False, begin_s=0, until_s=1000)
        is None
    )


def test_records_committed_between_two_readings_restart_the_quiet_time() -> None:
    idle = IdleDetector(RULE)
    assert first(idle, IdleAction.HOLD, some(end=7), held=False, begin_s=0, until_s=50) is None
    assert first(idle, IdleAction.HOLD, some(end=8), held=False, begin_s=50, until_s=300) == 110


@pytest.mark.parametrize("unknown_s", [1, 20])
def test_quiet_time_without_readings_does_not_count(unknown_s: int) -> None:
    idle = IdleDetector(RULE)
    assert first(idle, IdleAction.HOLD, some(), held=False, begin_s=0, until_s=50) is None
    assert first(idle, IdleAction.HOLD, UNKNOWN, held=False, begin_s=50, until_s=50 + unknown_s) is None
    assert (
        first(idle, IdleAction.HOLD, some(), held=False, begin_s=50 + unknown_s, until_s=300)
        == 110 + unknown_s
    )


@pytest.mark.parametrize("jump_s", [-7200.0, 7200.0])
def test_a_clock_jump_causes_no_hold(jump_s: float) -> None:
    idle = IdleDetector(RULE)
    assert first(idle, IdleAction.HOLD, some(), held=False, begin_s=10_000, until_s=10_030) is None
    begin_s = 10_030 + jump_s
    assert (
        first(idle, IdleAction.HOLD, some(), held=False, begin_s=begin_s, until_s=begin_s + 300)
        == begin_s + 60
    )


def test_enough_records_end_the_hold_at_once_and_few_when_they_have_waited() -> None:
    for records, after_s in ((100, 0), (1, 10)):
        idle = IdleDetector(RULE)
        assert first(idle, IdleAction.RELEASE, some(), held=True, begin_s=0, until_s=40) is None
        assert (
            first(idle, IdleAction.RELEASE, some(records), held=True, begin_s=40, until_s=100) == 40 + after_s
        )


def test_a_hold_has_a_minimum_duration() -> None:
    assert first(IdleDetector(RULE), IdleAction.RELEASE, some(5000), held=True, begin_s=0, until_s=100) == 30


@given(st.lists(st.tuples(st.integers(1, 8), st.sampled_from([None, 0, 1, 150])), max_size=150))
def test_a_trickle_does_not_toggle_holds(stream: list[tuple[int, int | None]]) -> None:
    idle, held, now_s, end = IdleDetector(RULE), False, 0.0, 0
    changed_s = -RULE.min_held_s
    for gap_s, unread in stream:
        now_s, end = now_s + gap_s, end + (unread or 0)
        advice = idle.observe(now_s, None if unread is None else some(unread, end), held=held)
        if advice is not IdleAction.NOTHING:
            min_s = RULE.min_held_s if held else RULE.hold_s
            assert now_s - changed_s >= min_s and held == (advice is IdleAction.RELEASE)
            held, changed_s = not held, now_s


# What is to be read is seen without a worker, and markers of transactions aren't taken for it


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


def counts(probed: BacklogProbe, committed: Mapping[Partition, int], looks: int = 3) -> list[int | None]:
    seen = [probed.count(dict(committed)) for _ in range(looks)]
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
    probed = probe(log)
    assert counts(probed, {A: 10, B: 3}) == [2, 0, 0] and log.num_seeks == 1
    assert log.held == {A, B}, "nothing is fetched for nobody"
    log.ends[A] = 13
    log.records = {(A, 11)}
    assert counts(probed, {A: 10, B: 3}) == [2, 2, 2] and log.num_seeks == 2


def test_a_log_whose_end_went_back_is_read_again() -> None:
    log = Offsets({A: 11})
    probed = probe(log)
    assert counts(probed, {A: 8}) == [3, 0, 0]
    log.ends[A], log.records = 9, {(A, 8), (A, 9), (A, 10)}
    assert counts(probed, {A: 8}) == [1, 1, 1]
    log.ends[A] = 11
    assert counts(probed, {A: 8}) == [3, 3, 3]


def test_backlog_is_unknown_when_kafka_is_unavailable() -> None:
    log = Offsets({A: 11})
    probed = probe(log)
    log.hangs = True
    assert counts(probed, {A: 10}) == [1, None, None]
    log.away = True
    assert counts(probed, {A: 11}, 1) == [None]
    log.away = log.hangs = False
    assert counts(probed, {A: 10}) == [0, 0, 0]


@pytest.mark.parametrize(("is_record", "expected"), [(True, [1, 1, 1]), (False, [1, 0, 0])])
def test_the_kafka_consumer_implements_the_sample_log(is_record: bool, expected: list[int]) -> None:
    """Offset 9 is committed; 10 is a record, or a marker that only the end of the partition tells of."""
    kafka = FakeConsumer(oldest=0, newest=11)
    reader = KafkaConsumer(kafka, ConsumerOptions(partitions=(A,)))  # type: ignore[arg-type]
    kafka.add_batch(FakeMessage(A, 10) if is_record else end(A, 11))
    assert counts(BacklogProbe(reader), {A: 10}) == expected
    assert kafka.assigned == {A: 10} and kafka.paused == {A}
