"""The simulation is the arithmetic where nothing is random, and its queues are those of a loop over events."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from roostream.cli.plan import measured
from roostream.cli.plan.simulation import Scene, TrainingSimulation, served
from roostream.cli.plan.sizing import Costs, Load

CALM = Scene(workers=1, shards=1, noise=0.0, straggles=0.0, lost_after_s=1e15, steps=3, hours=0.05)


def costs(**load: float) -> Costs:
    return Costs(
        Load(**{"requests_per_s": 1e6, "rows": 10**9, "batch_requests": 512} | load), measured.read()
    )  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(5))
def test_calls_are_served_in_the_order_in_which_they_come(seed: int) -> None:
    rng = np.random.default_rng(seed)
    arrived_WS, takes_WS = rng.random((7, 3)), rng.random((7, 3)) * 0.3
    expected_WS = np.empty_like(arrived_WS)
    for s in range(3):
        free_s = 0.0
        for w in np.argsort(arrived_WS[:, s]):
            free_s = max(free_s, arrived_WS[w, s]) + takes_WS[w, s]
            expected_WS[w, s] = free_s
    assert np.allclose(served(arrived_WS, takes_WS), expected_WS)


def test_a_step_without_chance_is_the_sum_of_its_costs() -> None:
    at = costs()
    rows = 512 * at.load.touched
    expected_s = 512 * at.train_s + rows * at.row_s + 2 * (2 * at.call_s)
    assert TrainingSimulation(at, CALM).step() == pytest.approx(expected_s)


def test_two_workers_share_the_requests_and_pay_for_the_sum() -> None:
    one, two = (
        TrainingSimulation(costs(), dataclasses.replace(CALM, workers=workers)).step() for workers in (1, 2)
    )
    assert two < one and two > one / 2 + costs().turn_s


def test_more_shards_cost_more_calls_than_they_save() -> None:
    few, many = (
        TrainingSimulation(costs(), dataclasses.replace(CALM, workers=8, shards=shards)).step()
        for shards in (8, 1000)
    )
    assert many > few + 2 * 900 * costs().call_s


def test_a_straggler_among_many_is_waited_for_by_all() -> None:
    calm = dataclasses.replace(CALM, workers=64, shards=4)
    slow = dataclasses.replace(calm, straggles=0.05, straggle=10.0)
    assert (
        TrainingSimulation(costs(batch_requests=8192), slow).run().step_p50_s
        > 5 * TrainingSimulation(costs(batch_requests=8192), calm).run().step_p50_s
    )


def test_commits_pause_for_the_slowest_shards_copy() -> None:
    at = costs(commit_interval_s=10.0)
    simulation = TrainingSimulation(at, dataclasses.replace(CALM, hours=0.1))
    found = simulation.run()
    changed = 10.0 / simulation.step() * 512 * at.load.touched
    expected = (changed * at.freeze_row_s + at.of("cut_ms", 1e-3)) / 10.0
    assert found.paused_share == pytest.approx(expected, rel=0.15) and found.lost_share == 0.0


def test_a_lost_machine_costs_what_was_not_committed_and_the_way_back() -> None:
    calm, lossy = CALM, dataclasses.replace(CALM, lost_after_s=600.0, hours=6.0)
    kept, lost = TrainingSimulation(costs(), calm).run(), TrainingSimulation(costs(), lossy, seed=3).run()
    each_s = lossy.replaced_s + 1.7 + 5.0  # half of a commit's interval is trained again
    assert lost.lost_share == pytest.approx(each_s / (300.0 + each_s), rel=0.3)  # two machines
    assert lost.step_s * (1 - lost.lost_share) == pytest.approx(kept.step_s, rel=0.05)


def test_a_seed_gives_the_same_again_and_another_something_else() -> None:
    noisy = dataclasses.replace(CALM, noise=0.2, workers=3)
    first, again, other = (TrainingSimulation(costs(), noisy, seed).run() for seed in (1, 1, 2))
    assert first == again != other
