"""Several workers under kills, lost messages, interrupted sums and two controllers at once: every sample is
trained exactly once, and in exact mode the final weights and rows equal those of an undisturbed run bit for
bit (guarantees G2 and G11 of docs/architecture.md).

A seed gives a schedule: which processes are killed at which moments, which messages are lost, and in which
order workers run. `--seed N` replays one schedule; `-m chaos` runs thousands.
"""

from __future__ import annotations

import functools
import random
from collections import Counter

import pytest

from roostream.runtime import manifest as manifests
from tests.trainer import samples
from tests.trainer.network import CONTROLLER, STORE, DeadLink, FaultSchedule, SlowShard, StoreFault
from tests.trainer.schedules import (
    LIMITS,
    SHARDS,
    STORE_FAULTS,
    every_nth,
    random_kills,
    random_options,
    random_options_with_store_faults,
    random_options_with_wrong_clocks,
    random_twins,
    run_schedule,
    seed_ranges,
)
from tests.trainer.simulator import MAX_ROUNDS, Kill, Simulation, Twin
from trainer.control.types import State

NUMBERS = list(range(1, 25))
LIVE_NUMBERS = [
    n for i in range(1, 25) for n in ((i, i - 4) if i > 4 and i % 5 == 0 else (i,))
]  # every fifth record is followed by a second copy of an earlier one


@functools.cache
def undisturbed(workers: int, real_shards: bool = False) -> dict[str, bytes]:
    return fleet(workers, real_shards=real_shards).run().bits()


def fleet(workers: int, **more: object) -> Simulation:
    return Simulation(
        samples.records(NUMBERS), exact=True, num_workers=workers, commit_interval_s=0.5, **more
    )  # type: ignore[arg-type]


def run_seed(seed: int) -> None:
    """Run two or three workers. Every fifth seed uses real shards, every seventh starts a second controller,
    and two of three have a fault schedule."""
    workers, real = 2 + seed % 2, seed % 5 == 0
    simulation = run_schedule(fleet(workers, real_shards=real, **random_options(seed, workers)), seed)
    assert simulation.bits() == undisturbed(workers, real), f"--seed {seed}"
    if not real:
        simulation.assert_applied_once(NUMBERS)


def test_g2_g11_the_schedule_of_the_seed_option(pytestconfig: pytest.Config) -> None:
    run_seed(pytestconfig.getoption("--seed", default=0))


@pytest.mark.parametrize("seeds", seed_ranges(10, chaos=3000), ids=str)
def test_g2_g11_workers_killed_at_any_moment_are_bit_equal_to_undisturbed_ones(seeds: range) -> None:
    for seed in seeds:
        run_seed(seed)


def run_with_store_faults(seed: int) -> None:
    """Like `run_seed`, but the store is also unmounted, read-only or unavailable for a while. Three of four
    seeds use real shards."""
    workers, real = 1 + seed % 2, seed % 4 != 0
    simulation = run_schedule(
        fleet(workers, real_shards=real, **random_options_with_store_faults(seed, workers)), seed
    )
    assert simulation.bits() == undisturbed(workers, real), f"seed {seed}"


@pytest.mark.parametrize("seeds", seed_ranges(5, first=5000, chaos=1000), ids=str)
def test_g2_a_store_with_temporary_faults_changes_no_result(seeds: range) -> None:
    for seed in seeds:
        run_with_store_faults(seed)


def run_with_wrong_clocks(seed: int) -> Simulation:
    """Like `run_seed`, but wall clocks jump by up to an hour, and back. Half of the seeds use real shards."""
    workers, real = 1 + seed % 3, seed % 2 == 0
    simulation = fleet(workers, real_shards=real, **random_options_with_wrong_clocks(seed, workers))
    run_schedule(simulation, seed)
    assert simulation.bits() == undisturbed(workers, real), f"seed {seed}"
    return simulation


def test_g8_wall_clocks_that_are_an_hour_wrong_change_no_result() -> None:
    fault_counts = {
        who for seed in range(7000, 7004) for who in run_with_wrong_clocks(seed).network.fault_counts
    }
    assert {f"clock of {who}" for who in ("controller", "worker 0", "worker 1", "shard 0")} <= fault_counts


