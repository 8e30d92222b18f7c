"""What goes out to readers: everything once it has changed, in versions, and after a rollback what is
over."""

from __future__ import annotations

import numpy as np
import pytest

from param_server.key_value_store import MemoryKeyValueStore
from roostream.errors import UnavailableError
from roostream.runtime.clock import FakeClock
from roostream.schema.ids import bucket_of, buckets_of
from roostream.wire import records as wire
from tests.param_server.reader_support import Follower, Loop, deltas, messages
from tests.param_server.shard_support import (
    ADAGRAD,
    ITEM,
    ROWWISE,
    TOPIC,
    USER,
    MemoryStore,
    begun,
    commit,
    gradients_of,
    keys,
    lookup_of,
    small_schema,
    table_id,
)


def test_changed_rows_are_published_once_with_current_values() -> None:
    loop = Loop(begun())
    loop.push(1, 2, 3)
    loop.push(2, value=5.0)
    loop.turn()
    sent = {i: list(d.rows[4 * n : 4 * n + 4]) for d in deltas(loop.topic) for n, i in enumerate(d.ids)}
    assert sorted(sent) == [1, 2, 3]
    assert np.array([sent[i] for i in (1, 2, 3)], np.float32).tobytes() == loop.rows(1, 2, 3).tobytes()
    before = len(deltas(loop.topic))
    loop.turn()
    assert len(deltas(loop.topic)) == before


def test_deltas_have_bucket_version_schema_and_partition() -> None:
    loop = Loop(begun())
    for _ in range(2):
        loop.push(1)
        loop.turn()
    bucket = bucket_of(1, table_id(ITEM), 64)
    assert [(d.bucket, d.incarnation, d.sequence) for d in deltas(loop.topic)] == [
        (bucket, 1, 1),
        (bucket, 1, 2),
    ]
    assert {p for p, _, _ in messages(loop.topic, wire.ROW_DELTA)} == {bucket % 4}
    first = deltas(loop.topic)[0]
    assert (first.schema, first.table_id, first.dim, first.stack) == (
        small_schema().fingerprint,
        table_id(ITEM),
        4,
        ADAGRAD,
    )


def test_a_delta_has_the_oldest_event_times_of_its_rows() -> None:
    loop = Loop(begun())
    shard_clock = loop.shard.clock
    assert isinstance(shard_clock, FakeClock)
    loop.push(1, oldest_engagement_ms=500, oldest_close_ms=900)
    trained_ms = shard_clock.now_ms()
    shard_clock.advance(1)
    loop.push(1, oldest_engagement_ms=400, oldest_close_ms=0)
    loop.turn()
    loop.push(1, oldest_engagement_ms=0, oldest_close_ms=0)
    loop.turn()
    times = [(d.oldest_engagement_ms, d.oldest_close_ms, d.oldest_trained_ms) for d in deltas(loop.topic)]
    assert times == [(400, 900, trained_ms), (0, 0, trained_ms + 1000)]


def test_rows_that_are_too_large_are_counted_and_left_out() -> None:
    loop = Loop(begun(max_publish_norm=0.15))
    loop.push(1, 2)
    loop.shard.tables[ADAGRAD].embeddings.rows_ND[:2] = [[1, 1, 1, 1], [0.01, 0, 0, 0]]
    loop.turn()
    assert [list(d.ids) for d in deltas(loop.topic)] == [[2]]
    assert loop.shard.stats()["withheld"] == 1


def test_a_withdrawn_row_gets_a_tombstone() -> None:
    blobs, store = MemoryKeyValueStore(), MemoryStore()
    loop = Loop(begun(blobs=blobs, store=store))
    follower = Follower(loop.topic)
    loop.turn()
    loop.push(1)
    table = loop.shard.tables[ADAGRAD]
    table.embeddings.rows_ND[table.index.find(keys(ITEM, 1))] = 60
    name, large = commit(loop.shard, store, 1), loop.rows(1)
    follower.catch_up(loop.shard)
    table.embeddings.rows_ND[table.index.find(keys(ITEM, 1))] = 0.01
    loop.push(1, value=1e-9)
    loop.turn()
    follower.catch_up(loop.shard)
    assert np.abs(follower.rows(ITEM, 1)).max() < 0.1, "readers have a later value"
    for _ in range(2):
        loop.shard.restore(loop.shard.incarnation + 1, name)
        loop = Loop(loop.shard, loop.topic)
        loop.turn()
        follower.catch_up(loop.shard)
        assert (loop.rows(1) == large).all() and follower.replica.num_rows == 0, (
            "they go back to none, not to a value that never was"
        )
    loop.push(1, value=1e-9)
    before = len(deltas(loop.topic))
    loop.turn()
    assert len(deltas(loop.topic)) == before, "told once"


