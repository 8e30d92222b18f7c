"""A shard with a full disk, damaged segments, or a step that fails midway."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from param_server.embedding_table import KeyIndex
from param_server.eviction import ExpiryPolicy
from param_server.key_value_store import MemoryKeyValueStore
from param_server.segments import FEW_SEGMENTS, Segments
from param_server.server import Shard, ShardRpcHandler
from param_server.table import shapes_of
from roostream.errors import CheckpointError, UnavailableError
from tests.param_server.shard_support import (
    ADAGRAD,
    ITEM,
    ROWWISE,
    TOPIC,
    Follower,
    PublishLoop,
    commit,
    keys,
    make_shard,
    small_schema,
    started_shard,
    state_of,
)
from tests.param_server.shard_support import pull_from as pull
from tests.param_server.shard_support import push_to as push
from tests.trainer.memory_store import MemoryStore


class FullDisk(MemoryKeyValueStore):
    """A store that refuses every write while `full` is set."""

    full = False

    def write(
        self, puts: Iterable[tuple[bytes, bytes]], deletes: Iterable[bytes] = (), *, sync: bool = False
    ) -> None:
        if self.full:
            raise UnavailableError("segments can't be written: no space; free disk space")
        super().write(puts, deletes, sync=sync)


def segments_of(blobs: MemoryKeyValueStore) -> set[str]:
    return {key[2:].decode() for key in blobs.keys(b"d/")}


# A full disk


def test_an_aborted_commit_leaves_no_segment() -> None:
    blobs, store = MemoryKeyValueStore(), MemoryStore()
    shard = started_shard(blobs=blobs, store=store)
    push(shard, 1)
    commit(shard, store, 1)
    for seq in range(2, 22):
        push(shard, seq, ITEM, tuple(range(seq)))
        shard.freeze(seq, 0)
        shard.write(seq)
        shard.abort(seq)
        assert segments_of(blobs) == {"1-1"}
    name = commit(shard, store, 22)
    restarted = make_shard(blobs, store)
    restarted.restore(2, name)
    assert state_of(restarted) == state_of(shard)


def test_a_full_disk_allows_restores_and_blocks_commits() -> None:
    blobs, store = FullDisk(), MemoryStore()
    shard = started_shard(blobs=blobs, store=store)
    push(shard, 1)
    name, committed = commit(shard, store, 1), state_of(shard)
    push(shard, 2)
    blobs.full = True
    for n in range(3):
        shard.freeze(2 + n, 0)
        with pytest.raises(UnavailableError):
            shard.write(2 + n)
        shard.abort(2 + n)
    shard.restore(2, name)
    assert state_of(shard) == committed
    restarted = make_shard(blobs, store)
    restarted.restore(3, name)
    assert state_of(restarted) == committed
    push(restarted, 1)
    blobs.full = False
    after = make_shard(blobs, store)
    after.restore(4, commit(restarted, store, 5))
    assert state_of(after) == state_of(restarted)


def test_a_commit_that_does_not_fit_writes_nothing() -> None:
    class SmallDisk(MemoryKeyValueStore):
        free = 1000

        def check_space(self, num_bytes: int) -> None:
            if num_bytes > self.free:
                raise UnavailableError("segments cannot be written: no space")

    blobs, store = SmallDisk(), MemoryStore()
    shard = started_shard(blobs=blobs, store=store)
    push(shard, 1)
    commit(shard, store, 1)
    before = dict(blobs.data)
    push(shard, 2, ITEM, tuple(range(1000)))
    for seq in (2, 3):
        shard.freeze(seq, 0)
        with pytest.raises(UnavailableError, match="no space"):
            shard.write(seq)
        shard.abort(seq)
        assert blobs.data == before
    blobs.free = 1 << 20
    name = commit(shard, store, 4)
    restarted = make_shard(blobs, store)
    restarted.restore(2, name)
    assert state_of(restarted) == state_of(shard)


def test_a_commit_after_an_aborted_one_writes_only_changes() -> None:
    blobs, store = MemoryKeyValueStore(), MemoryStore()
    shard = started_shard(blobs=blobs, store=store, publishing=False)
    push(shard, 1, ITEM, tuple(range(1000)))
    commit(shard, store, 1)
    for seq in range(2, 2 + FEW_SEGMENTS):
        push(shard, seq, ITEM, (seq,))
        commit(shard, store, seq)
    push(shard, 10, ITEM, (1,))
    assert written_rows(shard, 50) > 2, "a commit must rewrite rows while the segment list is long"
    shard.abort(50)
    assert written_rows(shard, 51) == 1
    shard.commit(51)
    push(shard, 11, ITEM, (1,))
    assert written_rows(shard, 52) > 2


def written_rows(shard: Shard, seq: int) -> int:
    """Freeze and write commit `seq`. Returns the number of rows in its segment."""
    shard.freeze(seq, 0)
    return int(shard.write(seq)["segments"][-1]["rows"])


# Damage


def shard_with_damage() -> tuple[MemoryKeyValueStore, MemoryStore, PublishLoop, str, str]:
    """A publishing shard with two commits and a damaged block. Returns its stores, the shard, the last
    manifest's name and the damaged part."""
    blobs, store = MemoryKeyValueStore(), MemoryStore()
    shard = started_shard(blobs=blobs, store=store)
    loop = PublishLoop(shard)
    loop.push(*range(200))
    commit(shard, store, 1)
    loop.turn()
    loop.push(500)
    name = commit(shard, store, 2)
    key = next(iter(blobs.keys(b"b/1-1/")))
    blobs.data[key] = blobs.data[key][:-1] + b"?"
    _, segment, stack, bucket = key.decode().split("/")
    return blobs, store, loop, name, f"{segment}/{stack}/{int(bucket)}"


