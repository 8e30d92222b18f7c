"""No step moves more than it may, and every bucket keeps one owner."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from param_server.placement.bucket_moves import balanced, evened, towards
from param_server.placement.plan import imbalance
from roostream.errors import ConfigError
from roostream.runtime.bucket_map import BucketMap, moved


@settings(max_examples=40)
@given(st.integers(0, 10_000), st.integers(1, 9), st.integers(1, 9), st.floats(0, 1))
def test_a_step_moves_no_more_than_it_may_and_never_away_from_the_goal(
    seed: int, n: int, m: int, most: float
) -> None:
    random = np.random.default_rng(seed)
    before, goal = (BucketMap(random.integers(0, k, 32).astype(np.int32), k) for k in (n, m))
    after = towards(before, goal, random.random(32), most)
    changed = moved(before, after)
    gone = int((before.owner_B >= m).sum())
    assert len(changed) <= max(int(most * 32), gone)
    assert (after.owner_B[changed] == goal.owner_B[changed]).all() and after.num_owners == m
    assert set(changed) <= set(moved(before, goal))


def test_balanced_buckets_are_more_even_than_modulo() -> None:
    load_B = np.random.default_rng(0).pareto(2.0, 64)
    evenly = balanced(load_B, 8)
    of = {
        name: imbalance(np.bincount(m.owner_B, load_B, 8))
        for name, m in (("even", evenly), ("mod", BucketMap.modulo(64, 8)))
    }
    assert of["even"] < of["mod"]
    assert (balanced(load_B, 8).owner_B == evenly.owner_B).all()


@settings(max_examples=40)
@given(st.integers(0, 10_000), st.integers(1, 9), st.integers(1, 9), st.floats(0, 1))
def test_an_evener_map_moves_few_buckets_and_leaves_no_owner_without(
    seed: int, n: int, m: int, most: float
) -> None:
    random = np.random.default_rng(seed)
    load_B, before = random.pareto(2.0, 32), BucketMap.modulo(32, n)
    after = evened(before, m, load_B, most)
    gone = int((before.owner_B >= m).sum())
    assert len(moved(before, after)) <= max(int(most * 32), gone, m - n, 0)
    assert all(after.buckets_of(owner) for owner in range(m)) and after.num_owners == m
    if n == m:
        each = [imbalance(np.bincount(its.owner_B, load_B, m)) for its in (before, after)]
        assert each[1] <= each[0] + 1e-9


def test_two_owners_become_three_by_moving_a_third_and_come_back_whole() -> None:
    load_B = np.ones(60)
    three = evened(BucketMap.modulo(60, 2), 3, load_B)
    assert len(moved(BucketMap.modulo(60, 2), three)) == 20 and np.bincount(three.owner_B).tolist() == [
        20,
        20,
        20,
    ]
    two = evened(three, 2, load_B)
    assert len(moved(three, two)) == 20 and np.bincount(two.owner_B).tolist() == [30, 30]
    assert evened(two, 2, load_B) == BucketMap(two.owner_B, 2, two.version + 1), "what is even stays"


def test_the_bucket_that_is_half_of_the_gap_goes() -> None:
    before = BucketMap(np.array([0, 0, 0, 1], np.int32), 2)
    assert moved(before, evened(before, 2, np.array([5.0, 3.0, 2.0, 0.0]))).tolist() == [0]


def test_buckets_without_rows_are_spread_too_and_more_owners_than_buckets_are_refused() -> None:
    after = evened(BucketMap.modulo(8, 1), 4, np.zeros(8))
    assert np.bincount(after.owner_B).tolist() == [2, 2, 2, 2]
    with pytest.raises(ConfigError):
        evened(BucketMap.modulo(8, 1), 9, np.zeros(8))
