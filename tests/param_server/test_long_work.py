"""Work that grows with the number of rows. Calls and heartbeats continue during it, and a commit has the rows
at its freeze."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
import pytest

from param_server.embedding_table import KeyIndex, Keys
from param_server.eviction import ExpiryPolicy
from param_server.key_value_store import MemoryKeyValueStore
from param_server.outbox import run_to_end
from param_server.publish import Message, Publisher
from param_server.server import Shard
from param_server.table import GradientPush, build_tables
from roostream.errors import UnavailableError
from roostream.runtime.clock import FakeClock
from roostream.schema.schema import Schema
from roostream.schema.schema_file import schema_from_dict
from tests.param_server.memory_rows import InMemoryRows
from tests.param_server.shard_support import (
    ADAGRAD,
    ITEM,
    TOPIC,
    commit,
    keys,
    link_manifest,
    make_shard,
    small_schema,
    started_shard,
    state_of,
)
from tests.param_server.shard_support import pull_from as pull
from tests.param_server.shard_support import push_to as push
from tests.trainer.memory_store import MemoryStore

T = TypeVar("T")
MANY = tuple(range(20_000))


class HookedStore(MemoryKeyValueStore):
    """A store that calls `hook` once, during the next write."""

    hook: Callable[[], object] | None = None

    def write(
        self, puts: Iterable[tuple[bytes, bytes]], deletes: Iterable[bytes] = (), *, sync: bool = False
    ) -> None:
        hook, self.hook = self.hook, None
        if hook:
            hook()
        super().write(puts, deletes, sync=sync)


class HookedPolicy(ExpiryPolicy):
    """A policy that calls `hook` while it looks for rows to evict."""

    hook: Callable[[], object] = staticmethod(lambda: None)

    def evict(self, watermark_ms: int, index: KeyIndex, stamp_ms_N: np.ndarray) -> np.ndarray:
        self.hook()
        return super().evict(watermark_ms, index, stamp_ms_N)


def restore_shard(blobs: MemoryKeyValueStore, store: MemoryStore, name: str, **identity: Any) -> Shard:
    restored = make_shard(blobs, store, **identity)
    restored.restore(2, name)
    return restored


def returns_in_time(call: Callable[[], object]) -> bool:
    """Whether `call` returns within the time limit, although this thread holds a lock."""
    done = threading.Thread(target=call, daemon=True)
    done.start()
    done.join(10)
    return not done.is_alive()


def test_a_heartbeat_never_waits_for_the_lock_of_the_rows() -> None:
    shard = started_shard()
    push(shard, 1)
    with shard.barrier.lock:
        assert returns_in_time(shard.stats) and not shard.answers(0.01)
    assert shard.stats()["dirty"] == 2 and shard.answers(1.0)


def test_the_count_of_changed_rows_follows_freezes_aborts_and_restores() -> None:
    blobs, store = MemoryKeyValueStore(), MemoryStore()
    shard = started_shard(blobs=blobs, store=store)
    push(shard, 1, ITEM, (1, 2, 3))
    push(shard, 2, ITEM, (3, 4))
    assert shard.stats()["dirty"] == 4
    shard.freeze(1, 0)
    assert shard.stats()["dirty"] == 0
    push(shard, 3, ITEM, (4, 5))
    shard.abort(1)
    assert shard.stats()["dirty"] == 5
    name = commit(shard, store, 2)
    assert state_of(restore_shard(blobs, store, name)) == state_of(shard), (
        "the commit must contain the rows of the aborted freeze"
    )
    push(shard, 4, ITEM, (1,))
    shard.restore(2, name)
    assert shard.stats()["dirty"] == 0


def test_a_commit_has_the_rows_of_its_freeze_even_if_they_change_before_and_during_the_write() -> None:
    blobs, store = HookedStore(), MemoryStore()
    shard = started_shard(blobs=blobs, store=store)
    push(shard, 1, ITEM, MANY)
    push(shard, 2, TOPIC, (1, 2))
    frozen = state_of(shard)
    shard.freeze(1, 0)
    push(shard, 3, ITEM, MANY[::2])
    push(shard, 4, ITEM, (0, 2, 30_000))
    blobs.hook = lambda: (pull(shard, ITEM, 1), push(shard, 5, ITEM, MANY))
    name = link_manifest(store, 1, 1, [shard.write(1)])
    assert blobs.hook is None, "a pull and a push must be answered during the write"
    shard.commit(1)
    assert state_of(restore_shard(blobs, store, name)) == frozen
    push(shard, 6, TOPIC, (2,))
    second = commit(shard, store, 2)
    assert state_of(restore_shard(blobs, store, second)) == state_of(shard)


def test_a_write_that_failed_half_way_is_repeated_with_the_rows_of_the_freeze() -> None:
    blobs, store = MemoryKeyValueStore(), MemoryStore()
    shard = started_shard(blobs=blobs, store=store)
    push(shard, 1, ITEM, (1, 2, 3))
    frozen = state_of(shard)
    shard.freeze(1, 0)
    blobs.fail_at(3)
    with pytest.raises(UnavailableError):
        shard.write(1)
    push(shard, 2, ITEM, (2, 3, 4))
    name = link_manifest(store, 1, 1, [shard.write(1)])
    assert state_of(restore_shard(blobs, store, name)) == frozen


def test_reads_are_answered_during_a_freeze_and_a_push_belongs_to_the_next_commit() -> None:
    blobs, store = MemoryKeyValueStore(), MemoryStore()
    schema = small_schema(expire_after_ms=10)
    shard = started_shard(blobs=blobs, store=store, schema=schema, eviction=HookedPolicy)
    push(shard, 1, ITEM, (1, 2), time_ms=1000)
    before = state_of(shard)
    pusher = threading.Thread(target=lambda: push(shard, 2, ITEM, (2, 3), time_ms=1000), daemon=True)

    def hook() -> None:
        assert returns_in_time(lambda: pull(shard, ITEM, 1))
        if not pusher.ident:
            pusher.start()

    for table in shard.tables.values():
        table.eviction.hook = hook  # type: ignore[attr-defined]
    shard.freeze(1, 1000)
    pusher.join(10)
    assert not pusher.is_alive() and shard.stats()["pushes"] == 2
    name = link_manifest(store, 1, 1, [shard.write(1)])
    assert state_of(restore_shard(blobs, store, name, schema=schema)) == before


def wide_schema() -> Schema:
    return schema_from_dict(
        {"tables": {ITEM: {"dim": 1024}}, "label": [{"name": "click", "action": "click"}]}
    )


def push_wide(shard: Shard, sequence: int, num_rows: int) -> None:
    (table,) = shard.tables.values()
    requested = keys(ITEM, *range(num_rows))
    gradient_UD = np.full((num_rows, 1024), sequence, np.float32)
    shard.push(shard.incarnation, GradientPush(0, sequence, 1, 1, 1, [(table, requested, gradient_UD)]))


def test_a_large_bucket_is_stored_in_several_blocks() -> None:
    blobs, store = MemoryKeyValueStore(), MemoryStore()
    identity = {"schema": wide_schema(), "num_buckets": 1, "num_partitions": 1}
    shard = started_shard(blobs=blobs, store=store, **identity)
    push_wide(shard, 1, 9000)
    shard.freeze(1, 0)
    progress = shard.stats()["progress"]
    name = link_manifest(store, 1, 1, [shard.write(1)], num_buckets=1, num_partitions=1)
    assert shard.stats()["progress"] > progress + 10, "progress must show that the command does not hang"
    assert len(list(blobs.keys(b"b/1-1/"))) == 2
    assert max(len(blobs.get(key) or b"") for key in blobs.keys(b"b/")) < 65 << 20
    restored = restore_shard(blobs, store, name, **identity)
    assert restored.stats()["rows"] == shard.stats()["rows"]
    (original_table,), (restored_table,) = shard.tables.values(), restored.tables.values()
    requested = keys(ITEM, 0, 4500, 8999)
    assert (original_table.embeddings.gather(requested) == restored_table.embeddings.gather(requested)).all()
    second = list(blobs.keys(b"b/1-1/"))[1]
    blobs.write([(second, b"damaged")])
    assert list(shard.segments.check(restored.committed.segments, [0]))


class RecordingRows(InMemoryRows):
    """A rows topic that records the number of bytes of each delivery."""

    def __init__(self) -> None:
        super().__init__(1)
        self.delivered: list[int] = []

    def deliver(self, messages: Sequence[Message], stop: threading.Event) -> list[int]:
        self.delivered.append(sum(len(message.value) for message in messages))
        return super().deliver(messages, stop)


def test_a_large_round_is_sent_in_portions() -> None:
    topic = RecordingRows()
    shard = started_shard(schema=wide_schema(), num_buckets=1, num_partitions=1)
    publisher = Publisher(shard, topic, FakeClock())
    publisher.turn(threading.Event())
    topic.delivered.clear()
    push_wide(shard, 1, 5000)
    publisher.turn(threading.Event())
    assert sum(topic.delivered) > 15 << 20 and max(topic.delivered) < 10 << 20
    assert publisher.num_keys == 5000
    topic.delivered.clear()
    publisher.turn(threading.Event())
    assert sum(topic.delivered) == 0, "all rows were acknowledged, so nothing is left to send"


def test_rows_that_expire_during_a_round_get_tombstones_in_the_next() -> None:
    topic = InMemoryRows()
    shard = started_shard(schema=small_schema(expire_after_ms=10))
    publisher = Publisher(shard, topic, FakeClock())
    publisher.turn(threading.Event())
    push(shard, 1, ITEM, (1, 2), time_ms=1)
    push(shard, 2, ITEM, (2,), time_ms=1000)
    round_ = shard.take_round()
    assert round_ is not None
    shard.freeze(1, 1000)
    sent = [delta for planned in round_.deltas if (delta := shard.copy_delta(round_, planned))]
    assert [id_ for delta in sent for id_ in delta.id_M.tolist()] == [2]
    shard.settle_round(round_, True, {})
    following = shard.take_round()
    assert following is not None
    (tombstone,) = [delta for planned in following.deltas if (delta := shard.copy_delta(following, planned))]
    assert tombstone.id_M.tolist() == [1] and len(tombstone.rows_LD) == 0


def test_a_round_ends_when_a_restore_begins() -> None:
    store = MemoryStore()
    shard = started_shard(store=store)
    shard.rolled_back(1, {})
    push(shard, 1)
    name = commit(shard, store, 1)
    round_ = shard.take_round()
    assert round_ is not None and round_.deltas
    shard.restore(2, name)
    with pytest.raises(UnavailableError):
        shard.copy_delta(round_, round_.deltas[0])
    shard.settle_round(round_, False, {})


@pytest.mark.parametrize("seed", range(10))
def test_a_commit_has_the_rows_of_its_freeze_whatever_happens_while_rows_are_collected(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random pushes and publishing rounds run between any two steps of a freeze, after commits and aborts,
    with buckets that are rewritten whole."""
    monkeypatch.setattr("param_server.table.SLICE_ROWS", 8)
    monkeypatch.setattr("param_server.table.COPY_BYTES", 64)
    draw = np.random.default_rng(seed)
    shard_table = build_tables(make_shard().identity, ExpiryPolicy)[ADAGRAD]
    item = shard_table.embeddings.table_K[0]
    uncommitted: set[int] = set()  # ids

    def change() -> set[int]:
        """Push, or publish with or without an acknowledgement. Returns the pushed ids."""
        outbox = shard_table.outbox
        if draw.random() < 0.1:
            for planned in outbox.number(outbox.plan(*run_to_end(outbox.collect()))):
                outbox.copy(planned, 100.0)
            run_to_end(outbox.settle(bool(draw.random() < 0.3)))
            return set()
        pushed = Keys(np.full(3, item), draw.choice(300, 3, replace=False))
        shard_table.reserve(3)
        shard_table.push(pushed, draw.normal(size=(3, shard_table.width)).astype(np.float32), 1)
        return set(pushed.id_U.tolist())

    def rows_now() -> dict[int, bytes]:
        index = shard_table.index
        live_M = index.in_buckets(range(shard_table.num_buckets))
        rows = zip(shard_table.embeddings.rows_ND[live_M], shard_table.state_NA[live_M], strict=True)
        return {
            int(id_): row.tobytes() + state.tobytes()
            for id_, (row, state) in zip(index.id_N[live_M], rows, strict=True)
        }

    for _ in range(6):
        for _ in range(int(draw.integers(20))):
            uncommitted |= change()
        complete = np.flatnonzero(draw.random(shard_table.num_buckets) < 0.2).tolist()
        index, at_freeze = shard_table.index, rows_now()
        whole = set(index.id_N[index.in_buckets(complete)].tolist())
        frozen = shard_table.freeze(*shard_table.gone_keys(shard_table.outbox.tombstones()), complete)
        later: set[int] = set()

        def between_steps(steps: Generator[None, None, T], later: set[int] = later) -> T:
            while True:
                later |= change() if draw.random() < 0.3 else set()
                try:
                    next(steps)
                except StopIteration as end:
                    return end.value

        if draw.random() < 0.8:
            frozen.set_rows(*between_steps(shard_table.mark(frozen)))
            block = between_steps(shard_table.copy_frozen(frozen, np.arange(len(frozen.row_M))))
            copied = zip(block.keys.id_U.tolist(), block.rows_LD, block.state_LA, strict=True)
            found = {id_: row.tobytes() + state.tobytes() for id_, row, state in copied}
            assert found == {id_: at_freeze[id_] for id_ in found}
            assert uncommitted | whole <= found.keys()
        if is_released := len(frozen.row_M) and draw.random() < 0.9:
            between_steps(shard_table.release(frozen))
        if is_released and draw.random() < 0.8:
            uncommitted = set()
        else:
            uncommitted |= set(frozen.changed_keys(index).id_U.tolist())  # unpublished rows count as changed
            between_steps(shard_table.unfreeze(frozen))
        uncommitted |= later
        assert shard_table.num_changed() == len(uncommitted)
