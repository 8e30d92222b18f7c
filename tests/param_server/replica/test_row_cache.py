"""The cache of rows for serving: a missed row is read from its shard, reads create no rows, and no change is
missed or rolled back."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from param_server.embedding_table import Keys
from param_server.initial_rows import initial_rows
from param_server.publish import Publisher
from param_server.replica.replica import Replica
from param_server.replica.row_cache import CachedTable, CachePolicy, PartialReplica, RowCache
from param_server.replica.shard_reads import ShardReads
from param_server.server import Shard
from roostream.runtime.clock import FakeClock
from roostream.schema.ids import bucket_of
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from tests.param_server.memory_rows import InMemoryRows
from tests.param_server.shard_support import (
    ADAGRAD,
    ITEM,
    NEVER_STOP,
    PublishLoop,
    lookup_of,
    make_shard,
    small_schema,
    started_shard,
    table_id,
    transport_to,
)
from tests.trainer.memory_store import MemoryStore

BIG = 1 << 20


class CachedShard:
    """A shard that trains and publishes, and a cache that reads from it and follows its topic."""

    def __init__(self, shard: Shard | None = None, max_bytes: int = BIG, waits: bool = True) -> None:
        self.loop = PublishLoop(shard or started_shard())
        self.clock, self.transport, self.offsets = FakeClock(), transport_to(self.loop.shard), [0] * 4
        self.reads = ShardReads([self.transport], 64, 0.05, self.clock)
        self.cache = RowCache(small_schema(), 0, self.reads, CachePolicy(max_bytes=max_bytes, waits=waits))
        self.bootstrap()

    def bootstrap(self) -> None:
        self.offsets = [len(values) for values in self.loop.topic.values]
        self.cache.bootstrap([])

    def follow(self, max_records: int = 1 << 30) -> None:
        for partition, values in enumerate(self.loop.topic.values):
            for value in values[self.offsets[partition] : self.offsets[partition] + max_records]:
                self.cache.apply(wire.decode(value)[1])  # type: ignore[arg-type]
                self.offsets[partition] += 1

    def rows(self, *ids: int) -> np.ndarray:
        return self.cache.gather(lookup_of({ITEM: ids}))[ADAGRAD]


def initial(*ids: int) -> np.ndarray:
    return initial_rows(0, np.full(len(ids), table_id(ITEM), np.uint32), np.array(ids, np.int64), 4, 0.05)


def test_a_missed_row_is_read_once_and_then_kept_up_by_deltas() -> None:
    cached = CachedShard()
    cached.loop.push(1, 2)
    cached.loop.turn()
    assert cached.rows(1, 2).tobytes() == cached.loop.rows(1, 2).tobytes()
    cached.follow()
    cached.loop.push(1, value=3.0)
    before = cached.rows(1)
    cached.loop.turn()
    cached.follow()
    cached.transport.down = True
    assert cached.rows(1).tobytes() == cached.loop.rows(1).tobytes() != before.tobytes()
    assert (cached.cache.num_lookups, cached.cache.num_missed, cached.cache.num_initial_values) == (
        4,
        2,
        0,
    ) and cached.cache.complete


def test_reading_creates_nothing_and_a_key_without_a_row_is_remembered_as_such() -> None:
    cached = CachedShard()
    assert cached.rows(7, 8).tobytes() == initial(7, 8).tobytes()
    assert (
        cached.loop.shard.tables[ADAGRAD].num_rows == 0
        and cached.cache.num_without_row == 2
        and cached.cache.num_rows == 0
    )
    cached.transport.down = True
    assert cached.rows(7, 8).tobytes() == initial(7, 8).tobytes() and cached.cache.complete
    cached.loop.push(7)
    cached.loop.turn()
    cached.follow()
    assert cached.rows(7).tobytes() == cached.loop.rows(7).tobytes() and cached.cache.num_rows == 1


def test_an_unavailable_shard_costs_one_wait_and_its_rows_are_marked_initial() -> None:
    cached = CachedShard()
    cached.loop.push(1)
    cached.transport.down = True
    for _ in range(3):
        assert cached.rows(1).tobytes() == initial(1).tobytes() and not cached.cache.complete
    assert (
        cached.reads.num_failed == 1 and cached.cache.num_initial_values == 3 and cached.cache.num_rows == 0
    )
    cached.transport.down = False
    cached.clock.advance(1)
    assert cached.rows(1).tobytes() == cached.loop.rows(1).tobytes() and cached.cache.complete


def test_without_waiting_a_missed_row_is_initial_and_a_thread_reads_it() -> None:
    cached, stop = CachedShard(waits=False), threading.Event()
    cached.loop.push(1)
    assert cached.rows(1).tobytes() == initial(1).tobytes()
    assert cached.cache.complete and cached.cache.num_initial_values == 1
    thread = threading.Thread(target=cached.cache.run, args=(stop,))
    thread.start()
    for _ in range(500):
        if cached.cache.num_rows:
            break
        stop.wait(0.01)
    stop.set()
    thread.join(10)
    assert cached.rows(1).tobytes() == cached.loop.rows(1).tobytes() and cached.cache.num_missed == 1
    assert not thread.is_alive()


# No change is missed


def delta_of(loop: PublishLoop, id_: int) -> pb.RowDelta:
    bucket = bucket_of(id_, table_id(ITEM), 64)
    found = [wire.decode(value)[1] for values in loop.topic.values for value in values]
    return next(m for m in reversed(found) if isinstance(m, pb.RowDelta) and m.bucket == bucket)


@pytest.mark.parametrize("meanwhile", ["applied", "refused", "bootstrap"])
def test_a_row_that_changes_while_it_is_read_is_used_once_and_not_cached(meanwhile: str) -> None:
    """The change is applied, or its record is refused, or the cache begins again after it."""
    cached = CachedShard()
    cached.loop.push(1)
    cached.loop.turn()
    cached.follow()
    original_handler = cached.transport.handler

    def slow(method: str, header: dict[str, object], arrays: object) -> object:
        answer = original_handler(method, header, arrays)  # type: ignore[arg-type]
        cached.loop.push(1, value=5.0)
        cached.loop.turn()
        if meanwhile == "applied":
            cached.follow()
        elif meanwhile == "refused":
            cached.cache.mark_stale(bucket_of(1, table_id(ITEM), 64))
        else:
            cached.bootstrap()  # after the delta, which the cache therefore never sees
        return answer

    cached.transport.handler = slow  # type: ignore[assignment]
    older = cached.rows(1)
    cached.transport.handler = original_handler
    assert cached.cache.num_rows == 0
    assert cached.rows(1).tobytes() == cached.loop.rows(1).tobytes() != older.tobytes()


def test_a_gap_in_versions_drops_affected_rows() -> None:
    cached = CachedShard()
    cached.loop.push(1)
    cached.loop.turn()
    cached.follow()
    cached.rows(1)
    for value in (2.0, 3.0):
        cached.loop.push(1, value=value)
        cached.loop.turn()
    newest = delta_of(cached.loop, 1)
    newest.ids[:] = []
    del newest.rows[:]
    assert cached.cache.apply(newest) and cached.cache.num_rows == 0, (
        "the previous delta was lost, so the row may be old"
    )
    assert cached.rows(1).tobytes() == cached.loop.rows(1).tobytes()


def test_a_barrier_drops_rows_of_older_incarnations_and_a_dead_shard_is_not_used() -> None:
    store, topic = MemoryStore(), InMemoryRows()
    cached = CachedShard(started_shard(store=store))
    cached.loop.topic = cached.loop.publisher.topic = topic  # type: ignore[misc]
    cached.loop.push(1)
    cached.loop.turn()
    cached.follow()
    old = cached.rows(1)
    restarted = make_shard(store=store)
    restarted.restore(2, "")
    Publisher(restarted, topic, FakeClock()).turn(NEVER_STOP)
    cached.follow()
    assert cached.cache.num_rows == 0
    assert cached.rows(1).tobytes() == initial(1).tobytes() != old.tobytes() and not cached.cache.complete
    cached.clock.advance(1)
    cached.transport.handler = transport_to(restarted).handler
    assert cached.rows(1).tobytes() == initial(1).tobytes() and cached.cache.complete


def test_a_refused_record_drops_its_bucket_or_everything() -> None:
    cached = CachedShard()
    cached.loop.push(1, 2, 3)
    cached.rows(1, 2, 3)
    cached.cache.mark_stale(bucket_of(1, table_id(ITEM), 64))
    assert cached.cache.num_rows == 2 and not cached.cache.needs_bootstrap
    cached.cache.mark_stale(64)
    assert cached.cache.needs_bootstrap
    cached.bootstrap()
    assert cached.cache.num_rows == 0 and not cached.cache.needs_bootstrap and not cached.cache.stale
    cached.cache.repair([])


def test_rows_read_before_the_topic_is_followed_are_used_and_not_cached() -> None:
    shard = started_shard()
    cache = RowCache(
        small_schema(),
        0,
        ShardReads([transport_to(shard)], 64, 0.05, FakeClock()),
        CachePolicy(max_bytes=BIG),
    )
    PublishLoop(shard).push(1)
    assert cache.gather(lookup_of({ITEM: [1]}))[ADAGRAD].tobytes() != initial(1).tobytes()
    assert cache.num_rows == 0 and cache.needs_bootstrap


@pytest.mark.parametrize("seed", range(2))
def test_g4_after_any_history_cached_rows_equal_published_ones(seed: int) -> None:
    generator = random.Random(seed)
    cached = CachedShard(max_bytes=64 * 160)
    for step in range(200):
        ids = generator.sample(range(90), generator.randint(1, 12))
        match generator.choice(
            ("push", "push", "turn", "follow", "follow_one", "read", "read", "mark_stale", "toggle_outage")
        ):
            case "push":
                cached.loop.push(*ids, value=float(step))
            case "turn":
                cached.loop.turn()
            case "follow":
                cached.follow()
            case "follow_one":
                cached.follow(1)
            case "read":
                cached.rows(*ids)
            case "mark_stale":
                cached.cache.mark_stale(generator.randrange(64))
            case "toggle_outage":
                cached.transport.down = not cached.transport.down
                cached.clock.advance(1)
    cached.loop.turn()
    cached.follow()
    cached.transport.down = False
    cached.clock.advance(5)
    for start in range(0, 90, 10):
        assert (
            cached.rows(*range(start, start + 10)).tobytes()
            == cached.loop.rows(*range(start, start + 10)).tobytes()
        )


# A part of the buckets as a full replica, the others cached


def test_some_buckets_are_held_and_others_are_read_on_demand() -> None:
    shards = [started_shard(index=i, num_shards=2) for i in range(2)]
    loops = [PublishLoop(shard) for shard in shards]
    transports = [transport_to(shard) for shard in shards]
    ids = list(range(200))
    for number, loop in enumerate(loops):
        loop.push(*[i for i in ids if bucket_of(i, table_id(ITEM), 64) % 2 == number])
        loop.turn()
    replica = Replica(small_schema(), 0, buckets=range(0, 16))
    cache = RowCache(
        small_schema(), 0, ShardReads(transports, 64, 0.05, FakeClock()), CachePolicy(max_bytes=BIG)
    )
    rows = PartialReplica(replica, cache)
    assert rows.needs_bootstrap
    rows.bootstrap(transports)
    replicated_ids = [i for i in ids if bucket_of(i, table_id(ITEM), 64) < 16]
    assert rows.num_rows == replica.num_rows == len(replicated_ids) and not rows.needs_bootstrap
    rows_UD = rows.gather(lookup_of({ITEM: ids}))[ADAGRAD]
    for number, loop in enumerate(loops):
        own_ids = [i for i in ids if bucket_of(i, table_id(ITEM), 64) % 2 == number]
        assert rows_UD[own_ids].tobytes() == loop.rows(*own_ids).tobytes()
    assert cache.num_missed == len(ids) - len(replicated_ids)
    replicated_id, cached_id = replicated_ids[0], next(i for i in ids if i not in replicated_ids)
    for id_ in (replicated_id, cached_id):
        loop = loops[bucket_of(id_, table_id(ITEM), 64) % 2]
        loop.push(id_, value=4.0)
        loop.turn()
        assert rows.apply(delta_of(loop, id_))
        assert rows.gather(lookup_of({ITEM: [id_]}))[ADAGRAD].tobytes() == loop.rows(id_).tobytes()
    rows.mark_stale(bucket_of(replicated_id, table_id(ITEM), 64))
    before = cache.num_rows
    rows.mark_stale(bucket_of(cached_id, table_id(ITEM), 64))
    assert {b for _, b in rows.stale} == {
        bucket_of(replicated_id, table_id(ITEM), 64)
    } and cache.num_rows < before  # type: ignore[misc]
    rows.repair(transports)
    assert not rows.stale
    rows.mark_stale(64)
    assert rows.needs_bootstrap


# How much a cache holds, and what is evicted first


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


def add(stack: CachedTable, ids: list[int], version: int = 1, has_row: bool = True) -> None:
    keys = keys_of(*[i for i in ids if stack.rows.index.find(keys_of(i))[0] < 0])
    n = len(keys)
    stack.add(keys, rows_of(keys.id_U, version), np.full(n, has_row), np.full(n, version, np.uint64))


def is_cached(stack: CachedTable, *ids: int) -> list[bool]:
    return (stack.rows.index.find(keys_of(*ids)) >= 0).tolist()


def test_added_rows_are_found_and_missing_ones_are_initial() -> None:
    stack = stack_of()
    add(stack, [1, 2])
    add(stack, [3], has_row=False)
    keys = keys_of(1, 2, 3, 4)
    rows_UD, initial = stack.gather(keys, stack.find(keys)), initial_rows(0, keys.table_U, keys.id_U, 4, 0.05)
    assert (
        rows_UD[:2].tobytes() == rows_of(np.array([1, 2]), 1).tobytes()
        and rows_UD[2:].tobytes() == initial[2:].tobytes()
    )
    assert stack.num_keys == 3 and stack.num_without_row == 1


def test_recently_used_keys_stay() -> None:
    stack = stack_of(64)
    add(stack, list(range(64)))
    for start in range(100, 160, 10):
        stack.find(keys_of(*range(20)))
        add(stack, list(range(start, start + 10)))
    assert all(is_cached(stack, *range(20))) and stack.num_keys == 64 and stack.num_evicted == 60


def test_keys_without_a_row_have_a_quarter_at_most() -> None:
    stack = stack_of(64)
    add(stack, list(range(1000, 1200)), has_row=False)
    assert stack.num_keys == stack.num_without_row == 16 and all(is_cached(stack, *range(1184, 1200)))
    add(stack, list(range(64)))
    assert stack.num_keys == 64 and stack.num_without_row <= 16


def test_a_delta_updates_only_cached_older_rows() -> None:
    stack = stack_of()
    add(stack, [1, 2], version=5)
    add(stack, [3], version=7)
    add(stack, [4], version=5, has_row=False)
    stack.update(keys_of(1, 3, 4, 9, 2), rows_of(np.array([1, 3, 4, 9]), 6), 6)
    keys = keys_of(1, 2, 3, 4)
    rows_UD = stack.gather(keys, stack.find(keys))
    assert (
        rows_UD[[0, 2, 3], 1].tolist() == [6, 7, 6]
        and rows_UD[1].tobytes() == stack.gather(keys_of(2), np.array([-1]))[0].tobytes()
    )
    assert is_cached(stack, 9) == [False] and stack.num_without_row == 1


@settings(max_examples=20)
@given(
    st.lists(
        st.tuples(st.sampled_from(["add", "none", "find", "gone", "live", "drop"]), st.integers(0, 150)),
        max_size=40,
    )
)
def test_the_bounds_hold_and_keys_without_a_row_are_counted_correctly(steps: list[tuple[str, int]]) -> None:
    stack = stack_of(64)
    for version, (action, first) in enumerate(steps, 2):
        ids = list(range(first, first + 25))
        match action:
            case "add" | "none":
                add(stack, ids, version, has_row=action == "add")
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
