"""History by two workers in large batches, then the stream by one, through kills at any moment: exactly once,
one switch, and in exact mode bit-equal to a run that nothing disturbs.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.trainer import samples
from tests.trainer.control.test_fleet_commit import LIVE_NUMBERS
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

NUMBERS = [n for n in range(1, 49) if n % 2 == 0 or n <= 39]  # 24 in partition 0, 20 in partition 1
EXPORT = {0: 16, 1: 12}  # behind it whole chunks of 4 are left, as many in each partition


class Watched(Simulation):
    """Keeps which phases the controllers were in."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.phases: list[bool] = []

    def round(self) -> None:
        super().round()
        it = self.controller and self.controller.coordinator
        if it and it.incarnation and self.phases[-1:] != [it.phases.is_initial]:
            self.phases.append(it.phases.is_initial)

    def assert_switched_once(self, initial_workers: int, workers: int) -> None:
        """No commit has something of both phases."""
        assert self.phases == [True, False]
        for commit in self.commits.values():
            at = {number: offset for (_, number), offset in commit.offsets.items()}
            of_history = all(at[number] <= export for number, export in self.export.items())
            assert of_history or all(at[number] >= export for number, export in self.export.items()), (
                commit.name
            )
            assert len(commit.workers) == (initial_workers if of_history else workers), commit.name


def phased(**more: Any) -> Watched:
    return Watched(samples.records(NUMBERS), **{**PHASED, "commit_interval_s": 0.5, "export": EXPORT, **more})


@functools.cache
def undisturbed(initial_workers: int = 2, real_shards: bool = False) -> dict[str, bytes]:
    simulation = phased(initial_workers=initial_workers, real_shards=real_shards)
    simulation.run()
    simulation.assert_switched_once(initial_workers, 1)
    return simulation.bits()


def test_every_record_is_trained_once_in_larger_batches_first() -> None:
    simulation = phased()
    simulation.run()
    simulation.assert_applied_once(NUMBERS)
    simulation.assert_switched_once(2, 1)
    assert simulation.last.offsets == {("samples", 0): 24, ("samples", 1): 20}
    # 16 and 12 records in 3 parts each: 5, 5, 6 and 4, 4, 4 in chunks of 6; then 2 chunks of 4 each
    assert simulation.last.step == 3 + 4
    assert simulation.controller is not None and simulation.controller.coordinator.num_rollbacks == 0


def test_g11_with_equal_batches_and_one_worker_history_in_units_is_trained_as_without_them() -> None:
    numbers = list(range(1, 49))
    plain = Simulation(samples.records(numbers), exact=True).run()
    units = Watched(
        samples.records(numbers), exact=True, initial_workers=1, unit_records=8, export={0: 16, 1: 16}
    ).run()
    assert units.bits() == plain.bits()
    assert (units.last.offsets, units.last.step) == (plain.last.offsets, plain.last.step)


@pytest.mark.parametrize(
    ("moment", "victim"),
    every(3, moments_and_victims(SWITCH_MOMENTS, [CONTROLLER, "worker 0", "worker 1", "shard 0"])),
    ids=str,
)
def test_g2_g11_a_kill_in_the_middle_of_the_switch_changes_nothing(
    moment: tuple[str, str, str], victim: str
) -> None:
    simulation = phased(kills=[kill_in_switch(moment, victim)])
    simulation.run()
    assert simulation.killed == [victim]
    assert simulation.bits() == undisturbed()
    simulation.assert_applied_once(NUMBERS)
    simulation.assert_switched_once(2, 1)


def schedule(seed: int) -> None:
    """Every fourth on the parameter server's own shards, every fifth with one worker in both phases, every
    seventh with a second controller; two of three with faults that last."""
    workers, real = 1 if seed % 5 == 0 else 2, seed % 4 == 0
    simulation = phased(initial_workers=workers, real_shards=real, **drawn(seed, workers))
    run_schedule(simulation, seed)
    assert simulation.bits() == undisturbed(workers, real), f"--seed {seed}"
    simulation.assert_switched_once(workers, 1)
    if not real:
        simulation.assert_applied_once(NUMBERS)


def test_g2_g11_a_schedule_of_both_phases_by_its_seed(pytestconfig: pytest.Config) -> None:
    schedule(pytestconfig.getoption("--seed", default=0))


@pytest.mark.parametrize("drawn_from", seeds(10, chaos=1000), ids=str)
def test_g2_g11_both_phases_through_kills_at_any_moment_are_bit_equal_to_undisturbed_ones(
    drawn_from: range,
) -> None:
    for seed in drawn_from:
        schedule(seed)


@pytest.mark.parametrize("seed", every(2, range(500, 506)))
def test_g2_live_history_in_disorder_is_trained_once(seed: int) -> None:
    simulation = Watched(
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
    simulation.assert_switched_once(2, 1)
