"""The order of an answer, with a small share of it drawn at random, and how likely each draw was.

Policy (ε-greedy, slot by slot, ε = `exploration`): for each slot from the top, with probability ε take one of the remaining
candidates uniformly, otherwise the best of them. With m candidates remaining, the candidate that was taken had, given the
slots above it, the probability

    p = ε / m + (1 − ε) · [it is the best remaining]

That is the propensity logged with it; the product over a request's candidates is the probability of the whole order. With
ε = 0 nothing is drawn and none are logged (absent = 1). Draws are a function of (seed, key, request id, first position): a
client that repeats a request gets the same order.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from roostream.schema.ids import hash64


def best_order(scores_n: np.ndarray) -> list[int]:
    """Candidates, best first; equal scores keep the request's order."""
    return np.argsort(-scores_n, kind="stable").tolist()


def explore(best: list[int], exploration: float, draw: random.Random) -> tuple[list[int], list[float]]:
    """(candidates in the order to show, propensity of each candidate, by candidate)."""
    remaining, order, propensities = list(best), [], [1.0] * len(best)
    while remaining:
        m = len(remaining)
        at = draw.randrange(m) if draw.random() < exploration else 0
        candidate = remaining.pop(at)
        order.append(candidate)
        propensities[candidate] = exploration / m + (1.0 - exploration) * (at == 0)
    return order, propensities


def request_rng(seed: int, key: bytes, request_id: str, first_position: int) -> random.Random:
    """The random numbers of a request."""
    return random.Random(hash64(key + request_id.encode() + f"/{seed}/{first_position}".encode()))


# ---- Two rankers in one list: team draft, and who is credited for what users do with it.
#
# Team-Draft Interleaving (Radlinski, Kurup, Joachims: "How Does Clickthrough Data Reflect Retrieval Quality?", CIKM 2008, algorithm
# 2): in each round a coin says who picks first; each ranker puts its best candidate that isn't in the list yet into the next slot,
# and that candidate is on its team.
#
# Propensities are exact. After a round both teams are equally large whatever the coins said, so a round depends on the slots above
# it alone: its first slot is either ranker's best remaining, 1/2 each, or certain where both mean the same candidate. Its second
# slot is certain where the first was contested, since the other ranker then takes its own; where both had meant the same
# candidate, it is either one's next, 1/2 each, or certain again.


OURS, RIVAL = 0, 1


class Draft(NamedTuple):
    """By slot: `order`; by candidate: `team_n` (OURS, RIVAL) and `propensities` given the slots above."""

    order: list[int]
    team_n: list[int]
    propensities: list[float]


def team_draft(ours: Sequence[int], rival: Sequence[int], draw: random.Random) -> Draft:
    """Both rankings of the same n candidates, best first → one list."""
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
    """A ranking that is read from the top, each candidate passed over at most once."""

    def __init__(self, ranking: Sequence[int]) -> None:
        self.ranking, self.at = ranking, 0

    def first(self, shown: set[int]) -> int:
        while self.ranking[self.at] in shown:
            self.at += 1
        return self.ranking[self.at]