@pytest.mark.chaos
@pytest.mark.timeout(900)
@pytest.mark.parametrize("first", [7100, 7200])
def test_g8_hundreds_of_schedules_with_wall_clocks_an_hour_wrong(first: int) -> None:
    for seed in range(first, first + 100):
        run_with_wrong_clocks(seed)


def run_with_absent_manifests(seed: int) -> Counter[str]:
    """Move all or the newest manifests away while processes are killed, once a shard knows of the newest
    commit. Bring them back after some rounds, and end the hold if there is one. Return what happened."""
    draw, workers, seen = random.Random(f"absent {seed}"), 1 + seed % 2, Counter[str]()
    options = random_options(seed, workers)
    simulation = fleet(workers, real_shards=True, uploads=seed % 4 == 0, **options)
    first_round = draw.randint(8, 30)
    while simulation.network.round < first_round or not knows_newest_commit(simulation):
        simulation.round()
    objects = simulation.store.objects
    names = sorted(name for name in objects if name.startswith("manifests/"))
    away = {name: objects.pop(name) for name in names[draw.choice((0, -1)) :]}
    programs = [CONTROLLER, *simulation.slots]
    for who in draw.sample(programs, draw.randint(0, len(programs))):
        simulation.kill(who)
    for _ in range(draw.randint(2, 30)):
        simulation.round()
    assert not away.keys() & objects.keys(), f"seed {seed}: a commit was made again"
    objects |= away
    for _ in range(MAX_ROUNDS):
        controller = simulation.controller
        if controller is not None and controller.coordinator.state is State.HELD:
            seen["holds"] += controller.coordinator.release()
        simulation.round()
        simulation.kills = []  # those whose moments never occurred
        if simulation.is_done():
            break
    assert simulation.run().bits() == undisturbed(workers, True), f"seed {seed}"
    return seen


def knows_newest_commit(simulation: Simulation) -> bool:
    newest = manifests.newest(simulation.store)
    shards = [simulation.slots[who].process for who in SHARDS]
    return newest is not None and any(
        process is not None and process.shard.committed.seq == newest.manifest.seq for process in shards
    )


@pytest.mark.parametrize("seeds", seed_ranges(10, first=9000, chaos=500), ids=str)
def test_g2_manifests_that_are_away_for_a_while_are_neither_replaced_nor_forgotten(seeds: range) -> None:
    assert sum((run_with_absent_manifests(seed) for seed in seeds), Counter())["holds"]


@pytest.mark.parametrize("kind", STORE_FAULTS)
def test_g1_all_programs_restart_while_the_store_is_away(kind: str) -> None:
    fault = StoreFault(kind, 13, 40)
    simulation = fleet(2, faults=FaultSchedule(store=(fault,)), limits=LIMITS, real_shards=True)
    for _ in range(20):
        simulation.round()
    committed = simulation.last
    for who in (CONTROLLER, *simulation.slots):
        simulation.kill(who)
    for _ in range(20):
        simulation.round()
    assert simulation.last == committed and simulation.controller is not None
    assert simulation.controller.status()["away"] and not simulation.mount_point.objects
    simulation.run()
    assert simulation.bits() == undisturbed(2, True)


def test_the_same_seed_gives_the_same_run() -> None:
    runs = [fleet(2, seed=11, kills=random_kills(11, 2)).run_with_optional_kills() for _ in range(2)]
    assert (
        runs[0].message_faults.injected == runs[1].message_faults.injected
        and runs[0].moments == runs[1].moments
    )
    assert runs[0].clock.monotonic_s() == runs[1].clock.monotonic_s()
    assert runs[0].reduction_hub.num_sums == runs[1].reduction_hub.num_sums


@pytest.mark.parametrize("seed", every_nth(3, range(400, 406)))
def test_g2_live_training_of_two_workers_with_message_faults_and_kills(seed: int) -> None:
    simulation = Simulation(samples.records(LIVE_NUMBERS), num_workers=2, **random_options(seed, 2))
    simulation.run_with_optional_kills()
    simulation.assert_applied_once(LIVE_NUMBERS)
    workers = simulation.last.workers
    assert sum(part.dedupe for part in workers.values()) == len(set(LIVE_NUMBERS))
    assert sum(part.metrics["requests"] for part in workers.values()) == len(set(LIVE_NUMBERS))


