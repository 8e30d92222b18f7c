"""A single shard: what it answers and what it refuses."""

from __future__ import annotations

import json
import threading
from typing import Any

import numpy as np
import pytest

from param_server.initial_rows import initial_rows
from param_server.key_value_store import MemoryKeyValueStore
from param_server.main import METRICS, metrics_of
from param_server.publish import Publisher
from param_server.row_block import checksum
from param_server.server import ShardRpcHandler
from roostream.errors import (
    CheckpointError,
    ConfigError,
    FencedError,
    OtherVersionError,
    RoostreamError,
    SchemaError,
    UnavailableError,
    WireError,
)
from roostream.runtime.clock import FakeClock
from roostream.schema.ids import bucket_of
from roostream.schema.schema_file import schema_from_dict
from roostream.schema.update_rules import Adagrad
from tests.param_server.memory_rows import InMemoryRows
from tests.param_server.shard_support import (
    ADAGRAD,
    ITEM,
    ROWWISE,
    USER,
    commit,
    keys,
    link_manifest,
    make_shard,
    small_schema,
    started_shard,
    state_of,
    table_id,
)
from tests.param_server.shard_support import pull_from as pull
from tests.param_server.shard_support import push_to as push
from tests.runtime.manifest_cases import encoded
from tests.trainer.memory_store import MemoryStore


def test_every_metric_of_a_shard_has_a_help_text() -> None:
    shard = started_shard()
    publisher = Publisher(shard, InMemoryRows(), FakeClock())
    assert metrics_of(shard, publisher).keys() == METRICS.keys()


def test_reading_an_unknown_row_gives_its_initial_value_and_creates_none() -> None:
    shard = started_shard()
    table = small_schema().table_by_name[USER]
    expected = initial_rows(
        0, np.full(2, table.id, np.uint32), np.array([7, -7], np.int64), 4, table.init_scale
    )
    assert pull(shard, USER, 7, -7).tobytes() == expected.tobytes()
    assert shard.stats()["rows"] == {ADAGRAD: 0, ROWWISE: 0}


def test_the_first_push_creates_a_row_from_its_initial_value() -> None:
    shard = started_shard()
    before = pull(shard, ITEM, 1)
    gradient = np.array([[1, -2, 0, 4]], np.float32)
    push(shard, 1, ids=(1,), gradient_UD=gradient)
    table = small_schema().table_by_name[ITEM]
    assert isinstance(table.rule, Adagrad)
    expected = before - table.rule.learning_rate * gradient / np.sqrt(
        table.rule.initial_accumulator + gradient**2
    )
    np.testing.assert_allclose(pull(shard, ITEM, 1), expected, rtol=1e-6)
    assert shard.stats()["rows"] == {ADAGRAD: 1, ROWWISE: 0}


def test_each_table_of_a_stack_uses_its_own_learning_rate() -> None:
    label = [{"name": "click", "action": "click"}]
    rules = ({"name": "adagrad", "learning_rate": 0.5}, {"name": "adagrad", "initial_accumulator": 1.0})
    schema = schema_from_dict(
        {"tables": {ITEM: {"dim": 4, "rule": rules[0]}, USER: {"dim": 4, "rule": rules[1]}}, "label": label}
    )
    shard = started_shard(schema=schema)
    keys_2 = [np.array([table_id(ITEM), table_id(USER)], np.uint32), np.array([1, 1], np.int64)]
    header = {"incarnation": 1, "stacks": [ADAGRAD]}
    (before,) = ShardRpcHandler(shard).handle("pull", header, keys_2)[1]
    push = {
        "worker": 0,
        "sequence": 1,
        "step": 1,
        "time_ms": 1,
        "oldest_engagement_ms": 0,
        "oldest_close_ms": 0,
    }
    ShardRpcHandler(shard).handle("push", header | push, [*keys_2, np.ones((2, 4), np.float32)])
    (after,) = ShardRpcHandler(shard).handle("pull", header, keys_2)[1]
    np.testing.assert_allclose(before[0] - after[0], 0.5, rtol=1e-4)
    np.testing.assert_allclose(before[1] - after[1], 0.05 / np.sqrt(2), rtol=1e-4)


def test_a_push_is_applied_once_and_none_after_a_lost_one() -> None:
    shard = started_shard()
    assert push(shard, 1) is True
    before = state_of(shard)
    assert push(shard, 1) is False
    assert state_of(shard) == before
    assert shard.stats()["repeats"] == 1 and shard.stats()["pushes"] == 1
    with pytest.raises(FencedError):
        push(shard, 3)  # push 2 was lost


