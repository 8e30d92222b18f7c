"""The index from (table, id) to a row's position, compared with a dict; and the compiled helpers next to
it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from param_server import kernels
from param_server.embedding_table import KeyIndex, Keys
from param_server.kernels import LIVE
from roostream.schema.ids import buckets_of


def keys_of(pairs: list[tuple[int, int]]) -> Keys:
    return Keys(np.array([t for t, _ in pairs], np.uint32), np.array([i for _, i in pairs], np.int64))


PAIR = st.tuples(st.integers(0, 3), st.integers(-20, 20))
STEPS = st.lists(
    st.tuples(st.sampled_from(["add", "remove", "find"]), st.lists(PAIR, max_size=30)), max_size=30
)


@settings(max_examples=80)
@given(steps=STEPS, capacity=st.sampled_from([1, 4, 64]))
def test_behaves_as_a_dict_through_any_additions_and_removals(
    steps: list[tuple[str, list[tuple[int, int]]]], capacity: int
) -> None:
    index, model = KeyIndex(8, capacity), {}
    for action, pairs in steps:
        keys = keys_of(pairs)
        if action == "add":
            index.reserve(len(keys))
            positions, new = index.add(keys)
            for pair, position, is_new in zip(pairs, positions.tolist(), new.tolist(), strict=True):
                assert is_new == (pair not in model)
                assert model.setdefault(pair, position) == position
        elif action == "remove":
            assert index.remove(keys) == len([model.pop(p) for p in dict.fromkeys(pairs) if p in model])
        assert index.find(keys).tolist() == [model.get(p, -1) for p in pairs]
    assert index.num_live == len(model) == len(set(model.values()))
    assert sorted(index.flagged(LIVE).tolist()) == sorted(model.values())


def test_positions_and_keys_stay_when_the_index_grows() -> None:
    index = KeyIndex(64, 2)
    keys = Keys(np.ones(5000, np.uint32), np.arange(5000, dtype=np.int64) * 2**40)
    for part in np.array_split(np.arange(5000), 50):
        index.reserve(len(part))
        index.add(keys.take(part))
    row_U = index.find(keys)
    assert (index.id_N[row_U] == keys.id_U).all() and (index.table_N[row_U] == 1).all()
    assert (index.bucket_N[row_U] == buckets_of(keys.id_U, keys.table_U, 64)).all()


def test_keys_of_one_shard_spread_over_the_slots() -> None:
    """Keys of one bucket share the low bits of their hash, so slots are chosen by other bits."""
    ids = np.arange(400_000, dtype=np.int64)
    ids_of_bucket = ids[buckets_of(ids, 9, 64) == 5]
    index = KeyIndex(64, 8192)
    index.add_new(Keys(np.full(len(ids_of_bucket), 9, np.uint32), ids_of_bucket))
    assert longest_run(index) < 60


def longest_run(index: KeyIndex) -> int:
    """The largest number of slots that a search may have to visit."""
    used = (index.slots_C2[:, 1] != 0).astype(int)
    return int(np.diff(np.flatnonzero(np.diff(np.concatenate([[0], used, [0]]))))[::2].max())


def test_ids_that_were_chosen_to_collide_spread_over_the_slots_of_every_process() -> None:
    hash_U = np.arange(1000, dtype=np.uint64) * np.uint64(
        1 << 20
    )  # the high bits, which choose the slot, are 0
    chosen = Keys(np.zeros(1000, np.uint32), _unmixed(hash_U).view(np.int64))
    assert (_splitmix64(chosen.id_U.view(np.uint64)) == hash_U).all()
    known, secret = KeyIndex(64, 8192, secret=np.uint64(0)), KeyIndex(64, 8192)
    for index in (known, secret):
        assert index.add_new(chosen).all() and (index.find(chosen) == np.arange(1000)).all()
    assert longest_run(known) >= 1000 and longest_run(secret) < 60
    assert (known.bucket_N == secret.bucket_N).all(), (
        "buckets are stored, so they may not depend on the process's secret"
    )


def _unmixed(hash_U: np.ndarray) -> np.ndarray:
    """The inverse of `_splitmix64`."""
    x = hash_U ^ (hash_U >> np.uint64(31)) ^ (hash_U >> np.uint64(62))
    x = x * np.uint64(pow(0x94D049BB133111EB, -1, 1 << 64))
    x = x ^ (x >> np.uint64(27)) ^ (x >> np.uint64(54))
    x = x * np.uint64(pow(0xBF58476D1CE4E5B9, -1, 1 << 64))
    x = x ^ (x >> np.uint64(30)) ^ (x >> np.uint64(60))
    return x - np.uint64(0x9E3779B97F4A7C15)


def test_keys_of_one_home_slot_stay_findable_after_any_removals() -> None:
    """Keys with the same home slot, and those of the neighboring slots, lie in one run. A removal closes the
    gap, and every key behind it must stay findable."""
    index = KeyIndex(8, 256, secret=np.uint64(0))
    mask, shift = len(index.slots_C2) - 1, index.shift
    ids = np.arange(200_000, dtype=np.int64)
    home_U = (_splitmix64(ids.astype(np.uint64) ^ np.uint64(0)) >> shift).astype(np.int64)
    rng = np.random.default_rng(0)
    for first in (7, mask - 1):  # the second run wraps around the end of the table
        colliding_ids = [int(i) for k in range(3) for i in ids[home_U == (first + k) & mask][:8]]
        assert len(colliding_ids) == 24
        live_ids: set[int] = set()
        for _ in range(300):
            chosen = [int(i) for i in rng.choice(colliding_ids, 4, replace=False)]
            if rng.random() < 0.5:
                index.add_new(keys_of([(0, i) for i in chosen]))
                live_ids |= set(chosen)
            else:
                assert index.remove(keys_of([(0, i) for i in chosen])) == len(live_ids & set(chosen))
                live_ids -= set(chosen)
            found = index.find(keys_of([(0, i) for i in colliding_ids]))
            assert {
                i for i, position in zip(colliding_ids, found.tolist(), strict=True) if position >= 0
            } == live_ids
            assert index.num_live == len(live_ids) and sorted(
                index.id_N[index.flagged(LIVE)].tolist()
            ) == sorted(live_ids)
        index.remove(keys_of([(0, i) for i in colliding_ids]))


def _splitmix64(x: np.ndarray) -> np.ndarray:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@pytest.mark.parametrize("num_shards", [1, 2, 3, 64])
def test_splitting_by_shard_is_stable_and_agrees_with_buckets(num_shards: int) -> None:
    rng = np.random.default_rng(0)
    tables, ids = rng.integers(0, 5, 500).astype(np.uint32), rng.integers(-(2**62), 2**62, 500)
    order_U, starts_S1 = np.empty(500, np.int64), np.empty(num_shards + 1, np.int64)
    owner_B = rng.permutation(np.arange(64) % num_shards).astype(np.int32)
    kernels.split_by_shard(tables, ids, owner_B, num_shards, order_U, starts_S1)
    shard_U = owner_B[buckets_of(ids, tables, 64)]
    assert (order_U == np.argsort(shard_U, kind="stable")).all()
    assert (np.diff(starts_S1) == np.bincount(shard_U, minlength=num_shards)).all()
    assert (kernels.buckets(tables, ids, 64) == buckets_of(ids, tables, 64)).all()


@pytest.mark.parametrize(
    ("row", "publishable"),
    [
        ([3.0, 4.0], True),
        ([3.0, 4.1], False),
        ([np.nan, 0.0], False),
        ([np.inf, 0.0], False),
        ([3e38, 3e38], False),
    ],
)
def test_publishable_rows_are_finite_and_of_bounded_norm(row: list[float], publishable: bool) -> None:
    rows_MD = np.array([[0.0, 0.0], row], np.float32)
    assert kernels.publishable(rows_MD, 5.0).tolist() == [True, publishable]
