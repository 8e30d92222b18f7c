"""How much a cache holds, and what goes first."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from param_server.embedding_table import Keys
from param_server.initial_rows import initial_rows
from param_server.replica.row_cache import CachedTable
from tests.param_server.shard_support import ADAGRAD, ITEM, small_schema, table_id

TABLES = small_schema().stacks[ADAGRAD]


def keys_of(*ids: int) -> Keys:
    return Keys(np.full(len(ids), table_id(ITEM), np.uint32), np.array(ids, np.int64))


def rows_of(ids: np.ndarray, version: int) -> np.ndarray:
    """float32 [U, 4]: (id, version, id + version, id - version)."""
    ids_U = ids.astype(np.float32)
    version_U = np.full_like(ids_U, version)
    return np.stack([ids_U, version_U, ids_U + version_U, ids_U - version_U], axis=1)


def stack_of(capacity: int = 64) -> CachedTable:
    return CachedTable(TABLES, seed=0, num_buckets=64, capacity=capacity)


def add(stack: CachedTable, ids: list[int], version: int = 1, there: bool = True) -> None:
    keys = keys_of(*[i for i in ids if stack.rows.index.find(keys_of(i))[0] < 0])
    n = len(keys)
    stack.add(keys, rows_of(keys.id_U, version), np.full(n, there), np.full(n, version, np.uint64))


def held(stack: CachedTable, *ids: int) -> list[bool]:
    return (stack.rows.index.find(keys_of(*ids)) >= 0).tolist()


def test_added_rows_are_found_and_missing_ones_are_initial() -> None:
    stack = stack_of()
    add(stack, [1, 2])
    add(stack, [3], there=False)
    keys = keys_of(1, 2, 3, 4)
    got, initial = stack.gather(keys, stack.find(keys)), initial_rows(0, keys.table_U, keys.id_U, 4, 0.05)
    assert (
        got[:2].tobytes() == rows_of(np.array([1, 2]), 1).tobytes()
        and got[2:].tobytes() == initial[2:].tobytes()
    )
    assert stack.num_keys == 3 and stack.num_without_row == 1


def test_recently_used_keys_stay() -> None:
    stack = stack_of(64)
    add(stack, list(range(64)))
    for start in range(100, 160, 10):
        stack.find(keys_of(*range(20)))
        add(stack, list(range(start, start + 10)))
    assert all(held(stack, *range(20))) and stack.num_keys == 64 and stack.num_evicted == 60


def test_keys_without_a_row_have_a_quarter_at_most() -> None:
    stack = stack_of(64)
    add(stack, list(range(1000, 1200)), there=False)
    assert stack.num_keys == stack.num_without_row == 16 and all(held(stack, *range(1184, 1200)))
    add(stack, list(range(64)))
    assert stack.num_keys == 64 and stack.num_without_row <= 16


def test_a_delta_updates_only_cached_older_rows() -> None:
    stack = stack_of()
    add(stack, [1, 2], version=5)
    add(stack, [3], version=7)
    add(stack, [4], version=5, there=False)
    stack.update(keys_of(1, 3, 4, 9, 2), rows_of(np.array([1, 3, 4, 9]), 6), 6)
    keys = keys_of(1, 2, 3, 4)
    got = stack.gather(keys, stack.find(keys))
    assert (
        got[[0, 2, 3], 1].tolist() == [6, 7, 6]
        and got[1].tobytes() == stack.gather(keys_of(2), np.array([-1]))[0].tobytes()
    )
    assert held(stack, 9) == [False] and stack.num_without_row == 1


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["add", "none", "find", "gone", "live", "drop"]), st.integers(0, 150)),
        max_size=40,
    )
)
def test_the_bounds_hold_and_the_count_of_keys_without_a_row_is_true(steps: list[tuple[str, int]]) -> None:
    stack = stack_of(64)
    for version, (what, first) in enumerate(steps, 2):
        ids = list(range(first, first + 25))
        match what:
            case "add" | "none":
                add(stack, ids, version, there=what == "add")
            case "find":
                stack.find(keys_of(*ids))
            case "gone":
                stack.update(keys_of(*ids), np.zeros((0, 4), np.float32), version)
            case "live":
                stack.update(keys_of(*ids), rows_of(np.array(ids), version), version)
            case "drop":
                stack.drop(first % 64, version)
        flags_N = stack.rows.index.flags_N
        assert stack.num_keys <= 64 and len(flags_N) <= 256
        assert stack.num_without_row == int(((flags_N & 32 != 0) & (flags_N & 1 != 0)).sum())
