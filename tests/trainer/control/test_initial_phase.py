"""The initial phase by two workers in large batches, then the stream by one, through kills at any moment:
each sample once, one switch at the right offsets, and in exact mode bit-equal to a run that nothing disturbs.
What comes first is a range of the topic (`history`) or sessions of the warehouse (`table`)."""

from __future__ import annotations

import functools
import logging
from typing import Any

import pytest

from roostream.runtime.kafka.topics import SAMPLES
from roostream.runtime.work_unit import TableInput
from roostream.warehouse.sessions.session import SessionSpec
from roostream.warehouse.sessions.session_rows import LocalSessionRows, OpenSession, recent_sample_ids
from roostream.wire.records import Record
from tests.trainer import samples
from tests.trainer.control.test_fleet_commit import LIVE_NUMBERS
from tests.trainer.loops import PARTITIONS
from tests.trainer.network import CONTROLLER
from tests.trainer.schedules import (
    PHASED,
    SWITCH_MOMENTS,
    drawn,
    every,
    kill_in_switch,
    kills_of,
    moments_and_victims,
    run_schedule,
    seeds,
)
from tests.trainer.simulator import Simulation
from tests.warehouse.memory_table import MemoryTable, table_of
from trainer.batch_source import BatchSource, NewestIds
from trainer.sessions.session_source import PhasedSource, SessionSource

NUMBERS = [n for n in range(1, 49) if n % 2 == 0 or n <= 39]  # 24 in partition 0, 20 in partition 1
ENDS = {0: 16, 1: 12}  # of what comes first; behind it whole chunks of 4 are left, as many in each partition
AGAIN = [*range(1, 25), 20, 23, *range(25, 41), 24, 3]  # some samples come twice
TWO_SESSIONS = ({0: 13, 1: 12}, {0: 18, 1: 18})


