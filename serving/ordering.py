"""The order of the candidates in an answer: by score, with exploration, or interleaved from two rankers.

Exploration is ε-greedy per slot (ε = `exploration`): from the top, take a uniformly random remaining
candidate with probability ε, else the best remaining one. Given the slots above, a candidate taken from m
remaining ones had the probability

    p = ε / m + (1 − ε) · [it is the best remaining]

This propensity is logged with the candidate; the product over all candidates is the probability of the whole
order. With ε = 0 no propensities are logged (absent = 1). Draws depend on (seed, key, request id, first
position) only: a repeated request gets the same order.

Interleaving is Team-Draft (Radlinski, Kurup, Joachims: "How Does Clickthrough Data Reflect Retrieval
Quality?", CIKM 2008, algorithm 2): in each round a coin decides who picks first; each ranker puts its best
remaining candidate into the next slot, and the candidate joins that ranker's team. After each round both
teams have equal size, so a round depends on the slots above alone, and propensities are exact. The first slot
of a round holds either ranker's best, 1/2 each, or is certain if both agree. If they disagreed, the second
slot is certain, since the other ranker takes its own best; if they agreed, it holds either ranker's next
best, 1/2 each, or is certain if both agree again.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from roostream.schema.ids import hash64


def best_order(scores_n: np.ndarray) -> list[int]:
    """Candidate indices, best first; equal scores keep the request's order."""
    return np.argsort(-scores_n, kind="stable").tolist()


def explore(best: list[int], exploration: float, draw: random.Random) -> tuple[list[int], list[float]]:
    """Return (candidates in the order to show, propensity by candidate)."""
    remaining, order, propensities = list(best), [], [1.0] * len(best)
    while remaining:
        m = len(remaining)
        at = draw.randrange(m) if draw.random() < exploration else 0
        candidate = remaining.pop(at)
        order.append(candidate)
        propensities[candidate] = exploration / m + (1.0 - exploration) * (at == 0)
    return order, propensities


def request_rng(seed: int, key: bytes, request_id: str, first_position: int) -> random.Random:
    """The random generator of a request, a function of its arguments."""
    return random.Random(hash64(key + request_id.encode() + f"/{seed}/{first_position}".encode()))


OURS, RIVAL = 0, 1


class Draft(NamedTuple):
    """`order` is by slot; `team_n` (OURS or RIVAL) and `propensities`, given the slots above, are by
    candidate."""

    order: list[int]
    team_n: list[int]
    propensities: list[float]


def team_draft(ours: Sequence[int], rival: Sequence[int], draw: random.Random) -> Draft:
    """Merge two rankings of the same n candidates, best first, into one list."""
    n = len(ours)
    draft = Draft([], [OURS] * n, [1.0] * n)
    best = (_Remaining(ours), _Remaining(rival))
    shown: set[int] = set()

    def pick(team: int, propensity: float) -> None:
        candidate = best[team].first(shown)
        shown.add(candidate)
        draft.order.append(candidate)
        draft.team_n[candidate], draft.propensities[candidate] = team, propensity

    while len(draft.order) < n:
        first = draw.randrange(2)
        contested = best[OURS].first(shown) != best[RIVAL].first(shown)
        pick(first, 0.5 if contested else 1.0)
        if len(draft.order) < n:
            same = contested or best[OURS].first(shown) == best[RIVAL].first(shown)
            pick(1 - first, 1.0 if same else 0.5)
    return draft


class _Remaining:
    """A ranking that is read from the top; each candidate is skipped at most once."""

    def __init__(self, ranking: Sequence[int]) -> None:
        self.ranking, self.at = ranking, 0

    def first(self, shown: set[int]) -> int:
        while self.ranking[self.at] in shown:
            self.at += 1
        return self.ranking[self.at]
