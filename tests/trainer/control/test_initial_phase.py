"""The initial phase and the switch to the stream, with kills at any moment.

Two workers train old samples in large batches; then one worker trains the stream. The old samples are a range
of the topic (`history`) or sessions of the warehouse (`table`). Every sample is trained once, there is one
switch at the right offsets, and in exact mode the results equal those of an undisturbed run bit for bit
(guarantees G2 and G11 of docs/architecture.md).
"""

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
    every_nth,
    kill_in_switch,
    moments_and_victims,
    random_kills,
    random_options,
    run_schedule,
    seed_ranges,
)
from tests.trainer.simulator import Simulation
from tests.warehouse.memory_table import MemoryTable, table_of
from trainer.batch_source import BatchSource, NewestIds
from trainer.sessions.session_source import PhasedSource, SessionSource

NUMBERS = [n for n in range(1, 49) if n % 2 == 0 or n <= 39]  # 24 in partition 0, 20 in partition 1
# End offsets of the initial phase. The rest of each partition is 2 chunks of 4.
ENDS = {0: 16, 1: 12}
WITH_DUPLICATES = [*range(1, 25), 20, 23, *range(25, 41), 24, 3]
TWO_SESSIONS = ({0: 13, 1: 12}, {0: 18, 1: 18})


class FromTopic(Simulation):
    """The initial phase is a range of the topic. `phases`: whether the controller was in the initial phase,
    one entry per change."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.phases: list[bool] = []

    def round(self) -> None:
        super().round()
        coordinator = self.controller and self.controller.coordinator
        if coordinator and coordinator.incarnation and self.phases[-1:] != [coordinator.phases.is_initial]:
            self.phases.append(coordinator.phases.is_initial)

    def assert_switched(self, initial_workers: int, workers: int) -> None:
        """Check that there was one switch, and that no commit holds progress of both phases."""
        assert self.phases == [True, False]
        for commit in self.commits.values():
            at = {number: offset for (_, number), offset in commit.offsets.items()}
            of_history = all(at[number] <= export for number, export in self.export.items())
            assert of_history or all(at[number] >= export for number, export in self.export.items()), (
                commit.name
            )
            assert len(commit.workers) == (initial_workers if of_history else workers), commit.name


class FromTable(Simulation):
    """The initial phase is one session per version of a table. Version v holds the records below `ends[v]`; a
    later session reads only what its version added."""

    def __init__(
        self, records: list[Record], *, ends: tuple[dict[int, int], ...] = (ENDS,), **more: Any
    ) -> None:
        super().__init__(records, from_table=True, **more)
        self.ends = ends
        contents = [[r for r in records if r.offset < end.get(r.partition, 0)] for end in ends]
        self.tables: list[MemoryTable] = [
            table_of(rows, rows_of_file=5 + 3 * v, seed=7) for v, rows in enumerate(contents)
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
        def open_session(table_input: TableInput) -> BatchSource:
            table, spec = self.tables[table_input.version], SessionSpec.of(table_input.spec)
            opened = OpenSession(spec, table.files, 4)
            assert opened.order.rows == table_input.rows
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
        controller = self.controller
        if controller and len(self.tables) > 1 and (session := controller.session_now()[1]):
            controller.set_following(self.session_of(1, self.ends[0]) if session.version == 0 else None)

    def assert_switched(self, initial_workers: int, workers: int) -> None:
        """Check that commits read the sessions in order, and then the stream from the end of the last
        version."""
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
both_kinds = pytest.mark.parametrize("kind", SIMULATIONS)


def phased(kind: str, numbers: list[int] = NUMBERS, **more: Any) -> FromTopic | FromTable:
    """Create a simulation whose initial phase is of this kind. It has not run yet."""
    options = {**PHASED, "commit_interval_s": 0.5, **more}
    simulation: FromTopic | FromTable = SIMULATIONS[kind](samples.records(numbers), **options)
    return simulation


@functools.cache
def undisturbed(kind: str, initial_workers: int = 2, real_shards: bool = False) -> FromTopic | FromTable:
    simulation = phased(kind, initial_workers=initial_workers, real_shards=real_shards)
    simulation.run()
    simulation.assert_switched(initial_workers, 1)
    return simulation


@both_kinds
def test_every_record_is_trained_once_in_larger_batches_first(kind: str) -> None:
    simulation = undisturbed(kind)
    simulation.assert_applied_once(NUMBERS)
    assert simulation.last.offsets == {("samples", 0): 24, ("samples", 1): 20}
    # Initial phase: 16 and 12 records in 3 units each (5, 5, 6 and 4, 4, 4), each of one chunk; each worker
    # trains one unit in a step. Then the stream: 2 chunks of 4 in each partition.
    assert simulation.last.step == 3 + 4
    assert simulation.controller is not None and simulation.controller.coordinator.num_rollbacks == 0


@both_kinds
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


def test_g11_with_equal_batches_and_one_worker_units_of_history_change_no_result() -> None:
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


def test_samples_archived_during_a_session_become_another_session() -> None:
    simulation = phased("table", ends=({0: 8, 1: 8}, ENDS))
    simulation.run()
    simulation.assert_applied_once(NUMBERS)
    simulation.assert_switched(2, 1)
    assert {commit.input.version for commit in simulation.commits.values() if commit.input} == {0, 1}


def test_g2_a_duplicate_after_the_archived_part_is_skipped() -> None:
    simulation = phased("table", WITH_DUPLICATES, exact=False, ends=TWO_SESSIONS[:1])
    simulation.run()
    simulation.assert_applied_once(WITH_DUPLICATES)


def test_g2_a_sample_in_two_sessions_is_trained_once() -> None:
    simulation = phased("table", WITH_DUPLICATES, exact=False, ends=TWO_SESSIONS)
    simulation.run()
    simulation.assert_applied_once(WITH_DUPLICATES)
    simulation.assert_switched(2, 1)


@both_kinds
@pytest.mark.parametrize(
    ("moment", "victim"),
    every_nth(6, moments_and_victims(SWITCH_MOMENTS, [CONTROLLER, "worker 0", "worker 1", "shard 0"])),
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


def run_seed(kind: str, seed: int) -> None:
    """Run both phases. Every fourth seed uses real shards, every fifth has one worker in both phases, every
    seventh starts a second controller, and two of three have a fault schedule."""
    workers, real = 1 if seed % 5 == 0 else 2, seed % 4 == 0
    simulation = phased(kind, initial_workers=workers, real_shards=real, **random_options(seed, workers))
    run_schedule(simulation, seed)
    assert simulation.bits() == undisturbed(kind, workers, real).bits(), f"--seed {seed}"
    simulation.assert_switched(workers, 1)
    if not real:
        simulation.assert_applied_once(NUMBERS)


@both_kinds
def test_g2_g11_the_schedule_of_the_seed_option_in_both_phases(
    kind: str, pytestconfig: pytest.Config
) -> None:
    run_seed(kind, pytestconfig.getoption("--seed", default=0))


@both_kinds
@pytest.mark.parametrize("seeds", seed_ranges(5, first=1, chaos=1000), ids=str)
def test_g2_g11_both_phases_through_kills_at_any_moment_are_bit_equal_to_undisturbed_ones(
    kind: str, seeds: range
) -> None:
    for seed in seeds:
        run_seed(kind, seed)


@pytest.mark.parametrize("seed", every_nth(3, range(500, 506)))
def test_g2_live_history_with_message_faults_and_kills_is_trained_once(seed: int) -> None:
    simulation = FromTopic(
        samples.records(LIVE_NUMBERS),
        initial_workers=2,
        initial_batch_requests=8,
        unit_records=3,
        export={0: 8, 1: 9},
        seed=seed,
        kills=random_kills(seed, 2),
    )
    simulation.run_with_optional_kills()
    simulation.assert_applied_once(LIVE_NUMBERS)
    simulation.assert_switched(2, 1)


@pytest.mark.parametrize("seeds", seed_ranges(5, first=500, chaos=1000), ids=str)
def test_g2_two_sessions_and_the_stream_with_message_faults_and_kills_train_each_sample_once(
    seeds: range,
) -> None:
    for seed in seeds:
        simulation = phased(
            "table",
            WITH_DUPLICATES,
            exact=False,
            seed=seed,
            kills=random_kills(seed, 2),
            ends=TWO_SESSIONS,
            unit_records=5,
        )
        simulation.run_with_optional_kills()
        simulation.assert_applied_once(WITH_DUPLICATES)
        simulation.assert_switched(2, 1)