@pytest.mark.parametrize("incarnation", [0, 2, 4])
def test_another_incarnation_may_not_push(incarnation: int) -> None:
    shard = make_shard()
    shard.restore(3, "")
    with pytest.raises(FencedError, match=f"expected incarnation 3, got {incarnation}"):
        push(shard, 1, incarnation=incarnation)
    assert state_of(shard) == {}


def test_readers_outside_training_pull_with_incarnation_0() -> None:
    shard = started_shard()
    assert pull(shard, ITEM, 1, incarnation=0).shape == (1, 4)
    with pytest.raises(FencedError):
        pull(shard, ITEM, 1, incarnation=7)


def test_nothing_is_answered_before_restore() -> None:
    shard = make_shard()
    for call in (lambda: pull(shard, ITEM, 1), lambda: push(shard, 1), lambda: shard.freeze(1, 0)):
        with pytest.raises(UnavailableError):
            call()
    with pytest.raises(UnavailableError):
        ShardRpcHandler(shard).handle("scan", {"stack": ADAGRAD, "cursor": 0, "limit": 10}, [])
    assert shard.stats()["ready"] is False


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_push_with_a_non_finite_gradient_is_refused(value: float) -> None:
    shard = started_shard()
    gradient_UD = np.ones((2, 4), np.float32)
    gradient_UD[1, 3] = value
    with pytest.raises(WireError) as caught:
        push(shard, 1, gradient_UD=gradient_UD)
    assert caught.value.reason == "non_finite"
    assert state_of(shard) == {} and push(shard, 1)


@pytest.mark.parametrize(
    ("gradient_UD", "expected"),
    [
        (np.ones((2, 3), np.float32), r"of shape \(2, 4\), got float32 \(2, 3\)"),
        (np.ones((1, 4), np.float32), r"of shape \(2, 4\), got float32 \(1, 4\)"),
        (np.ones((2, 4), np.float64), "expected float32"),
    ],
)
def test_a_gradient_of_another_shape_is_refused(gradient_UD: np.ndarray, expected: str) -> None:
    shard = started_shard()
    with pytest.raises(WireError, match=expected):
        push(shard, 1, gradient_UD=gradient_UD)
    assert state_of(shard) == {}


ONE = [np.array([table_id(ITEM)], np.uint32), np.array([1], np.int64)]