LONG = 30  # rounds; the controller gives up a member after 12, and a step of a commit after 20
DEAD_LINKS = {
    "requests to a shard don't arrive": DeadLink("worker 0", "shard 1", 6, LONG),
    "a shard's answers don't arrive": DeadLink("worker 1", "shard 0", 6, LONG, True),
    "a worker isn't heard by the controller": DeadLink("worker 1", CONTROLLER, 6, LONG),
    "a worker doesn't hear the controller": DeadLink("worker 0", CONTROLLER, 6, LONG, True),
    "a shard doesn't hear the controller": DeadLink("shard 0", CONTROLLER, 6, LONG, True),
    "the store doesn't hear the controller": DeadLink(CONTROLLER, STORE, 6, LONG),
    "the controller doesn't hear the store": DeadLink(CONTROLLER, STORE, 6, LONG, True),
    "a worker doesn't hear the store": DeadLink("worker 1", STORE, 6, LONG, True),
    "a worker doesn't hear the other": DeadLink("worker 0", "worker 1", 6, LONG),
}


@pytest.mark.parametrize("what", DEAD_LINKS)
def test_g2_g11_a_link_that_is_dead_for_long_changes_nothing(what: str) -> None:
    link = DEAD_LINKS[what]
    simulation = fleet(2, faults=FaultSchedule((link,)), limits=LIMITS, real_shards=True).run()
    assert simulation.network.fault_counts, what
    assert simulation.bits() == undisturbed(2, True)


@pytest.mark.parametrize("executes_late", [False, True], ids=["answers late", "begins late"])
@pytest.mark.parametrize(("rounds_late", "is_waited_for"), [(4, True), (40, False)])
def test_g2_g11_a_slow_shard_never_causes_a_push_to_apply_twice(
    rounds_late: int, is_waited_for: bool, executes_late: bool
) -> None:
    slow = SlowShard("shard 1", 4, 60, rounds_late, executes_late)
    simulation = fleet(2, faults=FaultSchedule(slow=(slow,)), limits=LIMITS, real_shards=True).run()
    assert simulation.bits() == undisturbed(2, True) and simulation.controller is not None
    coordinator = simulation.controller.coordinator
    assert (coordinator.num_rollbacks == 0) == is_waited_for, coordinator.reason


@pytest.mark.parametrize("victim", ["worker 0", "worker 1"])
def test_g3_killing_a_worker_between_pushes_ends_the_other_workers_waits(victim: str) -> None:
    simulation = fleet(2, kills=[Kill((victim, "push", "before"), victim, 4)]).run()
    assert simulation.killed == [victim] and simulation.clock.monotonic_s() < 40
    assert simulation.bits() == undisturbed(2)


def test_all_workers_have_the_watermark_of_the_manifest() -> None:
    simulation = fleet(2).run()
    loops = [simulation.slots[f"worker {i}"].process.loop for i in range(2)]
    assert (
        simulation.last.watermark_ms == loops[0].watermark_ms == loops[1].watermark_ms == samples.T0 + 24_500
    )
    assert {loop.num_steps for loop in loops} == {simulation.last.step}


@pytest.mark.parametrize("who", ["worker 1", "shard 0"])
def test_a_second_process_of_a_member_is_refused_and_training_continues(who: str) -> None:
    """Both processes send heartbeats every quarter of a second for 30 s."""
    simulation = fleet(2, twins=[Twin(who, 6, 120)])
    for _ in range(130):
        simulation.round()
    assert simulation.controller is not None and simulation.controller.coordinator.incarnation == 1
    assert simulation.refusals[f"{who}'s twin"] > 100 and not simulation.refusals[who]
    assert simulation.run().bits() == undisturbed(2)


def run_with_twins(seed: int) -> Simulation:
    """Like `run_seed`, but some members have a second process for a while."""
    workers, real = 2 + seed % 2, seed % 5 == 0
    simulation = fleet(
        workers, real_shards=real, twins=random_twins(seed, workers), **random_options(seed, workers)
    )
    run_schedule(simulation, seed)
    assert simulation.bits() == undisturbed(workers, real), f"--seed {seed}"
    return simulation


@pytest.mark.parametrize("seeds", seed_ranges(5, chaos=600), ids=str)
def test_g2_g11_two_processes_of_one_member_never_change_what_is_trained(seeds: range) -> None:
    for seed in seeds:
        run_with_twins(seed)
