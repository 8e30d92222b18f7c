"""Kills of one process at each step of a commit: every sample is trained exactly once, and in exact mode the
final weights and rows equal those of an undisturbed run bit for bit (guarantees G2 and G11 of
docs/architecture.md).

Kills happen at the steps of a commit, as trainer/control/coordinator.py numbers them: cut (2, 3), freeze and
resume (4), write (5), link (6), commit (7). They also happen at the steps of a restore (claim, restore,
start), and between the two pushes of one batch.
"""

from __future__ import annotations

import functools
import itertools
import logging
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from roostream.errors import UnavailableError
from roostream.runtime import manifest as manifests
from tests.trainer import samples
from tests.trainer.network import CONTROLLER
from tests.trainer.schedules import before_and_after, every_nth, moments_and_victims
from tests.trainer.simulator import WORKER, Kill, Simulation
from trainer.control.types import State

EVERYONE = (CONTROLLER, WORKER, "shard 0", "shard 1")
MOMENTS = [
    *before_and_after(WORKER, "restore", "start", "cut", "resume", "write", "commit"),
    *before_and_after("shard 0", "restore", "freeze", "write", "commit"),
    ("shard 1", "freeze", "after"),
    ("shard 1", "write", "after"),
    *before_and_after(CONTROLLER, "claim", "link"),
    (WORKER, "push", "before"),
]
EXACT_NUMBERS = list(range(1, 49))
# Every fifth record is followed by a second copy of an earlier one.
LIVE_NUMBERS = [n for i in range(1, 41) for n in ((i, i - 3) if i % 5 == 0 else (i,))]


@functools.cache
def undisturbed() -> dict[str, bytes]:
    return Simulation(samples.records(EXACT_NUMBERS), exact=True).run().bits()


@pytest.mark.parametrize(("moment", "victim"), every_nth(4, moments_and_victims(MOMENTS, EVERYONE)), ids=str)
def test_g2_g11_a_kill_at_any_moment_of_the_second_commit(moment: tuple[str, str, str], victim: str) -> None:
    occurrence = 1 if moment[1] in ("claim", "restore", "start") else 9 if moment[1] == "push" else 2
    kill = Kill(moment, victim, occurrence)
    simulation = Simulation(samples.records(EXACT_NUMBERS), exact=True, kills=[kill]).run()
    assert simulation.killed == [victim]
    simulation.assert_applied_once(EXACT_NUMBERS)
    assert simulation.bits() == undisturbed()


kills = st.lists(
    st.builds(
        Kill, moment=st.sampled_from(MOMENTS), victim=st.sampled_from(EVERYONE), occurrence=st.integers(1, 4)
    ),
    max_size=6,
    unique_by=lambda kill: (kill.moment, kill.occurrence),
)


@settings(max_examples=4, suppress_health_check=[HealthCheck.too_slow])
@given(kills, st.sampled_from([2, 14]))
def test_g2_every_sample_is_applied_once_through_any_kills_and_re_emissions(
    schedule: list[Kill], restart_after: int
) -> None:
    simulation = Simulation(samples.records(LIVE_NUMBERS), kills=schedule, restart_after=restart_after)
    simulation.run_with_optional_kills()
    simulation.assert_applied_once(LIVE_NUMBERS)


@settings(max_examples=4, suppress_health_check=[HealthCheck.too_slow])
@given(kills)
def test_g11_parameters_after_any_kills_are_bit_equal(schedule: list[Kill]) -> None:
    simulation = Simulation(samples.records(EXACT_NUMBERS), exact=True, kills=schedule)
    simulation.run_with_optional_kills()
    assert simulation.bits() == undisturbed()


def random_kills(seed: int) -> list[Kill]:
    draw = random.Random(seed)
    moments = draw.sample(MOMENTS, 3)
    return [Kill(moment, draw.choice(EVERYONE), draw.randint(1, 3)) for moment in moments]


RPC_FAULTS = {"lost", "answer lost", "twice", "late copy"}
HEARTBEAT_FAULTS = {"beat lost", "beat's answer lost", "beat twice", "late copy of a beat", "late answer"}


@pytest.mark.parametrize("seed", every_nth(6, range(12)))
def test_g2_g11_lost_late_and_duplicated_messages_change_nothing(seed: int) -> None:
    simulation = Simulation(
        samples.records(EXACT_NUMBERS), exact=True, seed=seed, kills=random_kills(seed) if seed % 2 else []
    )
    simulation.run_with_optional_kills()
    injected = simulation.message_faults.injected.keys()
    assert injected & HEARTBEAT_FAULTS and injected & RPC_FAULTS
    simulation.assert_applied_once(EXACT_NUMBERS)
    assert simulation.bits() == undisturbed()


