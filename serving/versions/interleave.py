"""Two rankers in one list: team draft, and who is credited for what users do with it.

Team-Draft Interleaving (Radlinski, Kurup, Joachims: "How Does Clickthrough Data Reflect Retrieval Quality?", CIKM 2008, algorithm
2): in each round a coin says who picks first; each ranker puts its best candidate that isn't in the list yet into the next slot,
and that candidate is on its team.

Propensities are exact. After a round both teams are equally large whatever the coins said, so a round depends on the slots above
it alone: its first slot is either ranker's best remaining, 1/2 each, or certain where both mean the same candidate. Its second
slot is certain where the first was contested, since the other ranker then takes its own; where both had meant the same
candidate, it is either one's next, 1/2 each, or certain again.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

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
