"""Eviction policies decide which keys get rows and which rows go. Their state is committed, rolled back and
restored with the rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from param_server.embedding_table import KeyIndex, Keys
from param_server.eviction import NEVER, ExpiryPolicy
from param_server.key_value_store import MemoryKeyValueStore
from param_server.server import Shard
from roostream.errors import CheckpointError
from roostream.schema.schema import Table
from tests.param_server.shard_support import (
    ADAGRAD,
    ITEM,
    ROWWISE,
    AdmitAtSecondPush,
    commit,
    make_shard,
    pull_from,
    push_to,
    started_shard,
    state_of,
)
from tests.trainer.memory_store import MemoryStore


def pushes_seen(shard: Shard) -> dict[tuple[int, int], int]:
    policy = shard.tables[ADAGRAD].eviction
    assert isinstance(policy, AdmitAtSecondPush)
    return dict(policy.seen)


def test_expiry_admits_every_key_and_evicts_old_ones() -> None:
    short, never = Table(name="a", dim=2, expire_after_ms=100), Table(name="b", dim=2)
    policy, index = ExpiryPolicy([short, never]), KeyIndex(4)
    keys = Keys(np.array([short.id, short.id, never.id], np.uint32), np.array([1, 2, 1], np.int64))
    assert policy.admit(keys).all()
    index.add_new(keys)
    row_U, stamp_ms_N = index.find(keys), np.zeros(index.capacity, np.int64)
    stamp_ms_N[row_U] = [899, 900, NEVER]
    assert policy.evict(1000, index, stamp_ms_N).tolist() == [row_U[0]]
    assert ExpiryPolicy([never]).evict(1000, index, stamp_ms_N).tolist() == []
    assert policy.state() == b""


def test_g8_an_eviction_of_too_many_rows_is_refused_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    table = Table(name="a", dim=2, expire_after_ms=100)
    policy, index = ExpiryPolicy([table], max_share=0.5), KeyIndex(4)
    index.add_new(Keys(np.full(4, table.id, np.uint32), np.arange(4, dtype=np.int64)))
    stamp_ms_N = np.zeros(index.capacity, np.int64)
    stamp_ms_N[:4] = [10, 20, 30, 40]
    assert len(policy.evict(121, index, stamp_ms_N)) == 2 and not policy.num_spared, (
        "half of the rows may expire at once"
    )
    assert policy.evict(1 << 50, index, stamp_ms_N).tolist() == []
    assert policy.num_spared == 4 and "4 of 4 rows would expire at once" in caplog.text
    assert len(ExpiryPolicy([table]).evict(1 << 50, index, stamp_ms_N)) == 4


def test_g8_the_limit_of_expired_rows_holds_for_each_table_of_a_stack(
    caplog: pytest.LogCaptureFixture,
) -> None:
    small, large = Table(name="small", dim=2, expire_after_ms=100), Table(name="large", dim=2)
    policy, index = ExpiryPolicy([small, large], max_share=0.5), KeyIndex(4)
    index.add_new(
        Keys(np.array([small.id] * 4 + [large.id] * 100, np.uint32), np.arange(104, dtype=np.int64))
    )
    stamp_ms_N = np.zeros(index.capacity, np.int64)
    for _ in range(2):
        assert len(policy.evict(1 << 50, index, stamp_ms_N)) == 0
    assert policy.num_spared == 8 and caplog.text.count("table small: 4 of 4 rows") == 1
    stamp_ms_N[:2] = 1 << 50
    assert len(policy.evict(1 << 50, index, stamp_ms_N)) == 2


def test_rows_that_are_not_admitted_keep_their_initial_value() -> None:
    shard = started_shard(eviction=AdmitAtSecondPush)
    before = pull_from(shard, ITEM, 1, 2)
    push_to(shard, 1, ids=(1,))
    assert shard.stats()["rows"] == {ADAGRAD: 0, ROWWISE: 0} and shard.stats()["dirty"] == 0
    gradient_UD = np.array([[9] * 4, [1, 2, 3, 4]], np.float32)
    push_to(shard, 2, ids=(2, 1), gradient_UD=gradient_UD)
    reference = started_shard()
    push_to(reference, 1, ids=(1,), gradient_UD=gradient_UD[1:], time_ms=2000)
    assert state_of(shard) == state_of(reference)
    assert pull_from(shard, ITEM, 2).tobytes() == before[1:].tobytes()


def shard_with_policy(**kwargs: Any) -> tuple[Shard, MemoryKeyValueStore, MemoryStore]:
    blobs, store = MemoryKeyValueStore(), MemoryStore()
    return started_shard(blobs=blobs, store=store, eviction=AdmitAtSecondPush, **kwargs), blobs, store


def test_a_commit_that_changes_only_the_state_of_the_policy_is_kept() -> None:
    shard, blobs, store = shard_with_policy()
    push_to(shard, 1, ids=(1,))
    first = commit(shard, store, 1)
    push_to(shard, 2, ids=(2,))
    second = commit(shard, store, 2)
    third = commit(shard, store, 3)
    for name, ids in ((third, {1, 2}), (second, {1, 2}), (first, {1})):
        restarted = make_shard(blobs, store, eviction=AdmitAtSecondPush)
        restarted.restore(9, name)
        assert {id_ for _, id_ in pushes_seen(restarted)} == ids
    assert [s.name for s in restarted.committed.segments] == ["1-1"], (
        "the segment has no rows but the state of the policy"
    )


def test_a_damaged_policy_state_is_never_loaded() -> None:
    shard, blobs, store = shard_with_policy()
    push_to(shard, 1, ids=(1,))
    name = commit(shard, store, 1)
    (key,) = blobs.keys(b"r/")
    blobs.write([(key, b"[]")])
    restarted = make_shard(blobs, store, eviction=AdmitAtSecondPush)
    with pytest.raises(CheckpointError):
        restarted.restore(2, name)
    assert not restarted.ready
