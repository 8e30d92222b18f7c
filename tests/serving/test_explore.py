"""Exploration: its propensities are the probabilities of what it does."""

from __future__ import annotations

import random
from collections import Counter
from itertools import permutations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from serving.ordering import best_order, explore, request_rng


def test_equal_scores_keep_the_requests_order() -> None:
    assert best_order(np.array([0.1, 0.5, 0.1, 0.5], np.float32)) == [1, 3, 0, 2]


def test_without_exploration_the_order_is_the_best_and_certain() -> None:
    assert explore([2, 0, 1], 0.0, random.Random(1)) == ([2, 0, 1], [1.0, 1.0, 1.0])
    assert explore([], 0.5, random.Random(1)) == ([], [])


def test_the_propensities_of_all_orders_sum_to_one() -> None:
    """Every order of three, each with its probability as logged: the product over its slots."""
    best, exploration, total = [1, 2, 0], 0.3, 0.0
    for order in permutations(best):
        left, probability = list(best), 1.0
        for candidate in order:
            at = left.index(candidate)
            probability *= exploration / len(left) + (1 - exploration) * (at == 0)
            left.pop(at)
        total += probability
    assert abs(total - 1) < 1e-12


def test_logged_propensities_are_the_frequencies_of_what_is_shown_first() -> None:
    draw = random.Random(7)
    first: Counter[int] = Counter()
    logged: dict[int, float] = {}
    for _ in range(20_000):
        order, propensities = explore([3, 1, 0, 2], 0.4, draw)
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