def shard_accepting_loss(blobs: MemoryKeyValueStore, store: MemoryStore, *parts: str) -> Shard:
    shard = make_shard(blobs, store)
    shard.segments = Segments(blobs, shapes_of(small_schema()), 64, accepted=parts)
    return shard


def test_a_restore_that_would_lose_rows_needs_permission() -> None:
    blobs, store, loop, name, part = shard_with_damage()
    before = state_of(loop.shard)
    restarted = make_shard(blobs, store)
    with pytest.raises(
        CheckpointError, match=rf"{part} \(about \d+ rows\).*accept_lost_rows = \[\"{part}\"\]"
    ) as caught:
        restarted.restore(2, name)
    assert "reset" not in str(caught.value)
    accepted = shard_accepting_loss(blobs, store, part)
    accepted.restore(3, name)
    remaining = state_of(accepted)
    assert 0 < len(remaining) < len(before) and remaining.items() <= before.items()
    push(accepted, 1, ITEM, (1,))
    repaired = make_shard(blobs, store)
    repaired.restore(4, commit(accepted, store, 3))
    assert state_of(repaired) == state_of(accepted)


def test_replicas_bootstrap_after_a_restore_that_lost_rows() -> None:
    blobs, store, loop, name, part = shard_with_damage()
    follower = Follower(loop.topic)
    loop.turn()
    follower.catch_up(loop.shard)
    assert follower.replica.num_rows == 201
    accepted = shard_accepting_loss(blobs, store, part)
    accepted.restore(3, name)
    PublishLoop(accepted, loop.topic).turn()
    follower.catch_up(accepted)
    assert follower.num_bootstraps == 2 and follower.replica.num_rows == len(state_of(accepted)) < 201


# Steps that fail midway


class BrokenKernel:
    """Replaces the kernel of a stack with one that fails."""

    def __init__(self, shard: Shard, stack: str) -> None:
        self.kernel, self.table = shard.tables[stack].kernel, shard.tables[stack]
        self.table.kernel = self

    def __call__(self, *arguments: np.ndarray) -> None:
        raise MemoryError("no room for a copy")


def push_to_two_stacks(shard: Shard) -> None:
    item, topic = keys(ITEM, 1), keys(TOPIC, 1)
    header = {"incarnation": shard.incarnation, "worker": 0, "sequence": 2, "step": 2, "time_ms": 1}
    header |= {"oldest_engagement_ms": 0, "oldest_close_ms": 0, "stacks": [ADAGRAD, ROWWISE]}
    ones = [np.ones((1, 4), np.float32), np.ones((1, 3), np.float32)]
    ShardRpcHandler(shard).handle(
        "push", header, [item.table_U, item.id_U, ones[0], topic.table_U, topic.id_U, ones[1]]
    )


def test_a_push_that_fails_after_its_first_stack_was_applied_is_never_applied_twice() -> None:
    store = MemoryStore()
    shard = started_shard(store=store)
    push(shard, 1, ITEM, (1,))
    name, committed = commit(shard, store, 1), state_of(shard)
    broken = BrokenKernel(shard, ROWWISE)
    with pytest.raises(MemoryError):
        push_to_two_stacks(shard)
    assert state_of(shard) != committed, "the first stack must have been updated"
    broken.table.kernel = broken.kernel
    for call in (lambda: push_to_two_stacks(shard), lambda: pull(shard, ITEM, 1), lambda: shard.freeze(2, 0)):
        with pytest.raises(UnavailableError):
            call()
    assert "half-way" in shard.stats()["broken"], (
        "the controller must learn of it, so that it restores all programs"
    )
    shard.restore(2, name)
    assert state_of(shard) == committed and shard.stats()["broken"] == ""
    assert push(shard, 1, ITEM, (1,))


class FailingPolicy(ExpiryPolicy):
    def evict(self, watermark_ms: int, index: KeyIndex, stamp_ms_N: np.ndarray) -> np.ndarray:
        raise MemoryError("no room for a copy")


def test_a_freeze_that_fails_after_its_first_stack_loses_no_change() -> None:
    store = MemoryStore()
    shard = started_shard(store=store)
    push(shard, 1, ITEM, (1,))
    name, committed = commit(shard, store, 1), state_of(shard)
    push(shard, 2, ITEM, (1,))
    table = shard.tables[ROWWISE]
    original, table.eviction = table.eviction, FailingPolicy(())
    with pytest.raises(MemoryError):
        shard.freeze(2, 0)
    table.eviction = original
    with pytest.raises(UnavailableError):
        shard.freeze(3, 0)
    shard.restore(2, name)
    assert state_of(shard) == committed


# Extreme gradients


@pytest.mark.parametrize("value", [1e19, 3e38, -3e38])
def test_a_huge_gradient_moves_its_row_and_no_state_becomes_infinite(value: float) -> None:
    shard = started_shard()
    push(shard, 1, ITEM, (1, 2), gradient_UD=np.array([[value, 1, 0, value], [0.5, 1, 0, 2]], np.float32))
    other = started_shard()
    push(other, 1, ITEM, (2,), gradient_UD=np.array([[0.5, 1, 0, 2]], np.float32))
    assert pull(shard, ITEM, 2).tobytes() == pull(other, ITEM, 2).tobytes(), (
        "other rows must be updated as usual"
    )
    before = pull(shard, ITEM, 1)
    for n in range(2, 40):
        push(shard, n, ITEM, (1,), gradient_UD=np.full((1, 4), value, np.float32))
    table = shard.tables[ADAGRAD]
    assert np.isfinite(table.state_NA).all() and np.isfinite(table.embeddings.rows_ND).all()
    assert (pull(shard, ITEM, 1) != before).all() and shard.stats()["limited"] == 39