def test_tables_of_a_stack_go_out_apart_and_many_rows_in_several_deltas() -> None:
    loop = Loop(begun(num_buckets=2))
    loop.shard.tables[ADAGRAD].outbox.max_delta_bytes = 3 * (8 + 16)
    ids = tuple(range(40))
    lookup = lookup_of({ITEM: ids, USER: ids, TOPIC: ids})
    loop.client.push(lookup, gradients_of(lookup, 1.0), step=0, time_ms=0)
    loop.turn()
    sent = deltas(loop.topic)
    assert max(len(d.ids) for d in sent if d.stack == ADAGRAD) == 3
    assert sorted(i for d in sent if d.table_id == table_id(USER) for i in d.ids) == list(ids)
    for stack in (ADAGRAD, ROWWISE):
        for bucket in range(2):
            of_bucket = [d for d in sent if (d.stack, d.bucket) == (stack, bucket)]
            assert [d.sequence for d in of_bucket] == list(range(1, len(of_bucket) + 1))
            assert [d.more for d in of_bucket] == [True] * (len(of_bucket) - 1) + [False]


def test_a_bucket_settles_with_the_delta_of_its_tombstones() -> None:
    outbox = begun(num_buckets=8).tables[ADAGRAD].outbox
    gone, nowhere = keys(ITEM, 7), np.zeros(0, np.int64)
    [bucket] = buckets_of(gone.id_U, gone.table_U, 8)
    assert [outbox.settled_after(b, nowhere) for b in range(8)] == [0] * 8
    outbox.add_tombstones(gone)
    assert [outbox.settled_after(b, nowhere) for b in range(8)] == [int(b == bucket) for b in range(8)]


def test_expired_rows_go_out_as_tombstones() -> None:
    loop = Loop(begun(schema=small_schema(expire_after_ms=10)))
    loop.push(1, 2, time_ms=1)
    loop.push(2, time_ms=1000)
    loop.turn()
    follower = Follower(loop.topic)
    follower.catch_up(loop.shard)
    loop.shard.freeze(1, 1000)
    outbox = loop.shard.tables[ADAGRAD].outbox
    assert len(outbox.tombstones()) == 1
    loop.turn()
    assert len(outbox.tombstones()) == 0, "readers have them"
    follower.catch_up(loop.shard)
    assert [(list(d.ids), d.num_tombstones) for d in deltas(loop.topic) if d.num_tombstones] == [([1], 1)]
    assert follower.replica.num_rows == 1
    assert follower.rows(ITEM, 1, 2).tobytes() == loop.rows(1, 2).tobytes()


def test_a_row_recreated_before_its_tombstone_is_published_as_a_row() -> None:
    loop = Loop(begun(schema=small_schema(expire_after_ms=10)))
    loop.push(1, time_ms=1)
    loop.shard.freeze(1, 1000)
    loop.push(1, time_ms=1000)
    loop.turn()
    assert [(list(d.ids), d.num_tombstones) for d in deltas(loop.topic)] == [([1], 0)]


@pytest.mark.parametrize("num_appended", [0, 1, 2])
def test_rows_wait_while_kafka_is_unavailable(num_appended: int) -> None:
    loop = Loop(begun())
    follower = Follower(loop.topic)
    loop.turn()
    follower.catch_up(loop.shard)
    loop.push(1, 2, 3, 4)
    loop.topic.fail_after(num_appended)
    with pytest.raises(UnavailableError):
        loop.turn()
    loop.push(3, 5)
    loop.topic.down = True
    with pytest.raises(UnavailableError):
        loop.turn()
    loop.topic.down = False
    loop.turn()
    follower.catch_up(loop.shard)
    assert follower.num_bootstraps == 1
    assert follower.rows(ITEM, 1, 2, 3, 4, 5).tobytes() == loop.rows(1, 2, 3, 4, 5).tobytes()


def test_times_behind_a_lost_round_are_not_forgotten() -> None:
    loop = Loop(begun())
    loop.turn()
    loop.push(1, oldest_engagement_ms=400)
    loop.topic.fail_after(0)
    with pytest.raises(UnavailableError):
        loop.turn()
    loop.push(1, oldest_engagement_ms=700)
    loop.turn()
    assert [d.oldest_engagement_ms for d in deltas(loop.topic)] == [400]
