"""Random fault schedules for the simulator, and parameters for the tests that run them. A seed decides which
processes are killed at which moments, which links are dead, which shards are slow, and for how long."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from tests.trainer.network import (
    CONTROLLER,
    STORE,
    DeadLink,
    FaultSchedule,
    SlowShard,
    StoreFault,
    WrongClock,
)
from tests.trainer.simulator import Kill, Simulation, Twin

SHARDS = ("shard 0", "shard 1")
LIMITS = {"step_timeout_s": 5.0, "restore_timeout_s": 6.0}
"""Shorter than the longest delay of a slow shard (a round is 0.25 s), so that time limits expire."""


def every_nth(n: int, cases: Iterable[Any]) -> list[Any]:
    """Parametrize a test with every n-th of these cases; `make chaos` runs the others as well."""
    chaos = pytest.mark.chaos
    return [
        pytest.param(*(case if type(case) is tuple else (case,)), marks=[chaos] * (at % n > 0))
        for at, case in enumerate(cases)
    ]


def seed_ranges(count: int, *, chaos: int, first: int = 0) -> list[Any]:
    """Parametrize a test with ranges of seeds: `count` seeds from `first` on; `make chaos` runs all up to
    `chaos`."""
    marks = [pytest.mark.chaos, pytest.mark.timeout(900)]  # a busy machine needs far longer than a quiet one
    return [
        *(range(at, at + 5) for at in range(first, first + count, 5)),
        *(pytest.param(range(at, at + 100), marks=marks) for at in range(first + count, first + chaos, 100)),
    ]


def before_and_after(who: str, *kinds: str) -> list[tuple[str, str, str]]:
    """The moments before and after this member executes each of these commands."""
    return [(who, kind, when) for kind in kinds for when in ("before", "after")]


def moments(workers: int) -> list[tuple[str, str, str]]:
    names = [f"worker {i}" for i in range(workers)]
    commands = ("restore", "start", "cut", "resume", "write", "commit")
    return [
        *(moment for name in names for moment in before_and_after(name, *commands)),
        *(
            moment
            for name in SHARDS
            for moment in before_and_after(name, "restore", "freeze", "write", "commit")
        ),
        *before_and_after(CONTROLLER, "claim", "link"),
        *((name, "push", "before") for name in names),
    ]


def moments_and_victims(
    moments: Sequence[tuple[str, str, str]], victims: Sequence[str]
) -> list[tuple[tuple[str, str, str], str]]:
    """Every moment with two of the victims in rotation, so that each victim is killed at many moments."""
    n = len(victims)
    return [(moment, victims[(i + k) % n]) for i, moment in enumerate(moments) for k in (0, 1)]


def random_kills(seed: int, workers: int) -> list[Kill]:
    draw = random.Random(seed)
    everyone = [CONTROLLER, *SHARDS, *(f"worker {i}" for i in range(workers))]
    return [
        Kill(m, draw.choice(everyone), draw.randint(1, 4))
        for m in draw.sample(moments(workers), draw.randint(0, 3))
    ]


def random_twins(seed: int, workers: int) -> list[Twin]:
    """Second processes for one or two random members."""
    draw = random.Random(f"twins {seed}")
    members = [*SHARDS, *(f"worker {i}" for i in range(workers))]
    return [
        Twin(draw.choice(members), draw.randint(1, 25), draw.randint(10, 60))
        for _ in range(draw.randint(1, 2))
    ]


def links(workers: int) -> list[tuple[str, str]]:
    """All pairs (caller, callee) of programs that communicate."""
    names = [f"worker {i}" for i in range(workers)]
    members = [*names, *SHARDS]
    return [
        *((w, s) for w in names for s in SHARDS),
        *((m, CONTROLLER) for m in members),
        *((m, STORE) for m in (CONTROLLER, *members)),
        *((w, other) for w in names for other in names if w != other),
    ]


def has_answers(link: tuple[str, str]) -> bool:
    """Whether calls of this link have answers. Workers send each other parts of sums, which have none."""
    return not all(name.startswith("worker") for name in link)


def random_faults(seed: int, workers: int) -> FaultSchedule:
    """One or two dead links, a slow shard, or both."""
    draw = random.Random(f"lasting {seed}")
    number = draw.randint(0, 2)
    dead = [
        DeadLink(
            *link,
            first=draw.randint(1, 20),
            rounds=draw.randint(8, 40),
            answers_only=draw.random() < 0.5 and has_answers(link),
        )
        for link in draw.sample(links(workers), number)
    ]
    slow = [
        SlowShard(
            draw.choice(SHARDS),
            first=draw.randint(1, 20),
            rounds=draw.randint(10, 40),
            rounds_late=draw.choice((2, 6, 12, 30)),
            executes_late=draw.random() < 0.5,
        )
    ]
    return FaultSchedule(tuple(dead), tuple(slow) if not number or draw.random() < 0.5 else ())


STORE_FAULTS = ("unmounted", "read-only", "unavailable")


def add_store_faults(schedule: FaultSchedule, seed: int, workers: int) -> FaultSchedule:
    """Add one or two faults of the store, for one program or for all."""
    draw = random.Random(f"store {seed}")
    programs = ["", "", CONTROLLER, *SHARDS, *(f"worker {i}" for i in range(workers))]
    faults = [
        StoreFault(draw.choice(STORE_FAULTS), draw.randint(1, 30), draw.randint(2, 30), draw.choice(programs))
        for _ in range(draw.randint(1, 2))
    ]
    return schedule._replace(store=tuple(faults))


def random_options_with_store_faults(seed: int, workers: int) -> dict[str, Any]:
    """`random_options`, and a store that is unmounted, read-only or unavailable for a while."""
    options = random_options(seed, workers)
    return {**options, "faults": add_store_faults(options.get("faults", FaultSchedule()), seed, workers)}


HOUR_MS = 3_600_000


def random_options_with_wrong_clocks(seed: int, workers: int) -> dict[str, Any]:
    """`random_options`, and a wall clock of every program that is wrong by up to an hour for some rounds."""
    options, draw = random_options(seed, workers), random.Random(f"clocks {seed}")
    clocks = [
        WrongClock(who, draw.randint(1, 8), draw.randint(4, 100), draw.randint(-HOUR_MS, HOUR_MS))
        for who in (CONTROLLER, *SHARDS, *(f"worker {i}" for i in range(workers)))
    ]
    faults = options.get("faults", FaultSchedule())._replace(clocks=tuple(clocks))
    return {**options, "faults": faults}


def fault_options(seed: int, workers: int) -> dict[str, Any]:
    """Options of `Simulation`: a random fault schedule for two of three seeds."""
    return {"faults": random_faults(seed, workers), "limits": LIMITS} if seed % 3 else {}


def random_options(seed: int, workers: int) -> dict[str, Any]:
    """Options of `Simulation`: random kills, message faults and a fault schedule."""
    return {"seed": seed, "kills": random_kills(seed, workers), **fault_options(seed, workers)}


def run_schedule(simulation: Simulation, seed: int) -> Simulation:
    """Run to the end. For every seventh seed a second controller starts while the first one runs."""
    if seed % 7 == 0:
        for _ in range(4 + seed % 9):
            simulation.round()
        simulation.start(CONTROLLER)
    return simulation.run_with_optional_kills()


PHASED = {
    "exact": True,
    "num_workers": 1,
    "initial_workers": 2,
    "initial_batch_requests": 6,
    "unit_records": 7,
}
"""Options of a run in which two workers train the history in large batches, then one trains the stream."""

SWITCH_MOMENTS = [
    *before_and_after(CONTROLLER, "link", "claim"),
    *(
        (who, kind, "after")
        for who in ("worker 0", "worker 1")
        for kind in ("cut", "write", "commit", "restore", "start")
    ),
    ("shard 0", "freeze", "after"),
    ("shard 1", "commit", "before"),
]


def kill_in_switch(moment: tuple[str, str, str], victim: str) -> Kill:
    """Kill during the switch from history to stream. The third commit is the last one of the history; the
    second claim and restore belong to the switch."""
    occurrence = 2 if moment[1] in ("claim", "restore", "start") else 3
    if moment[0] == "worker 1" and occurrence == 2:
        occurrence = 1  # worker 1 does not train the stream
    return Kill(moment, victim, occurrence)
