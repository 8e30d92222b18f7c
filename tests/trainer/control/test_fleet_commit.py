"""Several workers through kills, lost messages, torn sums and two controllers at once: exactly once, and in exact mode bit-equal.

A schedule is a seed: which processes die at which moments, what becomes of every message, which worker goes on first and how far.
`--seed N` replays one, `-m chaos` does thousands.
"""

from __future__ import annotations

import functools
import random

import pytest

from tests.trainer import samples
from tests.trainer.simulator import CONTROLLER, Kill, Simulation
from trainer.control.protocol import State

NUMBERS = list(range(1, 25))
LIVE_NUMBERS = [n for i in range(1, 25) for n in ((i, i - 4) if i > 4 and i % 5 == 0 else (i,))]  # some are emitted again
NUM_SCHEDULES, CHUNK, NUM_CHAOS = 200, 10, 3000


def moments(workers: int) -> list[tuple[str, str, str]]:
    names, both = [f"worker {i}" for i in range(workers)], ("before", "after")
    return [
        *((w, kind, when) for w in names for kind in ("restore", "start", "cut", "resume", "write", "commit") for when in both),
        *((s, kind, when) for s in ("shard 0", "shard 1") for kind in ("restore", "freeze", "write", "commit") for when in both),
        *((CONTROLLER, effect, when) for effect in ("claim", "link") for when in both),
        *((w, "push", "before") for w in names),
    ]


def kills_of(seed: int, workers: int) -> list[Kill]:
    draw = random.Random(seed)
    everyone = [CONTROLLER, "shard 0", "shard 1", *(f"worker {i}" for i in range(workers))]
    return [Kill(m, draw.choice(everyone), draw.randint(1, 4)) for m in draw.sample(moments(workers), draw.randint(0, 3))]


@functools.cache
def undisturbed(workers: int, real_shards: bool = False) -> dict[str, bytes]:
    return fleet(workers, real_shards=real_shards).run().bits()


def fleet(workers: int, **more: object) -> Simulation:
    return Simulation(samples.records(NUMBERS), exact=True, num_workers=workers, commit_interval_s=0.5, **more)  # type: ignore[arg-type]


def assert_applied_once(simulation: Simulation, numbers: list[int]) -> None:
    assert simulation.pushes() == dict.fromkeys(sorted(set(numbers)), 1)


def schedule(seed: int) -> None:
    """Two or three workers; every fifth on the parameter server's own shards; every seventh with a second controller."""
    workers, real = 2 + seed % 2, seed % 5 == 0
    simulation = fleet(workers, seed=seed, kills=kills_of(seed, workers), real_shards=real)
    if seed % 7 == 0:
        for _ in range(4 + seed % 9):
            simulation.round()
        simulation.start(CONTROLLER)  # beside the one that is still there
    simulation.run_as_far_as_kills_go()
    assert simulation.bits() == undisturbed(workers, real), f"--seed {seed}"
    if not real:
        assert_applied_once(simulation, NUMBERS)


def test_g2_g11_a_schedule_by_its_seed(pytestconfig: pytest.Config) -> None:
    schedule(pytestconfig.getoption("--seed", default=0))


@pytest.mark.parametrize("first", range(0, NUM_SCHEDULES, CHUNK))
def test_g2_g11_workers_killed_at_any_moment_are_bit_equal_to_undisturbed_ones(first: int) -> None:
    for seed in range(first, first + CHUNK):
        schedule(seed)


@pytest.mark.chaos
@pytest.mark.parametrize("first", range(NUM_SCHEDULES, NUM_CHAOS, 100))
def test_g2_g11_thousands_of_schedules(first: int) -> None:
    for seed in range(first, first + 100):
        schedule(seed)


def test_the_same_seed_is_the_same_run() -> None:
    runs = [fleet(2, seed=11, kills=kills_of(11, 2)).run_as_far_as_kills_go() for _ in range(2)]
    assert runs[0].disorder.drawn == runs[1].disorder.drawn and runs[0].moments == runs[1].moments
    assert runs[0].clock.monotonic_s() == runs[1].clock.monotonic_s() and runs[0].hall.num_sums == runs[1].hall.num_sums


@pytest.mark.parametrize("seed", range(400, 406))
def test_g2_live_training_of_two_workers_in_the_same_disorder(seed: int) -> None:
    simulation = Simulation(samples.records(LIVE_NUMBERS), num_workers=2, seed=seed, kills=kills_of(seed, 2))
    simulation.run_as_far_as_kills_go()
    assert_applied_once(simulation, LIVE_NUMBERS)
    of = simulation.last.workers
    assert sum(part.dedupe for part in of.values()) == len(set(LIVE_NUMBERS))
    assert sum(part.metrics["requests"] for part in of.values()) == len(set(LIVE_NUMBERS))


@pytest.mark.parametrize("victim", ["worker 0", "worker 1"])
def test_g3_a_worker_killed_between_two_shards_pushes_ends_the_others_waits(victim: str) -> None:
    simulation = fleet(2, kills=[Kill((victim, "push", "before"), victim, 4)]).run()
    assert simulation.killed == [victim] and simulation.clock.monotonic_s() < 40
    assert simulation.bits() == undisturbed(2)


def test_the_fleet_s_watermark_is_one_and_in_the_manifest() -> None:
    simulation = fleet(2).run()
    loops = [simulation.places[f"worker {i}"].process.loop for i in range(2)]
    assert simulation.last.watermark_ms == loops[0].watermark_ms == loops[1].watermark_ms == samples.T0 + 24_500
    assert {loop.num_steps for loop in loops} == {simulation.last.step}


def test_of_two_controllers_of_a_fleet_the_older_one_is_fenced() -> None:
    simulation = fleet(2)
    for _ in range(6):
        simulation.round()
    old = simulation.controller
    assert old is not None
    simulation.start(CONTROLLER)
    simulation.run()
    assert simulation.controller is not old and simulation.bits() == undisturbed(2)
    assert simulation.controller is not None and simulation.controller.coordinator.state is State.RUNNING
