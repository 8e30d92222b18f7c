"""Faults of a fleet, drawn from a seed: which processes die at which moments, which links are dead and which
shards slow, and for how long."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tests.trainer.network import CONTROLLER, STORE, DeadLink, Lasting, SlowShard
from tests.trainer.simulator import Kill

SHARDS = ("shard 0", "shard 1")
LIMITS = {"step_timeout_s": 5.0, "restore_timeout_s": 6.0}
"""Below what a slow shard can take, 0.25 s a round, so that it is slower than what its fleet waits for."""


def moments(workers: int) -> list[tuple[str, str, str]]:
    names, both = [f"worker {i}" for i in range(workers)], ("before", "after")
    return [
        *(
            (w, kind, when)
            for w in names
            for kind in ("restore", "start", "cut", "resume", "write", "commit")
            for when in both
        ),
        *(
            (s, kind, when)
            for s in SHARDS
            for kind in ("restore", "freeze", "write", "commit")
            for when in both
        ),
        *((CONTROLLER, effect, when) for effect in ("claim", "link") for when in both),
        *((w, "push", "before") for w in names),
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
