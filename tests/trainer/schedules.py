"""Faults of a fleet, drawn from a seed: which processes die at which moments, which links are dead and which
shards slow, and for how long."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from tests.trainer.network import CONTROLLER, STORE, DeadLink, Lasting, SlowShard, StoreFault, WrongClock
from tests.trainer.simulator import Kill, Simulation, Twin

SHARDS = ("shard 0", "shard 1")
LIMITS = {"step_timeout_s": 5.0, "restore_timeout_s": 6.0}
"""Below what a slow shard can take, 0.25 s a round, so that it is slower than what its fleet waits for."""


def every(n: int, cases: Iterable[Any]) -> list[Any]:
    """Parameters of a test: every n-th of these cases; `make chaos` runs the others."""
    chaos = pytest.mark.chaos
    return [
        pytest.param(*(case if type(case) is tuple else (case,)), marks=[chaos] * (at % n > 0))
        for at, case in enumerate(cases)
    ]


def seeds(count: int, *, chaos: int, first: int = 0) -> list[Any]:
    """Parameters of a test, in ranges: `count` seeds from `first` on; `make chaos` runs those behind them."""
    marks = [pytest.mark.chaos, pytest.mark.timeout(900)]  # far less where nothing else runs
    return [
        *(range(at, at + 5) for at in range(first, first + count, 5)),
        *(pytest.param(range(at, at + 100), marks=marks) for at in range(first + count, first + chaos, 100)),
    ]


def around(who: str, *kinds: str) -> list[tuple[str, str, str]]:
    """The moments before and after each of these."""
    return [(who, kind, when) for kind in kinds for when in ("before", "after")]


def moments(workers: int) -> list[tuple[str, str, str]]:
    names = [f"worker {i}" for i in range(workers)]
    commands = ("restore", "start", "cut", "resume", "write", "commit")
    return [
        *(moment for name in names for moment in around(name, *commands)),
        *(moment for name in SHARDS for moment in around(name, "restore", "freeze", "write", "commit")),
        *around(CONTROLLER, "claim", "link"),
        *((name, "push", "before") for name in names),
    ]


def moments_and_victims(
    moments: Sequence[tuple[str, str, str]], victims: Sequence[str]
) -> list[tuple[tuple[str, str, str], str]]:
    """Every moment with two of the victims in rotation, so that each victim is killed at many moments."""
    n = len(victims)
    return [(moment, victims[(i + k) % n]) for i, moment in enumerate(moments) for k in (0, 1)]


def kills_of(seed: int, workers: int) -> list[Kill]:
    draw = random.Random(seed)
    everyone = [CONTROLLER, *SHARDS, *(f"worker {i}" for i in range(workers))]
    return [
        Kill(m, draw.choice(everyone), draw.randint(1, 4))
        for m in draw.sample(moments(workers), draw.randint(0, 3))
    ]


def twins_of(seed: int, workers: int) -> list[Twin]:
    """One or two second processes of some members."""
    draw = random.Random(f"twins {seed}")
    members = [*SHARDS, *(f"worker {i}" for i in range(workers))]
    return [
        Twin(draw.choice(members), draw.randint(1, 25), draw.randint(10, 60))
        for _ in range(draw.randint(1, 2))
    ]


def links(workers: int) -> list[tuple[str, str]]:
    """(who calls, whom) of all that talk to each other."""
    names = [f"worker {i}" for i in range(workers)]
    members = [*names, *SHARDS]
    return [
        *((w, s) for w in names for s in SHARDS),
        *((m, CONTROLLER) for m in members),
        *((m, STORE) for m in (CONTROLLER, *members)),
        *((w, other) for w in names for other in names if w != other),
    ]


def has_answers(link: tuple[str, str]) -> bool:
    """Workers tell each other their parts of sums, and nobody answers."""
    return not all(name.startswith("worker") for name in link)


def lasting_of(seed: int, workers: int) -> Lasting:
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
            late=draw.choice((2, 6, 12, 30)),
            begins_late=draw.random() < 0.5,
        )
    ]
    return Lasting(tuple(dead), tuple(slow) if not number or draw.random() < 0.5 else ())


STORE_FAULTS = ("unmounted", "read-only", "unavailable")


def with_store_faults(lasting: Lasting, seed: int, workers: int) -> Lasting:
    """Add one or two faults of the store, of one program or of all."""
    draw = random.Random(f"store {seed}")
    programs = ["", "", CONTROLLER, *SHARDS, *(f"worker {i}" for i in range(workers))]
    faults = [
        StoreFault(draw.choice(STORE_FAULTS), draw.randint(1, 30), draw.randint(2, 30), draw.choice(programs))
        for _ in range(draw.randint(1, 2))
    ]
    return lasting._replace(store=tuple(faults))


def drawn_with_store_faults(seed: int, workers: int) -> dict[str, Any]:
    """`drawn`, where the store is unmounted, read-only or unavailable for a while."""
    options = drawn(seed, workers)
    return {**options, "lasting": with_store_faults(options.get("lasting", Lasting()), seed, workers)}


HOUR_MS = 3_600_000


def drawn_with_wrong_clocks(seed: int, workers: int) -> dict[str, Any]:
    """`drawn`, where every program's clock is wrong by up to an hour, from some round on for some rounds."""
    options, draw = drawn(seed, workers), random.Random(f"clocks {seed}")
    clocks = [
        WrongClock(who, draw.randint(1, 8), draw.randint(4, 100), draw.randint(-HOUR_MS, HOUR_MS))
        for who in (CONTROLLER, *SHARDS, *(f"worker {i}" for i in range(workers)))
    ]
    faults = options.get("lasting", Lasting())._replace(clocks=tuple(clocks))
    return {**options, "lasting": faults}


def lasting(seed: int, workers: int) -> dict[str, Any]:
    """Options of a simulation: faults that last, for two of three seeds."""
    return {"lasting": lasting_of(seed, workers), "limits": LIMITS} if seed % 3 else {}


def drawn(seed: int, workers: int) -> dict[str, Any]:
    """Options of a simulation: kills and disorder by the seed, and faults that last."""
    return {"seed": seed, "kills": kills_of(seed, workers), **lasting(seed, workers)}


def run_schedule(simulation: Simulation, seed: int) -> Simulation:
    """Run to the end; for every seventh seed a second controller begins beside the first."""
    if seed % 7 == 0:
        for _ in range(4 + seed % 9):
            simulation.round()
        simulation.start(CONTROLLER)
    return simulation.run_as_far_as_kills_go()


PHASED = {
    "exact": True,
    "num_workers": 1,
    "initial_workers": 2,
    "initial_batch_requests": 6,
    "unit_records": 7,
}
"""History by two workers in large batches, then the stream by one."""

SWITCH_MOMENTS = [
    *around(CONTROLLER, "link", "claim"),
    *(
        (who, kind, "after")
        for who in ("worker 0", "worker 1")
        for kind in ("cut", "write", "commit", "restore", "start")
    ),
    ("shard 0", "freeze", "after"),
    ("shard 1", "commit", "before"),
]


def kill_in_switch(moment: tuple[str, str, str], victim: str) -> Kill:
    """The third commit is the last of history; the second claim and restore are those of the switch."""
    occurrence = 2 if moment[1] in ("claim", "restore", "start") else 3
    if moment[0] == "worker 1" and occurrence == 2:
        occurrence = 1  # it does not train the stream
    return Kill(moment, victim, occurrence)
