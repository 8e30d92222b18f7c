"""One shard's commits, restores and incarnations: exact to the bit, and nothing damaged is ever loaded
(G5)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from param_server.key_value_store import MemoryKeyValueStore
from roostream.errors import CheckpointError, ConfigError, FencedError, UnavailableError
from tests.param_server.shard_support import (
    ADAGRAD,
    ITEM,
    TOPIC,
    USER,
    MemoryStore,
    begun,
    commit,
    link_manifest,
    make_shard,
    small_schema,
    state_of,
)
from tests.param_server.shard_support import pull_from as pull
from tests.param_server.shard_support import push_to as push


def test_a_restart_gives_the_committed_rows_to_the_bit() -> None:
    blobs, store = MemoryKeyValueStore(), MemoryStore()
    shard = begun(blobs=blobs, store=store)
    for n in range(1, 9):
        push(shard, n, ITEM, (n, n + 1, 50))
    push(shard, 9, TOPIC, (1, 2, 3))
    name = commit(shard, store, 1)
    committed = state_of(shard)
    push(shard, 10, ITEM, (1, 99))
    again = make_shard(blobs, store)
    assert again.restore(2, name) == {"rows": len(committed)}
    assert state_of(again) == committed


@pytest.mark.parametrize("publishing", [True, False])
def test_rows_expire_at_a_freeze_and_return_with_a_rollback(publishing: bool) -> None:
    blobs, store = MemoryKeyValueStore(), MemoryStore()
    schema = small_schema(expire_after_ms=5000)
    shard = begun(blobs=blobs, store=store, schema=schema, publishing=publishing)
    push(shard, 1, ITEM, (1,), time_ms=1000)
    push(shard, 2, USER, (1,), time_ms=1000)
    push(shard, 3, ITEM, (2,), time_ms=4000)
    first, before = commit(shard, store, 1, watermark_ms=6000), state_of(shard)
    assert len(before) == 3
    second = commit(shard, store, 2, watermark_ms=6001)
    assert len(state_of(shard)) == 2
    again = make_shard(blobs, store, schema=schema, publishing=publishing)
    again.restore(2, second)
    assert state_of(again) == state_of(shard)
    shard.freeze(3, 100_000)
    assert len(state_of(shard)) == 1
    shard.restore(2, second)
    assert state_of(shard) == state_of(again)
    again.restore(3, first)
    assert state_of(again) == before


def test_an_accepted_loss_applies_to_one_restore() -> None:
    """Of rows that were lost nobody knows what readers have; of those of a whole commit they do."""
    blobs, store = MemoryKeyValueStore(), MemoryStore()
    shard = begun(blobs=blobs, store=store)
    push(shard, 1)
    name = commit(shard, store, 1)
    shard.segments.lost.add("1-1/lost")
    shard.restore(2, name)
    rollback = shard.rollback()
    assert (
        rollback is not None
        and rollback.rows_end
        and all(offset >= 0 for offset in rollback.rows_end.values())
    )


def test_a_row_that_expired_begins_again_at_its_initial_value() -> None:
    shard = begun(schema=small_schema(expire_after_ms=10))
    push(shard, 1, ITEM, (1,), time_ms=1)
    first = pull(shard, ITEM, 1)
    shard.freeze(1, 1000)
    push(shard, 2, ITEM, (1,), time_ms=1000, gradient_UD=np.full((1, 4), 1.5, np.float32))
    assert pull(shard, ITEM, 1).tobytes() == first.tobytes()


def test_event_time_never_goes_back() -> None:
    shard = begun(schema=small_schema(expire_after_ms=10))
    push(shard, 1, ITEM, (1,), time_ms=1000)
    push(shard, 2, ITEM, (1,), time_ms=5)
    shard.freeze(1, 1005)
    assert shard.stats()["rows"][ADAGRAD] == 1


def test_steps_of_a_commit_out_of_order_are_refused_and_change_nothing() -> None:
    store = MemoryStore()
    shard = begun(store=store)
    push(shard, 1)
    for step in (lambda: shard.write(1), lambda: shard.commit(1)):
        with pytest.raises(CheckpointError):
            step()
    shard.freeze(1, 0)
    with pytest.raises(CheckpointError):
        shard.freeze(2, 0)
    with pytest.raises(CheckpointError):
        shard.commit(1)
    shard.abort(0)
    shard.write(1)
    assert shard.commit(1) == {} and shard.commit(1) == {}


def test_an_abort_ends_all_freezes_up_to_it() -> None:
    store = MemoryStore()
    shard = begun(store=store)
    push(shard, 1)
    shard.freeze(7, 0)
    shard.abort(8)
    for seq in (7, 8):
        with pytest.raises(
            FencedError, match=f"expected a commit above 8 to freeze, got {seq}: it was aborted"
        ):
            shard.freeze(seq, 0)
    name = commit(shard, store, 9)
    shard.restore(2, name)
    shard.freeze(1, 0)


def test_a_commit_holds_even_if_old_segments_can_t_be_deleted(caplog: pytest.LogCaptureFixture) -> None:
    blobs, store = MemoryKeyValueStore(), MemoryStore()
    shard = begun(blobs=blobs, store=store)
    push(shard, 1)
    shard.freeze(1, 0)
    shard.write(1)
    blobs.fail_at(1)
    assert shard.commit(1) == {}
    assert shard.committed.seq == 1 and "could not be deleted" in caplog.text


# Incarnations


@pytest.mark.parametrize("incarnation", [4, 5])
def test_a_restore_that_is_not_newer_is_refused(incarnation: int) -> None:
    shard = make_shard()
    shard.restore(5, "")
    with pytest.raises(FencedError):
        shard.execute({"kind": "restore", "incarnation": incarnation, "manifest": ""})
    assert shard.ready


def test_a_commit_by_its_commands() -> None:
    store = MemoryStore()
    shard = make_shard(store=store)
    shard.execute({"kind": "restore", "incarnation": 1, "manifest": ""})
    push(shard, 1)
    frozen = shard.execute({"kind": "freeze", "incarnation": 1, "seq": 1, "watermark_ms": 0})
    assert frozen["rows"] == 2 and frozen["paused_ms"] >= 0
    written = shard.execute({"kind": "write", "incarnation": 1, "seq": 1})
    assert set(written) == {"segments", "rows_end"}
    assert set(written["segments"][0]) == {"name", "rows", "bytes", "checksum"}
    assert written["segments"][0]["name"] == "1-1" and written["rows_end"] == {0: 0, 1: 0, 2: 0, 3: 0}
    link_manifest(store, 1, 1, [written])
    assert shard.execute({"kind": "commit", "incarnation": 1, "seq": 1}) == {}
    assert shard.execute({"kind": "abort", "incarnation": 1, "seq": 1}) == {}
    assert shard.execute({"kind": "restore", "incarnation": 2, "manifest": "manifests/00000001"}) == {
        "rows": 2
    }


# What can't be restored


def test_g5_a_damaged_segment_is_refused_and_the_manifest_before_it_works() -> None:
    blobs, store = MemoryKeyValueStore(), MemoryStore()
    shard = begun(blobs=blobs, store=store)
    push(shard, 1, ITEM, (1, 2, 3))
    first, committed = commit(shard, store, 1), state_of(shard)
    push(shard, 2, ITEM, (4, 5))
    second = commit(shard, store, 2)
    key = next(iter(blobs.keys(b"b/2-1/")))
    blobs.data[key] = blobs.data[key][:-9] + b"\x00" + blobs.data[key][-8:]
    again = make_shard(blobs, store)
    with pytest.raises(CheckpointError, match="damaged"):
        again.restore(2, second)
    assert not again.ready
    with pytest.raises(UnavailableError):
        pull(again, ITEM, 1)
    again.restore(3, first)
    assert state_of(again) == committed


def test_g5_a_survivor_that_finds_damage_in_the_middle_reads_everything_the_next_time() -> None:
    blobs, store = MemoryKeyValueStore(), MemoryStore()
    shard = begun(blobs=blobs, store=store)
    push(shard, 1, ITEM, tuple(range(40)))
    name, committed = commit(shard, store, 1), state_of(shard)
    push(shard, 2, ITEM, tuple(range(30)))
    key = list(blobs.keys(b"b/1-1/"))[-20]
    good = blobs.data[key]
    blobs.data[key] = good[:-1] + b"?"
    with pytest.raises(CheckpointError):
        shard.restore(2, name)
    blobs.data[key] = good
    shard.restore(3, name)
    assert state_of(shard) == committed


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_shards": 3}, "expected num_shards = 3, got 1"),
        ({"num_buckets": 8}, "num_buckets = 8"),
        ({"num_partitions": 8}, "num_partitions = 8"),
        ({"seed": 9}, "seed = 9"),
    ],
)
def test_a_manifest_of_another_arrangement_is_refused(changes: dict[str, Any], message: str) -> None:
    store = MemoryStore()
    name = link_manifest(store, 1, 1, [{"segments": [], "rows_end": {}}], **changes)
    with pytest.raises(ConfigError, match=message):
        make_shard(store=store).restore(1, name)


def test_a_manifest_that_is_absent_is_refused_and_fences_all_the_same() -> None:
    shard = begun()
    with pytest.raises(CheckpointError, match="absent"):
        shard.restore(2, "manifests/00000009")
    with pytest.raises(FencedError):
        push(shard, 1, incarnation=1)
    with pytest.raises(UnavailableError):
        push(shard, 1, incarnation=2)
    shard.restore(2, "")
    assert push(shard, 1, incarnation=2)


def test_a_shard_without_readers_commits_only_what_changed() -> None:
    store = MemoryStore()
    shard = begun(store=store, publishing=False)
    push(shard, 1, ITEM, (1, 2))
    commit(shard, store, 1)
    assert shard.freeze(2, 0)["rows"] == 0
    assert shard.take_round() is not None and shard.rollback() is None