@pytest.mark.parametrize(
    ("header", "arrays", "error", "message"),
    [
        ({"incarnation": 1}, ONE, WireError, "expected stacks"),
        ({"incarnation": 1, "stacks": [ADAGRAD]}, ONE[:1], WireError, "2 arrays for each, got 1"),
        ({"incarnation": 1, "stacks": ["d9-x"]}, ONE, SchemaError, "expected a stack of d4-adagrad"),
        ({"incarnation": 1, "stacks": [ROWWISE]}, ONE, SchemaError, "expected one of tables topic"),
        ({"incarnation": 1, "stacks": [ADAGRAD]}, [ONE[0], ONE[1].astype(np.int32)], WireError, "id i8"),
        (
            {"incarnation": 1, "stacks": [ADAGRAD]},
            [ONE[0], np.zeros(2, np.int64)],
            WireError,
            "expected table u4",
        ),
        ({"stacks": [ADAGRAD]}, ONE, WireError, "expected an integer 'incarnation'"),
        ({"incarnation": "1", "stacks": [ADAGRAD]}, ONE, WireError, "got '1'"),
        ({"incarnation": 1 << 70, "stacks": [ADAGRAD]}, ONE, WireError, "expected an integer"),
        ({"incarnation": True, "stacks": [ADAGRAD]}, ONE, WireError, "got True"),
    ],
)
def test_an_invalid_pull_is_refused(
    header: dict[str, Any], arrays: list[np.ndarray], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        ShardRpcHandler(started_shard()).handle("pull", header, arrays)


@pytest.mark.parametrize(("method", "arrays_each"), [("contains", 2), ("overwrite", 5)])
@pytest.mark.parametrize("stacks", [[], [ADAGRAD, ROWWISE]])
def test_a_call_about_one_stack_with_none_or_two_is_refused(
    method: str, arrays_each: int, stacks: list[str]
) -> None:
    empty = [np.zeros(0, np.uint32), np.zeros(0, np.int64), *[np.zeros(0, np.float32)] * (arrays_each - 2)]
    header = {"incarnation": 1, "worker": 0, "sequence": 1, "stacks": stacks}
    with pytest.raises(WireError, match=f"expected one stack in a call, got {len(stacks)}"):
        ShardRpcHandler(started_shard()).handle(method, header, empty * len(stacks))


def test_a_push_that_names_a_stack_twice_is_refused_and_changes_nothing() -> None:
    """Room is reserved for each part, and two large parts would not fit together."""
    shard = started_shard()
    handler = ShardRpcHandler(shard)
    parts = [keys(ITEM, *range(start, start + 200)) for start in (0, 200)]
    header = {"incarnation": 1, "worker": 0, "sequence": 1, "step": 1, "time_ms": 1, "stacks": [ADAGRAD] * 2}
    header |= {"oldest_engagement_ms": 0, "oldest_close_ms": 0}
    arrays = [a for part in parts for a in (part.table_U, part.id_U, np.ones((200, 4), np.float32))]
    with pytest.raises(WireError, match="each once"):
        handler.handle("push", header, arrays)
    assert shard.ready and state_of(shard) == {}


def test_an_unknown_call_or_command_is_refused() -> None:
    shard = started_shard()
    with pytest.raises(RoostreamError):
        ShardRpcHandler(shard).handle("drop", {}, [])
    with pytest.raises(RoostreamError):
        shard.execute({"kind": "drop", "incarnation": 1})


def test_a_reader_gets_rows_with_their_versions_and_creates_none() -> None:
    shard = started_shard()
    push(shard, 1)
    publisher = Publisher(shard, InMemoryRows(), FakeClock())
    publisher.turn(threading.Event())
    requested = keys(ITEM, 1, 2, 3)
    header, (rows_UD, there_U, sequence_U) = ShardRpcHandler(shard).handle(
        "read", {"stacks": [ADAGRAD]}, [requested.table_U, requested.id_U]
    )
    assert header == {"incarnation": 1} and there_U.tolist() == [1, 1, 0]
    assert rows_UD.tobytes() == pull(shard, ITEM, 1, 2, 3).tobytes()
    buckets = [bucket_of(i, table_id(ITEM), 64) for i in (1, 2, 3)]
    assert (
        sequence_U.tolist() == [int(shard.tables[ADAGRAD].outbox.sequence_B[b]) for b in buckets]
        and sequence_U[0] == 1
    )
    assert shard.tables[ADAGRAD].num_rows == 2


def test_a_reader_gets_no_row_that_may_not_be_published() -> None:
    shard = started_shard()
    push(shard, 1)
    table = shard.tables[ADAGRAD]
    table.embeddings.rows_ND[table.index.find(keys(ITEM, 1))] = np.nan
    rows = table.read(keys(ITEM, 1, 2), 100.0)
    assert rows.exists_U.tolist() == [0, 1] and np.isfinite(rows.rows_UD).all()
    assert rows.rows_UD[0].tobytes() == table.embeddings.gather_at(keys(ITEM, 1), np.array([-1])).tobytes()


# Commits, restores and incarnations of one shard: bit-exact, and nothing damaged is ever loaded (guarantee
# G5, docs/architecture.md)


@pytest.mark.parametrize("publishing", [True, False])
def test_rows_expire_at_a_freeze_and_return_with_a_rollback(publishing: bool) -> None:
    blobs, store = MemoryKeyValueStore(), MemoryStore()
    schema = small_schema(expire_after_ms=5000)
    shard = started_shard(blobs=blobs, store=store, schema=schema, publishing=publishing)
    push(shard, 1, ITEM, (1,), time_ms=1000)
    push(shard, 2, USER, (1,), time_ms=1000)
    push(shard, 3, ITEM, (2,), time_ms=4000)
    first, before = commit(shard, store, 1, watermark_ms=6000), state_of(shard)
    assert len(before) == 3
    second = commit(shard, store, 2, watermark_ms=6001)
    assert len(state_of(shard)) == 2
    restarted = make_shard(blobs, store, schema=schema, publishing=publishing)
    restarted.restore(2, second)
    assert state_of(restarted) == state_of(shard)
    shard.freeze(3, 100_000)
    assert len(state_of(shard)) == 1
    shard.restore(2, second)
    assert state_of(shard) == state_of(restarted)
    restarted.restore(3, first)
    assert state_of(restarted) == before


def test_an_accepted_loss_applies_to_one_restore() -> None:
    """A restore that loses rows makes replicas bootstrap. The next restore of a complete commit must not."""
    blobs, store = MemoryKeyValueStore(), MemoryStore()
    shard = started_shard(blobs=blobs, store=store)
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


def test_an_expired_row_restarts_at_its_initial_value_and_event_time_never_goes_back() -> None:
    shard = started_shard(schema=small_schema(expire_after_ms=10))
    push(shard, 1, ITEM, (1,), time_ms=1)
    first = pull(shard, ITEM, 1)
    shard.freeze(1, 1000)
    push(shard, 2, ITEM, (1,), time_ms=1000, gradient_UD=np.full((1, 4), 1.5, np.float32))
    assert pull(shard, ITEM, 1).tobytes() == first.tobytes()
    shard.abort(1)
    push(shard, 3, ITEM, (1,), time_ms=5)
    shard.freeze(2, 1005)
    assert shard.stats()["rows"][ADAGRAD] == 1


def test_steps_of_a_commit_out_of_order_are_refused_and_change_nothing() -> None:
    store = MemoryStore()
    shard = started_shard(store=store)
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
    shard = started_shard(store=store)
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
    shard = started_shard(blobs=blobs, store=store)
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


# Manifests and segments that can't be restored


def test_g5_a_damaged_segment_is_refused_and_the_manifest_before_it_works() -> None:
    blobs, store = MemoryKeyValueStore(), MemoryStore()
    shard = started_shard(blobs=blobs, store=store)
    push(shard, 1, ITEM, (1, 2, 3))
    first, committed = commit(shard, store, 1), state_of(shard)
    push(shard, 2, ITEM, (4, 5))
    second = commit(shard, store, 2)
    key = next(iter(blobs.keys(b"b/2-1/")))
    blobs.data[key] = blobs.data[key][:-9] + b"\x00" + blobs.data[key][-8:]
    restarted = make_shard(blobs, store)
    with pytest.raises(CheckpointError, match="damaged"):
        restarted.restore(2, second)
    assert not restarted.ready
    with pytest.raises(UnavailableError):
        pull(restarted, ITEM, 1)
    restarted.restore(3, first)
    assert state_of(restarted) == committed


def test_an_intact_segment_of_a_newer_version_is_not_reported_as_damaged() -> None:
    blobs, store = MemoryKeyValueStore(), MemoryStore()
    shard = started_shard(blobs=blobs, store=store)
    push(shard, 1, ITEM, (1, 2, 3))
    name = commit(shard, store, 1)
    data = json.dumps(json.loads(blobs.data[b"d/1-1"]) | {"format": 9}).encode()
    blobs.data[b"d/1-1"] = data
    body = json.loads(store.objects[name])["body"]
    body["shards"]["0"]["segments"][0]["checksum"] = f"{checksum(data):016x}"
    store.objects[name] = encoded(body)
    with pytest.raises(OtherVersionError, match="segment 1-1: expected format 1 to 3, got 9") as caught:
        make_shard(blobs, store).restore(2, name)
    assert "accept_lost_rows" not in str(caught.value), "no row is lost"


def test_g5_a_shard_that_found_damage_during_a_restore_reads_everything_the_next_time() -> None:
    blobs, store = MemoryKeyValueStore(), MemoryStore()
    shard = started_shard(blobs=blobs, store=store)
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
def test_a_manifest_with_other_numbers_of_shards_buckets_or_partitions_is_refused(
    changes: dict[str, Any], message: str
) -> None:
    store = MemoryStore()
    name = link_manifest(store, 1, 1, [{"segments": [], "rows_end": {}}], **changes)
    with pytest.raises(ConfigError, match=message):
        make_shard(store=store).restore(1, name)


def test_an_absent_manifest_is_refused_but_still_fences_the_old_incarnation() -> None:
    shard = started_shard()
    with pytest.raises(UnavailableError, match="expected manifests/00000009"):
        shard.restore(2, "manifests/00000009")
    with pytest.raises(FencedError):
        push(shard, 1, incarnation=1)
    with pytest.raises(UnavailableError):
        push(shard, 1, incarnation=2)
    shard.restore(2, "")
    assert push(shard, 1, incarnation=2)


def test_a_shard_without_readers_commits_only_what_changed() -> None:
    store = MemoryStore()
    shard = started_shard(store=store, publishing=False)
    push(shard, 1, ITEM, (1, 2))
    commit(shard, store, 1)
    assert shard.freeze(2, 0)["rows"] == 0
    assert shard.take_round() is not None and shard.rollback() is None


def test_a_shard_keeps_as_many_commits_as_the_controller() -> None:
    """Else a rollback could not reach commits that the controller keeps, with another `keep_commits`."""
    store = MemoryStore()
    shard = make_shard(store=store)
    shard.execute({"kind": "restore", "incarnation": 1, "manifest": "", "keep_commits": 12})
    for seq in range(1, 15):
        push(shard, seq)
        shard.execute({"kind": "freeze", "incarnation": 1, "seq": seq, "watermark_ms": 0})
        written = shard.execute({"kind": "write", "incarnation": 1, "seq": seq})
        link_manifest(store, seq, 1, [written])
        shard.execute({"kind": "commit", "incarnation": 1, "seq": seq})
    assert [kept.seq for kept in shard.segments.history()] == list(range(3, 15))
