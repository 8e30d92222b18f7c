"""Bucket maps in use: clients route by the map, shards refuse buckets that they do not own, and readers learn
of a new map."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from param_server.client import Client
from param_server.embedding_table import Keys
from param_server.replica.replica import Replica
from param_server.replica.row_cache import CachePolicy, RowCache
from param_server.replica.shard_reads import ShardReads, fetch_bucket_map
from param_server.server import Shard, ShardRpcHandler
from roostream.errors import ConfigError, FencedError, UnavailableError
from roostream.runtime.bucket_map import BucketMap
from roostream.runtime.clock import FakeClock
from roostream.schema.ids import bucket_of, table_id
from tests.param_server.shard_support import (
    ADAGRAD,
    ITEM,
    TOPIC,
    USER,
    RecordingTransport,
    commit,
    gradients_of,
    link_manifest,
    lookup_of,
    make_shard,
    push_to,
    small_schema,
    started_shard,
    state_of,
    transport_to,
)
from tests.trainer.memory_store import MemoryStore

IDS = range(60)
LOOKUP = {ITEM: IDS, USER: range(5), TOPIC: range(40)}
SHIFTED = BucketMap((np.arange(64, dtype=np.int32) // 7 + 1) % 2, 2, 3)
"""Owners that differ from bucket modulo shards."""


def shards_with_map(owners: BucketMap, store: MemoryStore | None = None) -> list[Shard]:
    """Shards at commit 1, without rows, with the given owners of buckets, as incarnation 2."""
    store = store or MemoryStore()
    name = link_manifest(
        store, 1, 1, [{"segments": [], "rows_end": {}}] * owners.num_owners, bucket_map=owners
    )
    shards = [
        make_shard(store=store, index=i, num_shards=owners.num_owners) for i in range(owners.num_owners)
    ]
    for shard in shards:
        shard.restore(2, name)
    return shards


def train(
    shards: list[Shard], owners: BucketMap | None, incarnation: int
) -> tuple[bytes, list[RecordingTransport]]:
    """Train three steps. Returns the rows afterwards and the transports with their recorded calls."""
    transports = [RecordingTransport(transport_to(shard)) for shard in shards]
    client = Client(small_schema(), transports, worker=0, clock=FakeClock())
    client.set_incarnation(incarnation, 1, owners)
    lookup = lookup_of(LOOKUP)
    for step in range(3):
        client.pull(lookup)
        client.push(lookup, gradients_of(lookup, step + 0.25), step=step, time_ms=step)
    rows = client.pull(lookup)
    client.close()
    return b"".join(rows[stack].tobytes() for stack in sorted(rows)), transports


def all_rows(shards: list[Shard]) -> dict[Any, bytes]:
    return {key: bits for shard in shards for key, bits in state_of(shard).items()}


def test_rows_do_not_depend_on_the_owner_of_their_bucket() -> None:
    single, shifted = [started_shard()], shards_with_map(SHIFTED)
    assert train(single, None, 1)[0] == train(shifted, SHIFTED, 2)[0]
    assert all_rows(shifted) == state_of(single[0])
    for index, shard in enumerate(shifted):
        assert {SHIFTED.owner_B[bucket_of(id_, table, 64)] for _, table, id_ in state_of(shard)} == {index}


def test_a_shard_refuses_rows_of_other_buckets_and_changes_nothing() -> None:
    shard = shards_with_map(SHIFTED)[0]
    foreign = next(i for i in IDS if SHIFTED.owner_B[bucket_of(i, table_id(ITEM), 64)] == 1)
    message = f"bucket {bucket_of(foreign, table_id(ITEM), 64)}"
    before, keys = state_of(shard), lookup_of({ITEM: [foreign]}).stacks[ADAGRAD]
    with pytest.raises(FencedError, match=message):
        push_to(shard, 1, ITEM, (foreign,))
    for method in ("pull", "read"):
        header = {"incarnation": 2, "stacks": [ADAGRAD]}
        with pytest.raises(FencedError, match=message):
            ShardRpcHandler(shard).handle(method, header, [keys.table_U, keys.id_U])
    assert state_of(shard) == before and shard.stats()["pushes"] == 0


def test_a_client_of_another_number_of_shards_or_buckets_refuses_the_map() -> None:
    client = Client(small_schema(), [transport_to(s) for s in shards_with_map(SHIFTED)], worker=0)
    for owners in (BucketMap.modulo(64, 3), BucketMap.modulo(32, 2)):
        with pytest.raises(ConfigError, match="64"):
            client.set_incarnation(2, 1, owners)
    assert client.owners == BucketMap.modulo(64, 2) and client.incarnation == 0
    client.close()


def test_a_split_made_by_one_map_is_not_used_by_another() -> None:
    store, lookup = MemoryStore(), lookup_of(LOOKUP)
    shards = [started_shard(index=i, num_shards=2, store=store) for i in range(2)]
    client = Client(small_schema(), [transport_to(s) for s in shards], worker=0, clock=FakeClock())
    client.set_incarnation(1)
    client.pull(lookup)
    name = link_manifest(store, 1, 1, [{"segments": [], "rows_end": {}}] * 2, bucket_map=SHIFTED)
    for shard in shards:
        shard.restore(2, name)
    client.set_incarnation(2, 1, SHIFTED)
    assert {stack: len(rows_UD) for stack, rows_UD in client.pull(lookup).items()} == {
        stack: len(found.id_U) for stack, found in lookup.stacks.items()
    }
    client.close()


def test_a_restore_with_another_map_keeps_owned_rows() -> None:
    store, shard = MemoryStore(), started_shard()
    shard.store = store
    push_to(shard, 1, ITEM, tuple(IDS))
    name = commit(shard, store, 1)
    rows, first_shard = state_of(shard), make_shard(shard.segments.store, store, index=0, num_shards=2)
    segments = [{"segments": [s.plain() for s in shard.committed.segments], "rows_end": {}}] * 2
    first_shard.restore(2, link_manifest(store, 2, 1, segments, bucket_map=SHIFTED))
    own_keys = {key for key in rows if SHIFTED.owner_B[bucket_of(key[2], key[1], 64)] == 0}
    assert state_of(first_shard) == {key: rows[key] for key in own_keys} and own_keys != rows.keys()
    other = BucketMap(1 - SHIFTED.owner_B, 2, 4)
    first_shard.restore(3, link_manifest(store, 3, 1, segments, bucket_map=other))
    assert state_of(first_shard) == {key: bits for key, bits in rows.items() if key not in own_keys}
    shard.restore(2, name)
    assert state_of(shard) == rows


def test_readers_learn_the_bucket_map_from_the_newest_incarnation() -> None:
    shards = shards_with_map(SHIFTED)
    transports = [RecordingTransport(transport_to(shard)) for shard in shards]
    assert fetch_bucket_map(transports, 64, timeout_s=1.0) == SHIFTED
    one_outdated = [started_shard(index=0, num_shards=2), shards[1]]
    assert fetch_bucket_map([transport_to(s) for s in one_outdated], 64, timeout_s=1.0) == SHIFTED
    unrestored = make_shard(index=0, num_shards=2)
    assert fetch_bucket_map([transport_to(unrestored), transports[1]], 64, timeout_s=1.0) == SHIFTED
    with pytest.raises(UnavailableError):
        fetch_bucket_map([transport_to(unrestored), transport_to(unrestored)], 64, timeout_s=1.0)
    with pytest.raises(ConfigError, match="32"):
        fetch_bucket_map(transports, 32, timeout_s=1.0)
    transports[0].calls.clear()
    assert (
        fetch_bucket_map(transports[:1], 64, timeout_s=1.0) == BucketMap.modulo(64, 1)
        and not transports[0].calls
    )


def test_a_replica_reloads_a_bucket_from_its_owner() -> None:
    shards = shards_with_map(SHIFTED)
    train(shards, SHIFTED, 2)
    replica = Replica(small_schema(), 0)
    transports = [transport_to(shard) for shard in shards]
    replica.bootstrap(transports)
    num_all_rows = replica.num_rows
    for bucket in range(64):
        replica.mark_stale(bucket)
    replica.repair(transports)
    assert not replica.stale and replica.num_rows == num_all_rows == sum(
        len(state_of(shard)) for shard in shards
    )
    partial = Replica(small_schema(), 0, buckets=range(20))
    partial.bootstrap(transports)
    assert 0 < partial.num_rows < num_all_rows


def test_a_cache_learns_of_a_new_map_in_the_background_and_from_a_refusal() -> None:
    shards = shards_with_map(SHIFTED)
    train(shards, SHIFTED, 2)
    transports, clock = [RecordingTransport(transport_to(shard)) for shard in shards], FakeClock()
    reads = ShardReads(transports, 64, 0.05, clock)
    cache = RowCache(small_schema(), 0, reads, CachePolicy(max_bytes=1 << 20))
    found = lookup_of({ITEM: IDS}).stacks[ADAGRAD]
    keys_by_stack = {ADAGRAD: Keys(found.table_U, found.id_U)}
    assert not reads.read(keys_by_stack)[ADAGRAD] and reads.num_failed == 2, (
        "reads by the old map must be refused"
    )
    reads.refresh_bucket_map()
    assert sum(len(part.at_M) for part in reads.read(keys_by_stack)[ADAGRAD]) == len(found.id_U), (
        "every shard must answer"
    )
    cache.bootstrap(transports)
    for transport in transports:
        transport.calls.clear()
    cache.gather(lookup_of({ITEM: IDS}))
    assert cache.complete and [[method for method, _ in t.calls] for t in transports] == [["read"], ["read"]]
    reads.close()


def test_without_an_answer_the_known_map_is_used_and_retried() -> None:
    unrestored, clock = [make_shard(index=i, num_shards=2) for i in range(2)], FakeClock()
    transports = [RecordingTransport(transport_to(shard)) for shard in unrestored]
    reads = ShardReads(transports, 64, 0.05, clock)
    reads.refresh_bucket_map()
    reads.refresh_bucket_map()
    assert [len(t.calls) for t in transports] == [1, 1] and reads.owners == BucketMap.modulo(64, 2)
    clock.advance(1.5)
    reads.refresh_bucket_map()
    assert [len(t.calls) for t in transports] == [2, 2]
    reads.close()


def test_a_barrier_covers_the_buckets_of_its_restore() -> None:
    shards = shards_with_map(SHIFTED)
    assert [shard.rollback().buckets for shard in shards] == [
        frozenset(SHIFTED.buckets_of(i)) for i in range(2)
    ]  # type: ignore[union-attr]
    scanned: set[int] = set()
    for shard in shards:
        cursor = 0
        while cursor >= 0:
            header, _ = ShardRpcHandler(shard).handle(
                "scan", {"stack": ADAGRAD, "cursor": cursor, "limit": 50}, []
            )
            assert {bucket for bucket, *_ in header["buckets"]} <= set(shard.buckets)
            scanned |= {bucket for bucket, *_ in header["buckets"]}
            cursor = header["cursor"]
    assert scanned == set(range(64))
