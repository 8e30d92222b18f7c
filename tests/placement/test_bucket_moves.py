"""No step moves more than it may, and every bucket keeps one owner."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.bucket_moves import balanced, towards
from placement.cost import imbalance
from runtime.layout.bucket_map import BucketMap, moved


@settings(max_examples=40)
@given(st.integers(0, 10_000), st.integers(1, 9), st.integers(1, 9), st.floats(0, 1))
def test_a_step_moves_no_more_than_it_may_and_never_away_from_the_goal(seed: int, n: int, m: int, most: float) -> None:
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
    of = {name: imbalance(np.bincount(m.owner_B, load_B, 8)) for name, m in (("even", evenly), ("mod", BucketMap.modulo(64, 8)))}
    assert of["even"] < of["mod"]
    assert (balanced(load_B, 8).owner_B == evenly.owner_B).all()