@pytest.mark.parametrize("seed", every_nth(4, range(101, 109)))
def test_g11_real_shards_are_bit_equal_with_message_faults_and_kills(seed: int) -> None:
    faults: dict[str, Any] = {"seed": seed, "kills": random_kills(seed) if seed % 2 else []}
    simulation = Simulation(samples.records(EXACT_NUMBERS), exact=True, real_shards=True, **faults)
    simulation.run_with_optional_kills()
    assert simulation.bits() == undisturbed_on_real_shards()


@pytest.mark.parametrize("seed", every_nth(3, range(200, 206)))
def test_g2_live_training_applies_each_sample_once_with_message_faults_and_kills(seed: int) -> None:
    simulation = Simulation(samples.records(LIVE_NUMBERS), seed=seed, kills=random_kills(seed))
    simulation.run_with_optional_kills()
    simulation.assert_applied_once(LIVE_NUMBERS)


@pytest.mark.parametrize("seed", every_nth(3, range(300, 306)))
def test_g3_an_unavailable_store_never_counts_as_damaged(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    simulation = Simulation(
        samples.records(EXACT_NUMBERS), exact=True, seed=seed, kills=random_kills(seed), real_shards=True
    )
    simulation.run_with_optional_kills()
    assert simulation.message_faults.injected["store away"]
    assert "passing" not in caplog.text and "damaged" not in caplog.text
    assert simulation.bits() == undisturbed_on_real_shards()


def test_training_continues_while_shards_write_and_every_sample_has_one_prediction() -> None:
    simulation = Simulation(samples.records(LIVE_NUMBERS))
    steps: list[tuple[str, int]] = []
    original_moment = simulation.moment

    def moment(who: str, what: str, when: str) -> None:
        if who == WORKER and (what, when) in (("resume", "after"), ("write", "before")):
            steps.append((what, simulation.worker.loop.num_steps))
        original_moment(who, what, when)

    simulation.moment = moment  # type: ignore[method-assign]
    simulation.run()
    between = [b[1] - a[1] for a, b in itertools.pairwise(steps) if (a[0], b[0]) == ("resume", "write")]
    assert between and max(between) > 0
    assert sorted(p.sample_id for p in simulation.outputs.predicted) == sorted(set(LIVE_NUMBERS))
    assert simulation.last.workers[0].dedupe == len(set(LIVE_NUMBERS))
    assert simulation.last.workers[0].metrics["requests"] == len(set(LIVE_NUMBERS))


def test_g3_training_waits_for_a_missing_member() -> None:
    simulation = Simulation(
        samples.records(LIVE_NUMBERS),
        kills=[Kill(("shard 0", "write", "after"), "shard 1")],
        restart_after=40,
    )
    simulation.run()
    assert simulation.controller is not None and simulation.controller.coordinator.incarnation >= 2
    simulation.assert_applied_once(LIVE_NUMBERS)


kills_with_two_workers = st.builds(
    Kill,
    moment=st.sampled_from(
        [(w, kind, "after") for w in (WORKER, "worker 1") for kind in ("restore", "cut", "resume", "write")]
    ),
    victim=st.sampled_from((*EVERYONE, "worker 1")),
    occurrence=st.integers(1, 3),
)


@settings(max_examples=3, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(kills_with_two_workers, max_size=3, unique_by=lambda kill: (kill.moment, kill.occurrence)))
def test_g2_every_worker_s_part_is_committed_and_restored(schedule: list[Kill]) -> None:
    simulation = Simulation(samples.records(LIVE_NUMBERS), num_workers=2, kills=schedule)
    simulation.run_with_optional_kills()
    simulation.assert_applied_once(LIVE_NUMBERS)
    workers = simulation.last.workers
    assert [set(part.offsets) for part in workers.values()] == [{("samples", 0)}, {("samples", 1)}]
    assert sum(part.dedupe for part in workers.values()) == len(set(LIVE_NUMBERS))
    assert sum(part.metrics["requests"] for part in workers.values()) == len(set(LIVE_NUMBERS))
    assert len({part.file.name for part in workers.values()}) == 2


def restore_after_the_end(simulation: Simulation) -> Simulation:
    """Kill the worker after everything is committed. The fleet is restored once the worker has been silent
    for 3 s."""
    simulation.kill(WORKER)
    for _ in range(24):
        simulation.round()
    return simulation.run()


@pytest.mark.parametrize("part", ["manifest", "shared", "own", "segment"])
def test_g5_damaged_parts_of_the_newest_commit_are_never_loaded(
    part: str, caplog: pytest.LogCaptureFixture
) -> None:
    simulation = Simulation(samples.records(EXACT_NUMBERS), exact=True).run()
    last = simulation.last
    if part == "segment":
        del simulation.disks[0][last.shards[0]["segments"][0]["name"]]
    else:
        names = {"manifest": last.name, "shared": last.dense.name, "own": last.workers[0].file.name}
        simulation.store.damage(names[part])
    with caplog.at_level(logging.WARNING):
        restore_after_the_end(simulation)
    assert part == "segment" or last.name in caplog.text
    simulation.assert_applied_once(EXACT_NUMBERS)
    assert simulation.bits() == undisturbed()


@pytest.mark.parametrize(
    ("call", "when", "aborts"), [("create", "before", 1), ("create", "after", 0), ("put", "before", 1)]
)
def test_a_full_disk_at_the_link_or_the_dense_file_only_delays_the_commit(
    call: str, when: str, aborts: int
) -> None:
    simulation = Simulation(samples.records(LIVE_NUMBERS))
    while not (simulation.controller and simulation.controller.coordinator.state is State.RUNNING):
        simulation.round()
    simulation.store.fail_next(call, when)
    simulation.run()
    coordinator = simulation.controller.coordinator
    assert (coordinator.num_aborts, coordinator.num_rollbacks) == (aborts, 0)
    simulation.assert_applied_once(LIVE_NUMBERS)


def test_commits_that_a_full_disk_aborts_leave_no_files_in_the_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    simulation = Simulation(samples.records(LIVE_NUMBERS))
    store, written = simulation.store, list[str]()
    put = store.put

    def put_or_fail(name: str, data: bytes) -> None:
        if name.startswith(f"{manifests.DENSE}/"):
            raise UnavailableError("no space left")
        written.append(name)
        put(name, data)

    with monkeypatch.context() as full:
        full.setattr(store, "put", put_or_fail)
        while not (simulation.controller and simulation.controller.coordinator.num_aborts >= 5):
            simulation.round()
    aborted = {name for name in written if name.startswith(f"{manifests.WORKERS}/")}
    left = aborted.intersection(store.list(manifests.WORKERS))
    assert len(aborted) >= 5 and len(left) <= 2, "only the last abort may not be finished"
    simulation.run()
    assert simulation.controller.coordinator.num_rollbacks == 0
    simulation.assert_applied_once(LIVE_NUMBERS)


def test_the_older_of_two_controllers_exits_and_commits_nothing_more() -> None:
    simulation = Simulation(samples.records(LIVE_NUMBERS))
    for _ in range(8):
        simulation.round()
    old = simulation.controller
    assert old is not None
    simulation.start(CONTROLLER)
    simulation.run()
    committed = simulation.last.name
    simulation.clock.advance(5)
    with pytest.raises(manifests.FencedError, match="was claimed by another controller"):
        old.turn()
    beat = {"role": "shard", "index": 0, "session": 1, "incarnation": 0, "results": [], "report": {}}
    with pytest.raises(manifests.FencedError):
        old.handle("beat", beat, ())
    assert simulation.last.name == committed
    simulation.assert_applied_once(LIVE_NUMBERS)


def test_a_manifest_linked_just_before_fencing_is_restored_by_the_next_controller() -> None:
    simulation = Simulation(samples.records(EXACT_NUMBERS), exact=True)
    control, simulation.control = simulation.control, lambda: None  # type: ignore[method-assign]
    old = None
    while old is None:  # until a controller has decided to link a manifest, and has not yet linked it
        simulation.round()
        if simulation.controller is not None and simulation.controller.coordinator.state is State.LINKING:
            old = simulation.controller
        else:
            simulation.until_killed(control)
    linked: list[str] = []

    def link_late(name: str) -> None:
        if name.startswith(manifests.INCARNATIONS) and not linked:
            linked.append("late")
            old.turn()

    simulation.store.before_create = link_late
    simulation.start(CONTROLLER)
    simulation.control = control  # type: ignore[method-assign]
    simulation.control()
    new = simulation.controller
    assert new is not None and linked and new.coordinator.last is not None
    assert (
        new.coordinator.last.name
        == simulation.store.list(manifests.MANIFESTS)[-1]
        == old.coordinator.last.name
    )  # type: ignore[union-attr]
    simulation.run()
    simulation.assert_applied_once(EXACT_NUMBERS)
    assert simulation.bits() == undisturbed()


IN_A_COMMIT = [m for m in MOMENTS if m[1] in ("freeze", "write", "link", "commit") and m[2] == "after"]


@functools.cache
def undisturbed_on_real_shards() -> dict[str, bytes]:
    return Simulation(samples.records(EXACT_NUMBERS), exact=True, real_shards=True).run().bits()


@pytest.mark.parametrize(
    ("moment", "victim"),
    every_nth(6, itertools.product(IN_A_COMMIT, ["shard 0", WORKER, CONTROLLER])),
    ids=str,
)
def test_g11_real_shards_are_bit_equal_after_a_kill(moment: tuple[str, str, str], victim: str) -> None:
    kill = Kill(moment, victim, 2)
    simulation = Simulation(samples.records(EXACT_NUMBERS), exact=True, kills=[kill], real_shards=True).run()
    assert simulation.killed == [victim]
    assert simulation.bits() == undisturbed_on_real_shards()
