"""Every bucket has one owner, before and after."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.bucket_map import BucketMap, balanced, moved, towards
from placement.cost import imbalance
from roo.errors import CheckpointError, ConfigError


def test_a_map_comes_back_and_modulo_is_what_no_map_means() -> None:
    modulo = BucketMap.modulo(64, 3)
    assert modulo.is_modulo and modulo.version == 0 and modulo.buckets_of(1)[:3] == [1, 4, 7]
    again = BucketMap.of_plain(modulo.plain())
    assert (again.owner_B == modulo.owner_B).all() and again.num_owners == 3


@pytest.mark.parametrize("owners", [[0, 3], [-1, 0], []])
def test_a_bucket_without_an_owner_is_refused(owners: list[int]) -> None:
    with pytest.raises(ConfigError, match=r"an owner of 0\.\.2 for every bucket"):
        BucketMap(np.array(owners, np.int32), 3)
    with pytest.raises(CheckpointError):
        BucketMap.of_plain({"owners": owners, "num_owners": 3, "version": 1})


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


def test_the_number_of_buckets_cannot_change() -> None:
    with pytest.raises(ConfigError, match="expected 64 buckets, got 32"):
        moved(BucketMap.modulo(64, 2), BucketMap.modulo(32, 2))


def test_balanced_buckets_are_more_even_than_modulo() -> None:
    load_B = np.random.default_rng(0).pareto(2.0, 64)
    evenly = balanced(load_B, 8)
    of = {name: imbalance(np.bincount(m.owner_B, load_B, 8)) for name, m in (("even", evenly), ("mod", BucketMap.modulo(64, 8)))}
    assert of["even"] < of["mod"]
    assert (balanced(load_B, 8).owner_B == evenly.owner_B).all()
