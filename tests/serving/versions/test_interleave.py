"""Team draft: fair, whole, and with the probabilities that it says."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.ordering import OURS, RIVAL, Draft, team_draft


class Coins(random.Random):
    """What a coin shows is given."""

    def __init__(self, sides: Sequence[int]) -> None:
        super().__init__(0)
        self.sides = iter(sides)

    def randrange(self, start: int, stop: int | None = None, step: int = 1) -> int:
        return next(self.sides)


def drafts(ours: list[int], rival: list[int]) -> list[Draft]:
    """For all coins, each as likely."""
    return [
        team_draft(ours, rival, Coins(sides))
        for sides in itertools.product((OURS, RIVAL), repeat=(len(ours) + 1) // 2)
    ]


RANKINGS = st.integers(1, 5).flatmap(
    lambda n: st.tuples(st.permutations(range(n)), st.permutations(range(n)))
)


def test_each_picks_its_best_that_is_left_and_the_coin_says_who_is_first() -> None:
    draft = team_draft([0, 1, 2, 3], [3, 0, 2, 1], Coins([RIVAL, OURS]))
    assert draft.order == [3, 0, 1, 2]
    assert [draft.team_n[c] for c in draft.order] == [RIVAL, OURS, OURS, RIVAL]


@settings(max_examples=60, deadline=None)
@given(RANKINGS)
def test_propensities_are_those_of_all_coins_given_the_slots_above(
    rankings: tuple[list[int], list[int]],
) -> None:
    found = drafts(*map(list, rankings))
    for slot in range(len(rankings[0])):
        above = Counter(tuple(d.order[:slot]) for d in found)
        shown = Counter(tuple(d.order[: slot + 1]) for d in found)
        for draft in found:
            share = shown[tuple(draft.order[: slot + 1])] / above[tuple(draft.order[:slot])]
            assert draft.propensities[draft.order[slot]] == pytest.approx(share)


@settings(max_examples=60, deadline=None)
@given(RANKINGS)
def test_every_candidate_is_shown_once_and_teams_are_equally_large(
    rankings: tuple[list[int], list[int]],
) -> None:
    for draft in drafts(*map(list, rankings)):
        assert sorted(draft.order) == sorted(rankings[0])
        assert abs(draft.team_n.count(OURS) - draft.team_n.count(RIVAL)) <= 1


def test_rankers_that_agree_give_their_order_for_sure() -> None:
    for draft in drafts([2, 0, 1], [2, 0, 1]):
        assert draft.order == [2, 0, 1] and draft.propensities == [1.0] * 3


def test_each_ranker_has_as_many_first_slots_over_many_requests() -> None:
    teams = Counter(team_draft([0, 1], [1, 0], random.Random(n)).order[0] for n in range(2000))
    assert 900 < teams[0] < 1100
