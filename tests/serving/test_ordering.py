"""Exploration and team-draft interleaving: the logged propensities equal the probabilities of the shown
orders."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.ordering import OURS, RIVAL, Draft, best_order, explore, request_rng, team_draft


def test_equal_scores_keep_the_requests_order() -> None:
    assert best_order(np.array([0.1, 0.5, 0.1, 0.5], np.float32)) == [1, 3, 0, 2]


def test_without_exploration_the_order_is_by_score() -> None:
    assert explore([2, 0, 1], 0.0, random.Random(1)) == ([2, 0, 1], [1.0, 1.0, 1.0])
    assert explore([], 0.5, random.Random(1)) == ([], [])


def test_the_propensities_of_all_orders_sum_to_one() -> None:
    """The probability of an order is the product of the propensities of its slots."""
    best, exploration, total = [1, 2, 0], 0.3, 0.0
    for order in permutations(best):
        left, probability = list(best), 1.0
        for candidate in order:
            at = left.index(candidate)
            probability *= exploration / len(left) + (1 - exploration) * (at == 0)
            left.pop(at)
        total += probability
    assert abs(total - 1) < 1e-12


def test_logged_propensities_equal_observed_frequencies() -> None:
    rng = random.Random(7)
    first: Counter[int] = Counter()
    logged: dict[int, float] = {}
    for _ in range(20_000):
        order, propensities = explore([3, 1, 0, 2], 0.4, rng)
        first[order[0]] += 1
        logged[order[0]] = propensities[order[0]]
    assert logged == {3: 0.4 / 4 + 0.6, 1: 0.1, 0: 0.1, 2: 0.1}
    for candidate, propensity in logged.items():
        assert abs(first[candidate] / 20_000 - propensity) < 0.02


@given(st.permutations(range(6)), st.floats(0, 1), st.integers())
def test_every_candidate_is_shown_once_with_a_propensity_above_zero(
    best: list[int], share: float, seed: int
) -> None:
    order, propensities = explore(list(best), share, random.Random(seed))
    assert sorted(order) == list(range(6))
    assert all(0 < p <= 1 for p in propensities)


def test_a_repeated_request_gets_the_same_order() -> None:
    def order(request_id: str) -> list[int]:
        return explore(list(range(30)), 0.5, request_rng(1, b"userkey!", request_id, 0))[0]

    assert order("a") == order("a") != order("b")


# Tests of team draft: it is fair, shows every candidate, and logs right propensities.


class FixedCoins(random.Random):
    """A random generator whose coin flips are given."""

    def __init__(self, sides: Sequence[int]) -> None:
        super().__init__(0)
        self.sides = iter(sides)

    def randrange(self, start: int, stop: int | None = None, step: int = 1) -> int:
        return next(self.sides)


def all_drafts(ours: list[int], rival: list[int]) -> list[Draft]:
    """Return the drafts for all sequences of coin flips, which are equally likely."""
    return [
        team_draft(ours, rival, FixedCoins(sides))
        for sides in itertools.product((OURS, RIVAL), repeat=(len(ours) + 1) // 2)
    ]


RANKINGS = st.integers(1, 5).flatmap(
    lambda n: st.tuples(st.permutations(range(n)), st.permutations(range(n)))
)


def test_team_draft_picks_the_best_remaining_candidate_of_each_ranker() -> None:
    draft = team_draft([0, 1, 2, 3], [3, 0, 2, 1], FixedCoins([RIVAL, OURS]))
    assert draft.order == [3, 0, 1, 2]
    assert [draft.team_n[c] for c in draft.order] == [RIVAL, OURS, OURS, RIVAL]


@settings(max_examples=60)
@given(RANKINGS)
def test_draft_propensities_equal_enumerated_coin_flips(rankings: tuple[list[int], list[int]]) -> None:
    found = all_drafts(*map(list, rankings))
    for slot in range(len(rankings[0])):
        above = Counter(tuple(d.order[:slot]) for d in found)
        shown = Counter(tuple(d.order[: slot + 1]) for d in found)
        for draft in found:
            share = shown[tuple(draft.order[: slot + 1])] / above[tuple(draft.order[:slot])]
            assert draft.propensities[draft.order[slot]] == pytest.approx(share)


@settings(max_examples=60)
@given(RANKINGS)
def test_a_draft_shows_every_candidate_once_with_equal_teams(rankings: tuple[list[int], list[int]]) -> None:
    for draft in all_drafts(*map(list, rankings)):
        assert sorted(draft.order) == sorted(rankings[0])
        assert abs(draft.team_n.count(OURS) - draft.team_n.count(RIVAL)) <= 1


def test_rankers_that_agree_give_their_order_with_certainty() -> None:
    for draft in all_drafts([2, 0, 1], [2, 0, 1]):
        assert draft.order == [2, 0, 1] and draft.propensities == [1.0] * 3


def test_each_ranker_gets_half_of_the_first_slots() -> None:
    teams = Counter(team_draft([0, 1], [1, 0], random.Random(n)).order[0] for n in range(2000))
    assert 900 < teams[0] < 1100
