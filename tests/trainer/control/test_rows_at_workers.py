"""Rows that the workers of a session hold: commits, rollbacks and restores come to what they come to with
rows at shards, to the bit, through kills at any moment; and so does what follows at shards."""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import Any

import numpy as np
import pytest

from param_server.row_exchange import RowExchange
from roostream.runtime.bucket_map import BucketMap
from tests.trainer import samples
from tests.trainer.actors import HallTeam
from tests.trainer.control.test_initial_phase import NUM_CHAOS
from tests.trainer.control.test_moves import moved_to
from tests.trainer.control.test_session_phase import NUMBERS, FromTable
from tests.trainer.network import CONTROLLER
from tests.trainer.schedules import drawn, run_schedule
from tests.trainer.simulated_processes import Site
from tests.trainer.simulator import Kill, Simulation
from trainer.process_group import DualRendezvous, SingleWorkerGroup
from trainer.selection.config import SelectionConfig
from trainer.selection.decision import NEGATIVE

NUM_SCHEDULES = 6
BEHIND = [
    *NUMBERS,
    *sorted([*range(50, 66, 2), *range(51, 83, 2)]),
]  # whole chunks of what a stream brings later


class AtWorkers(FromTable):
    """Worker w and shard w are one process, whose calls to the others are swaps."""

    def _rows(self, worker: int) -> Any:
        return RowExchange(self.places[f"shard {worker}"].process.shard, SingleWorkerGroup())

    def _team(self, index: int, rows: Any) -> Any:
        return DualRendezvous(HallTeam(self.hall, index), rows.client)

    def _process_of(self, who: str) -> tuple[str, ...]:
        return (
            (who,) if who == CONTROLLER else tuple(f"{role} {who.split()[1]}" for role in ("shard", "worker"))
        )


def held(at_workers: bool = True, workers: int = 2, **more: Any) -> FromTable:
    made = AtWorkers if at_workers else FromTable
    sizes = {"num_workers": workers, "num_shards": workers, "unit_records": 7, "commit_interval_s": 0.5}
    return made(samples.records(NUMBERS), exact=True, real_shards=True, **sizes, **more)


@functools.cache
def at_shards(workers: int = 2) -> dict[str, bytes]:
    """What nothing disturbed."""
    return held(at_workers=False, workers=workers).run().bits()


def assert_equal(simulation: Simulation, expected: dict[str, bytes]) -> None:
    assert simulation.bits() == expected
    assert all(
        np.isfinite(np.frombuffer(b[:-8], np.float32)).all()
        for k, b in expected.items()
        if k.startswith("row ")
    )


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_rows_held_by_workers_train_like_rows_at_shards(workers: int) -> None:
    """Of four, two have no partition with anything in it, and take part in every pull and push."""
    simulation = held(workers=workers)
    simulation.run()
    assert_equal(simulation, at_shards(workers))
    assert (simulation.hall.num_swaps > 0) == (workers > 1)
    assert set(simulation.last.shards) == set(range(workers))
    assert all(s["segments"] for s in simulation.last.shards.values())


MOMENTS = [
    *((CONTROLLER, "link", when) for when in ("before", "after")),
    *((f"{role} 1", "write", "after") for role in ("worker", "shard")),
    *(
        (who, kind, "after")
        for who, kind in (("worker 0", "cut"), ("shard 0", "freeze"), ("shard 1", "restore"))
    ),
]
MORE_MOMENTS = [
    *((CONTROLLER, "claim", when) for when in ("before", "after")),
    *((f"{role} {index}", "commit", "after") for role in ("worker", "shard") for index in range(2)),
    *((f"worker {index}", kind, "after") for index in range(2) for kind in ("restore", "start")),
    ("shard 0", "write", "before"),
]


def killed(moment: tuple[str, str, str], victim: str) -> None:
    simulation = held(kills=[Kill(moment, victim, 2)])
    simulation.run()
    assert simulation.killed == [victim]
    assert_equal(simulation, at_shards())