class FromTopic(Simulation):
    """Keeps which phases the controllers were in."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.phases: list[bool] = []

    def round(self) -> None:
        super().round()
        it = self.controller and self.controller.coordinator
        if it and it.incarnation and self.phases[-1:] != [it.phases.is_initial]:
            self.phases.append(it.phases.is_initial)

    def assert_switched(self, initial_workers: int, workers: int) -> None:
        """No commit has something of both phases."""
        assert self.phases == [True, False]
        for commit in self.commits.values():
            at = {number: offset for (_, number), offset in commit.offsets.items()}
            of_history = all(at[number] <= export for number, export in self.export.items())
            assert of_history or all(at[number] >= export for number, export in self.export.items()), (
                commit.name
            )
            assert len(commit.workers) == (initial_workers if of_history else workers), commit.name


class FromTable(Simulation):
    """Versions of a table as the records of `samples` below `ends` of each; a session of the newest, and of
    what came behind."""

    def __init__(
        self, records: list[Record], *, ends: tuple[dict[int, int], ...] = (ENDS,), **more: Any
    ) -> None:
        super().__init__(records, from_table=True, **more)
        self.ends = ends
        its = [[r for r in records if r.offset < end.get(r.partition, 0)] for end in ends]
        self.tables: list[MemoryTable] = [
            table_of(some, rows_of_file=5 + 3 * v, seed=7) for v, some in enumerate(its)
        ]
        self.horizon_ms = 3_600_000

    def session_of(self, version: int, begins: dict[int, int]) -> TableInput:
        spec = SessionSpec(table="memory", version=version, from_offsets=begins, shuffle_seed=3)
        opened = OpenSession(spec, self.tables[version].files, 4)
        return TableInput(
            table="memory",
            version=version,
            digest=spec.digest,
            spec=spec.plain(),
            rows=opened.order.rows,
            begins={(SAMPLES, number): at for number, at in begins.items()},
            ends={(SAMPLES, number): at for number, at in self.ends[version].items()},
            topics={SAMPLES: "id"},
        )

    def _open_session(self) -> TableInput | None:
        return self.session_of(0, {})

    def _source(self, stream: BatchSource) -> BatchSource:
        def open_session(told: TableInput) -> BatchSource:
            table, spec = self.tables[told.version], SessionSpec.of(told.spec)
            opened = OpenSession(spec, table.files, 4)
            assert opened.order.rows == told.rows
            empty = table.empty()
            return SessionSource(
                opened.order,
                LocalSessionRows(opened, table),
                empty,
                self.clock,
                partitions=PARTITIONS,
                newest=lambda number: NewestIds(*recent_sample_ids(opened, table, number, self.horizon_ms)),
            )

        return PhasedSource(stream, open_session)

    def round(self) -> None:
        super().round()
        it = self.controller
        if it and len(self.tables) > 1 and (session := it.session_now()[1]):
            it.set_following(self.session_of(1, self.ends[0]) if session.version == 0 else None)

    def assert_switched(self, initial_workers: int, workers: int) -> None:
        """One commit after the other: sessions in their order, then the stream from where the last version
        ended."""
        inputs = [commit.input.version if commit.input else -1 for _, commit in sorted(self.commits.items())]
        assert sorted(inputs, key=lambda version: version if version >= 0 else 99) == inputs
        first = next(commit for _, commit in sorted(self.commits.items()) if commit.input is None)
        assert {number: at for (_, number), at in first.offsets.items()} == self.ends[-1]
        assert len(first.workers) == initial_workers
        for commit in self.commits.values():
            begins = {number: at for (_, number), at in commit.offsets.items()}
            if commit.input:
                assert begins == (
                    self.ends[commit.input.version - 1] if commit.input.version else {0: 0, 1: 0}
                )
            elif commit is not first:
                assert len(commit.workers) == workers


SIMULATIONS: dict[str, Any] = {"history": functools.partial(FromTopic, export=ENDS), "table": FromTable}
first = pytest.mark.parametrize("kind", SIMULATIONS)


def phased(kind: str, numbers: list[int] = NUMBERS, **more: Any) -> FromTopic | FromTable:
    """A simulation that trains `kind` first; it has not run."""
    options = {**PHASED, "commit_interval_s": 0.5, **more}
    simulation: FromTopic | FromTable = SIMULATIONS[kind](samples.records(numbers), **options)
    return simulation


@functools.cache
def undisturbed(kind: str, initial_workers: int = 2, real_shards: bool = False) -> FromTopic | FromTable:
    simulation = phased(kind, initial_workers=initial_workers, real_shards=real_shards)
    simulation.run()
    simulation.assert_switched(initial_workers, 1)
    return simulation


@first
def test_every_record_is_trained_once_in_larger_batches_first(kind: str) -> None:
    simulation = undisturbed(kind)
    simulation.assert_applied_once(NUMBERS)
    assert simulation.last.offsets == {("samples", 0): 24, ("samples", 1): 20}
    # 16 and 12 records in 3 parts each: 5, 5, 6 and 4, 4, 4 in chunks of 6; then 2 chunks of 4 each
    assert simulation.last.step == 3 + 4
    assert simulation.controller is not None and simulation.controller.coordinator.num_rollbacks == 0


@first
def test_the_planned_switch_to_the_stream_logs_no_warning(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    simulation = phased(kind)
    simulation.run()
    simulation.assert_switched(2, 1)
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING] == []
    assert "1 workers continue with the stream" in caplog.text
    assert "worker 1 stands by: fewer train now" in caplog.text


def test_g11_with_equal_batches_and_one_worker_history_in_units_is_trained_as_without_them() -> None:
    numbers = list(range(1, 49))
    plain = Simulation(samples.records(numbers), exact=True).run()
    units = FromTopic(
        samples.records(numbers), exact=True, initial_workers=1, unit_records=8, export={0: 16, 1: 16}
    ).run()
    assert units.bits() == plain.bits()
    assert (units.last.offsets, units.last.step) == (plain.last.offsets, plain.last.step)


def test_without_initial_workers_the_stream_s_workers_train_the_warehouse() -> None:
    simulation = phased("table", initial_workers=0)
    simulation.run()
    simulation.assert_applied_once(NUMBERS)
    simulation.assert_switched(1, 1)


def test_samples_archived_meanwhile_are_a_further_session() -> None:
    simulation = phased("table", ends=({0: 8, 1: 8}, ENDS))
    simulation.run()
    simulation.assert_applied_once(NUMBERS)
    simulation.assert_switched(2, 1)
    assert {commit.input.version for commit in simulation.commits.values() if commit.input} == {0, 1}


def test_g2_a_duplicate_after_the_archived_part_is_skipped() -> None:
    simulation = phased("table", AGAIN, exact=False, ends=TWO_SESSIONS[:1])
    simulation.run()
    simulation.assert_applied_once(AGAIN)


def test_g2_a_sample_in_two_sessions_is_trained_once() -> None:
    simulation = phased("table", AGAIN, exact=False, ends=TWO_SESSIONS)
    simulation.run()
    simulation.assert_applied_once(AGAIN)
    simulation.assert_switched(2, 1)


@first
@pytest.mark.parametrize(
    ("moment", "victim"),
    every(6, moments_and_victims(SWITCH_MOMENTS, [CONTROLLER, "worker 0", "worker 1", "shard 0"])),
    ids=str,
)
def test_g2_g11_a_kill_in_the_middle_of_the_switch_changes_nothing(
    kind: str, moment: tuple[str, str, str], victim: str
) -> None:
    simulation = phased(kind, kills=[kill_in_switch(moment, victim)])
    simulation.run()
    assert simulation.killed == [victim]
    assert simulation.bits() == undisturbed(kind).bits()
    simulation.assert_applied_once(NUMBERS)
    simulation.assert_switched(2, 1)


def schedule(kind: str, seed: int) -> None:
    """Every fourth on the parameter server's own shards, every fifth with one worker in both phases, every
    seventh with a second controller; two of three with faults that last."""
    workers, real = 1 if seed % 5 == 0 else 2, seed % 4 == 0
    simulation = phased(kind, initial_workers=workers, real_shards=real, **drawn(seed, workers))
    run_schedule(simulation, seed)
    assert simulation.bits() == undisturbed(kind, workers, real).bits(), f"--seed {seed}"
    simulation.assert_switched(workers, 1)
    if not real:
        simulation.assert_applied_once(NUMBERS)


@first
def test_g2_g11_a_schedule_of_both_phases_by_its_seed(kind: str, pytestconfig: pytest.Config) -> None:
    schedule(kind, pytestconfig.getoption("--seed", default=0))


@first
@pytest.mark.parametrize("drawn_from", seeds(5, first=1, chaos=1000), ids=str)
def test_g2_g11_both_phases_through_kills_at_any_moment_are_bit_equal_to_undisturbed_ones(
    kind: str, drawn_from: range
) -> None:
    for seed in drawn_from:
        schedule(kind, seed)


@pytest.mark.parametrize("seed", every(3, range(500, 506)))
def test_g2_live_history_in_disorder_is_trained_once(seed: int) -> None:
    simulation = FromTopic(
        samples.records(LIVE_NUMBERS),
        initial_workers=2,
        initial_batch_requests=8,
        unit_records=3,
        export={0: 8, 1: 9},
        seed=seed,
        kills=kills_of(seed, 2),
    )
    simulation.run_as_far_as_kills_go()
    simulation.assert_applied_once(LIVE_NUMBERS)
    simulation.assert_switched(2, 1)


@pytest.mark.parametrize("drawn_from", seeds(5, first=500, chaos=1000), ids=str)
def test_g2_two_sessions_and_the_stream_in_disorder_train_each_sample_once(drawn_from: range) -> None:
    """Live samples, some again, two sessions and the stream."""
    for seed in drawn_from:
        simulation = phased(
            "table", AGAIN, exact=False, seed=seed, kills=kills_of(seed, 2), ends=TWO_SESSIONS, unit_records=5
        )
        simulation.run_as_far_as_kills_go()
        simulation.assert_applied_once(AGAIN)
        simulation.assert_switched(2, 1)
