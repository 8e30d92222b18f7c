"""Balanced bucket maps: few buckets move, and every owner keeps at least one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from param_server.placement.bucket_moves import balanced_map
from param_server.placement.plan import imbalance
from roostream.errors import ConfigError
from roostream.runtime.bucket_map import BucketMap, moved


@settings(max_examples=20)
@given(st.integers(0, 10_000), st.integers(1, 9), st.integers(1, 9), st.floats(0, 1))
def test_a_more_even_map_moves_few_buckets_and_leaves_no_owner_without_one(
    seed: int, n: int, m: int, max_moved_share: float
) -> None:
    random = np.random.default_rng(seed)
    load_B, before = random.pareto(2.0, 32), BucketMap.modulo(32, n)
    after = balanced_map(before, m, load_B, max_moved_share)
    num_orphaned = int((before.owner_B >= m).sum())
    assert len(moved(before, after)) <= max(int(max_moved_share * 32), num_orphaned, m - n, 0)
    assert all(after.buckets_of(owner) for owner in range(m)) and after.num_owners == m
    if n == m:
        imbalances = [imbalance(np.bincount(bucket_map.owner_B, load_B, m)) for bucket_map in (before, after)]
        assert imbalances[1] <= imbalances[0] + 1e-9


def test_two_owners_become_three_and_two_again() -> None:
    load_B = np.ones(60)
    three = balanced_map(BucketMap.modulo(60, 2), 3, load_B)
    assert len(moved(BucketMap.modulo(60, 2), three)) == 20 and np.bincount(three.owner_B).tolist() == [
        20,
        20,
        20,
    ]
    two = balanced_map(three, 2, load_B)
    assert len(moved(three, two)) == 20 and np.bincount(two.owner_B).tolist() == [30, 30]
    assert balanced_map(two, 2, load_B) == BucketMap(two.owner_B, 2, two.version + 1), (
        "an even map must not change"
    )


def test_the_bucket_that_closes_the_gap_best_is_moved() -> None:
    before = BucketMap(np.array([0, 0, 0, 1], np.int32), 2)
    assert moved(before, balanced_map(before, 2, np.array([5.0, 3.0, 2.0, 0.0]))).tolist() == [0]


def test_buckets_without_rows_are_spread_too_and_more_owners_than_buckets_are_refused() -> None:
    after = balanced_map(BucketMap.modulo(8, 1), 4, np.zeros(8))
    assert np.bincount(after.owner_B).tolist() == [2, 2, 2, 2]
    with pytest.raises(ConfigError):
        balanced_map(BucketMap.modulo(8, 1), 9, np.zeros(8))