@pytest.mark.parametrize("victim", [CONTROLLER, "worker 0", "worker 1"])
@pytest.mark.parametrize("moment", MOMENTS, ids=" ".join)
def test_g2_g11_killing_a_worker_with_its_rows_changes_nothing(
    moment: tuple[str, str, str], victim: str
) -> None:
    killed(moment, victim)


@pytest.mark.chaos
@pytest.mark.parametrize("victim", [CONTROLLER, "worker 0", "worker 1"])
@pytest.mark.parametrize("moment", MORE_MOMENTS, ids=" ".join)
def test_g2_g11_killing_a_worker_with_its_rows_at_further_moments_changes_nothing(
    moment: tuple[str, str, str], victim: str
) -> None:
    killed(moment, victim)


# With training on less


NEGATIVES = {"selection": SelectionConfig(policy="negatives", keep=0.4, score="probe")}
Became = dict[int, int]


def became_of(simulation: Simulation) -> Became:
    """Sample → what became of it."""
    return {p.sample_id: p.disposition for p in simulation.outputs.predicted}


@functools.cache
def on_less() -> tuple[dict[str, bytes], Became]:
    """At shards, and nothing disturbed."""
    simulation = held(at_workers=False, loop=NEGATIVES)
    simulation.run()
    return simulation.bits(), became_of(simulation)


@pytest.mark.parametrize("victim", [CONTROLLER, "worker 0", "worker 1"])
@pytest.mark.parametrize(
    "moment", [("worker 1", "write", "after"), ("shard 0", "freeze", "after")], ids=" ".join
)
def test_g2_g11_selection_of_workers_with_rows_is_the_same_after_kills(
    moment: tuple[str, str, str], victim: str
) -> None:
    simulation = held(loop=NEGATIVES, kills=[Kill(moment, victim, 2)])
    simulation.run()
    bits, became = on_less()
    assert simulation.killed == [victim] and became_of(simulation) == became
    assert_equal(simulation, bits)
    assert bits != at_shards() and sum(its == NEGATIVE for its in became.values()) > 3


def schedule(seed: int) -> None:
    simulation = run_schedule(held(**drawn(seed, 2)), seed)
    assert simulation.bits() == at_shards(), f"--seed {seed}"


def test_g2_g11_a_schedule_of_rows_at_workers_by_its_seed(pytestconfig: pytest.Config) -> None:
    schedule(pytestconfig.getoption("--seed", default=NUM_SCHEDULES))


def test_g2_g11_rows_at_workers_through_kills_at_any_moment() -> None:
    for seed in range(NUM_SCHEDULES):
        schedule(seed)


@pytest.mark.chaos
@pytest.mark.timeout(900)  # far less where nothing else runs
@pytest.mark.parametrize("first", range(NUM_SCHEDULES, NUM_CHAOS, 70))
def test_g2_g11_many_schedules_of_rows_at_workers(first: int) -> None:
    for seed in range(first, first + 70):
        schedule(seed)


# The hand-over


def went_on(site: Site, shards: int) -> dict[str, bytes]:
    """By one worker from the stream, with rows at shards."""
    settings: dict[str, Any] = {"exact": True, "real_shards": True, "commit_interval_s": 0.5}
    return FromTable(samples.records(BEHIND), num_shards=shards, site=site, **settings).run().bits()


@functools.cache
def ended(at_workers: bool) -> Simulation:
    return held(at_workers).run()


def copied(simulation: Simulation) -> Simulation:
    """To be changed."""
    its = copy.copy(simulation)
    its.store, its.disks = copy.copy(its.store), copy.deepcopy(its.disks)
    its.store.objects = dict(its.store.objects)
    return its


@pytest.mark.parametrize("num_shards", [1, 2, 3])
def test_rows_held_by_workers_can_move_to_shards(num_shards: int) -> None:
    always = copied(ended(False))
    expected = went_on(Site(objects=always.store.objects, disks=always.disks), 2)
    site = moved_to(copied(ended(True)), BucketMap.modulo(64, num_shards))
    assert went_on(dataclasses.replace(site, disks=site.disks[:num_shards]), num_shards) == expected
