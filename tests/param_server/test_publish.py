"""Publishing of row deltas to replicas: every change once, in versions, and barriers after a rollback."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from param_server.kernels import IN_FLIGHT
from param_server.key_value_store import MemoryKeyValueStore
from param_server.outbox import PublishRound
from param_server.publish import Publisher
from roostream.errors import UnavailableError
from roostream.runtime.clock import FakeClock
from roostream.runtime.kafka.consumer import RecordsGoneError
from roostream.schema.ids import bucket_of, buckets_of
from roostream.wire import records as wire
from tests.param_server.memory_rows import InMemoryRows
from tests.param_server.shard_support import (
    ADAGRAD,
    ITEM,
    NEVER_STOP,
    ROWWISE,
    TOPIC,
    USER,
    Follower,
    PublishLoop,
    commit,
    deltas,
    gradients_of,
    keys,
    lookup_of,
    make_shard,
    messages,
    small_schema,
    started_shard,
    table_id,
)
from tests.trainer.memory_store import MemoryStore


def test_changed_rows_are_published_once_with_current_values() -> None:
    loop = PublishLoop(started_shard())
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
    loop = PublishLoop(started_shard())
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
    loop = PublishLoop(started_shard())
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
    store = MemoryStore()
    loop = PublishLoop(started_shard(store=store, max_publish_norm=0.15))
    loop.push(1, 2)
    loop.shard.tables[ADAGRAD].embeddings.rows_ND[:2] = [[1, 1, 1, 1], [0.01, 0, 0, 0]]
    loop.turn()
    assert [list(d.ids) for d in deltas(loop.topic)] == [[2]]
    assert loop.shard.stats()["withheld"] == 1
    commit(loop.shard, store, 1)
    loop.shard.restore(2, "")
    assert loop.shard.stats()["withheld"] == 1, "the count is since the start of the process"


def test_a_withdrawn_row_gets_a_tombstone() -> None:
    blobs, store = MemoryKeyValueStore(), MemoryStore()
    loop = PublishLoop(started_shard(blobs=blobs, store=store))
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
    assert np.abs(follower.rows(ITEM, 1)).max() < 0.1, "the follower must have the later value"
    for _ in range(2):
        loop.shard.restore(loop.shard.incarnation + 1, name)
        loop = PublishLoop(loop.shard, loop.topic)
        loop.turn()
        follower.catch_up(loop.shard)
        assert (loop.rows(1) == large).all() and follower.replica.num_rows == 0, (
            "replicas must drop the row, not get a value that was never published"
        )
    loop.push(1, value=1e-9)
    before = len(deltas(loop.topic))
    loop.turn()
    assert len(deltas(loop.topic)) == before, "the tombstone must be sent once"


def test_each_table_has_its_own_deltas_and_many_rows_are_split() -> None:
    loop = PublishLoop(started_shard(num_buckets=2))
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
            bucket_deltas = [d for d in sent if (d.stack, d.bucket) == (stack, bucket)]
            assert [d.sequence for d in bucket_deltas] == list(range(1, len(bucket_deltas) + 1))
            assert [d.more for d in bucket_deltas] == [True] * (len(bucket_deltas) - 1) + [False]


def test_a_bucket_settles_with_the_delta_of_its_tombstones() -> None:
    outbox = started_shard(num_buckets=8).tables[ADAGRAD].outbox
    tombstone_keys, no_rows = keys(ITEM, 7), np.zeros(0, np.int64)
    [bucket] = buckets_of(tombstone_keys.id_U, tombstone_keys.table_U, 8)
    assert [outbox.settled_after(b, no_rows) for b in range(8)] == [0] * 8
    outbox.add_tombstones(tombstone_keys)
    assert [outbox.settled_after(b, no_rows) for b in range(8)] == [int(b == bucket) for b in range(8)]


def test_expired_rows_are_published_as_tombstones() -> None:
    loop = PublishLoop(started_shard(schema=small_schema(expire_after_ms=10)))
    loop.push(1, 2, time_ms=1)
    loop.push(2, time_ms=1000)
    loop.turn()
    follower = Follower(loop.topic)
    follower.catch_up(loop.shard)
    loop.shard.freeze(1, 1000)
    outbox = loop.shard.tables[ADAGRAD].outbox
    assert len(outbox.tombstones()) == 1
    loop.turn()
    assert len(outbox.tombstones()) == 0, "tombstones must be dropped once they are published"
    follower.catch_up(loop.shard)
    assert [(list(d.ids), d.num_tombstones) for d in deltas(loop.topic) if d.num_tombstones] == [([1], 1)]
    assert follower.replica.num_rows == 1
    assert follower.rows(ITEM, 1, 2).tobytes() == loop.rows(1, 2).tobytes()


def test_a_row_recreated_before_its_tombstone_is_published_as_a_row() -> None:
    loop = PublishLoop(started_shard(schema=small_schema(expire_after_ms=10)))
    loop.push(1, time_ms=1)
    loop.shard.freeze(1, 1000)
    loop.push(1, time_ms=1000)
    loop.turn()
    assert [(list(d.ids), d.num_tombstones) for d in deltas(loop.topic)] == [([1], 0)]


@pytest.mark.parametrize("num_appended", [0, 1, 2])
def test_rows_wait_while_kafka_is_unavailable(num_appended: int) -> None:
    loop = PublishLoop(started_shard())
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


def test_event_times_of_a_failed_round_are_kept() -> None:
    loop = PublishLoop(started_shard())
    loop.turn()
    loop.push(1, oldest_engagement_ms=400)
    loop.topic.fail_after(0)
    with pytest.raises(UnavailableError):
        loop.turn()
    loop.push(1, oldest_engagement_ms=700)
    loop.turn()
    assert [d.oldest_engagement_ms for d in deltas(loop.topic)] == [400]


# After a rollback, barriers tell replicas which incarnation is over, whatever was killed meanwhile.


def killed_and_restored(
    loop: PublishLoop, blobs: MemoryKeyValueStore, store: MemoryStore, name: str
) -> PublishLoop:
    """A new process of the same shard, restored as the next incarnation, with the same topic."""
    shard = make_shard(blobs, store)
    shard.restore(loop.shard.incarnation + 1, name)
    return PublishLoop(shard, loop.topic)


def test_barriers_precede_deltas_of_a_new_incarnation() -> None:
    loop = PublishLoop(started_shard(num_buckets=8))
    loop.push(1)
    loop.turn()
    barriers = [m for _, _, m in messages(loop.topic, wire.BARRIER)]
    assert {(b.stack, b.bucket, b.incarnation, b.rebootstrap) for b in barriers} == {  # type: ignore[attr-defined]
        (stack, bucket, 1, False) for stack in (ADAGRAD, ROWWISE) for bucket in range(8)
    }
    ((partition, offset, _),) = messages(loop.topic, wire.ROW_DELTA)
    assert all(p != partition or at < offset for p, at, _ in messages(loop.topic, wire.BARRIER))


def test_only_a_shard_s_own_buckets_get_barriers() -> None:
    shard = started_shard(index=1, num_shards=2)
    loop = PublishLoop(shard)
    loop.turn()
    assert {b.bucket for _, _, b in messages(loop.topic, wire.BARRIER)} == set(range(1, 64, 2))  # type: ignore[attr-defined]
    assert sorted(shard.stats()["rows_end"]) == ["1", "3"]


def test_a_kill_before_everything_is_republished_repeats_it() -> None:
    """The recorded offset advances only when every key behind the barrier is marked, and the marks are
    committed with the rows."""
    blobs, store = MemoryKeyValueStore(), MemoryStore()
    loop = PublishLoop(started_shard(blobs=blobs, store=store))
    follower = Follower(loop.topic)
    follower.catch_up(loop.shard)
    loop.turn()
    name = commit(loop.shard, store, 1)
    loop.push(1, 2, 3)
    loop.turn()
    for seq in (2, 3):  # each incarnation commits and dies before its publisher has run
        loop = killed_and_restored(loop, blobs, store, name)
        loop.push(9)
        name = commit(loop.shard, store, seq)
    loop = killed_and_restored(loop, blobs, store, name)
    loop.turn()
    follower.catch_up(loop.shard)
    assert follower.num_bootstraps == 1
    assert follower.rows(ITEM, 1, 2, 3, 9).tobytes() == loop.rows(1, 2, 3, 9).tobytes()


@pytest.mark.parametrize("in_flight", [False, True])
def test_committed_unpublished_rows_are_published_after_a_kill(in_flight: bool) -> None:
    blobs, store = MemoryKeyValueStore(), MemoryStore()
    loop = PublishLoop(started_shard(blobs=blobs, store=store, schema=small_schema()))
    follower = Follower(loop.topic)
    loop.turn()
    follower.catch_up(loop.shard)
    loop.push(1, 2, 3)
    round_ = loop.shard.take_round() if in_flight else None
    name = commit(loop.shard, store, 1)
    assert round_ is None or round_.deltas
    loop = killed_and_restored(loop, blobs, store, name)
    loop.turn()
    follower.catch_up(loop.shard)
    assert follower.num_bootstraps == 1
    assert follower.rows(ITEM, 1, 2, 3).tobytes() == loop.rows(1, 2, 3).tobytes()


def loop_with_round_in_flight() -> tuple[PublishLoop, str, PublishRound]:
    """A loop with a publishing round of two rows in flight after a commit. Also returns the manifest's name
    and the round."""
    store = MemoryStore()
    loop = PublishLoop(started_shard(store=store))
    loop.turn()
    loop.push(1, 2)
    name = commit(loop.shard, store, 1)
    round_ = loop.shard.take_round()
    assert round_ is not None and round_.deltas
    return loop, name, round_


def test_a_round_that_ends_after_a_restore_is_still_settled() -> None:
    loop, name, round_ = loop_with_round_in_flight()
    loop.shard.restore(2, name)
    loop.shard.settle_round(round_, False, {})
    loop.turn()
    follower = Follower(loop.topic)
    follower.replica.needs_bootstrap = False
    follower.catch_up(loop.shard)
    assert follower.replica.num_rows == 2


@pytest.mark.parametrize("acknowledged", [False, True])
def test_a_publishing_round_that_ends_during_a_restore_is_settled_after_it(acknowledged: bool) -> None:
    """Otherwise its rows would stay in flight forever, and readers would wait for a delta that never
    comes."""
    loop, name, round_ = loop_with_round_in_flight()
    original = loop.shard.segments.note_restored

    def settle_late(*args: object) -> None:
        loop.shard.settle_round(round_, acknowledged, {0: 10**6})
        original(*args)  # type: ignore[arg-type]

    loop.shard.segments.note_restored = settle_late  # type: ignore[method-assign]
    loop.shard.restore(2, name)
    indices = [table.index for table in loop.shard.tables.values()]
    assert not any(len(index.flagged(IN_FLIGHT)) for index in indices)
    assert loop.shard.take_round() is None, "the rollback must be published before another round"
    assert loop.shard.stats()["rows_end"]["0"] < 10**6, "offsets of another incarnation may not be recorded"


@pytest.mark.parametrize("first", [5, 100])
def test_a_deleted_recorded_offset_makes_readers_reload(first: int) -> None:
    blobs, store = MemoryKeyValueStore(), MemoryStore()
    loop = PublishLoop(started_shard(blobs=blobs, store=store))
    loop.push(1, 2)
    loop.turn()
    follower = Follower(loop.topic)
    follower.catch_up(loop.shard)
    name = commit(loop.shard, store, 1)
    loop.push(1, 2, 3)
    loop.turn()
    if first == 100:  # the topic was created again and is shorter than the recorded offset
        loop.topic.values, follower.offsets = [[] for _ in range(4)], [0] * 4
    else:
        for partition in range(4):
            loop.topic.trim(partition, len(loop.topic.values[partition]))
    loop = killed_and_restored(loop, blobs, store, name)
    loop.turn()
    follower.catch_up(loop.shard)
    assert follower.num_bootstraps == 2 and not follower.replica.needs_bootstrap
    assert follower.rows(ITEM, 1, 2, 3).tobytes() == loop.rows(1, 2, 3).tobytes()


class VanishingRows(InMemoryRows):
    """A rows topic whose records are deleted after `bounds` and before they are read."""

    def read(self, partition: int, start: int, end: int, stop: threading.Event):  # type: ignore[no-untyped-def]
        raise RecordsGoneError(f"rows {partition}: offset {start} is gone")


def test_an_offset_deleted_during_reading_makes_readers_reload(caplog: pytest.LogCaptureFixture) -> None:
    loop = PublishLoop(started_shard(num_buckets=4), VanishingRows())
    loop.turn()
    barriers = [m for _, _, m in messages(loop.topic, wire.BARRIER)]
    assert sum(b.rebootstrap for b in barriers) == 8 and "is gone" in caplog.text  # type: ignore[attr-defined]
    assert loop.shard.rollback() is None


def test_undecodable_records_are_skipped(caplog: pytest.LogCaptureFixture) -> None:
    topic = InMemoryRows()
    topic.values[0] = [b"?", bytes((99, 1))]
    loop = PublishLoop(started_shard(), topic)
    loop.turn()
    assert loop.shard.rollback() is None and caplog.text.count("skipped") == 2


def test_a_restore_in_the_middle_of_a_rollback_begins_another() -> None:
    store = MemoryStore()
    loop = PublishLoop(started_shard(store=store))
    old = loop.shard.rollback()
    assert old is not None
    loop.shard.restore(2, "")
    loop.publisher.roll_back(old, NEVER_STOP)
    assert loop.shard.rollback() is not None and loop.shard.take_round() is None
    loop.turn()
    assert loop.shard.rollback() is None


def test_a_manifest_records_an_offset_before_all_later_records() -> None:
    store = MemoryStore()
    loop = PublishLoop(started_shard(store=store))
    loop.turn()
    loop.push(1)
    loop.turn()
    ends = [len(values) for values in loop.topic.values]
    loop.shard.freeze(1, 0)
    loop.push(1)
    loop.turn()
    assert loop.shard.write(1)["rows_end"] == dict(enumerate(ends))


def test_the_publisher_continues_after_an_outage_and_ends_with_stop() -> None:
    loop = PublishLoop(started_shard())
    stop = threading.Event()

    class Outage(InMemoryRows):
        calls = 0

        def bounds(self, partition: int, stop: threading.Event) -> tuple[int, int]:
            Outage.calls += 1
            if Outage.calls < 3:
                raise UnavailableError("away")
            return super().bounds(partition, stop)

    topic = Outage()
    publisher = Publisher(loop.shard, topic, FakeClock())
    loop.push(1)
    thread = threading.Thread(target=publisher.run, args=(stop,))
    thread.start()
    while not publisher.num_keys:
        stop.wait(0.001)
    stop.set()
    thread.join(10)
    assert not thread.is_alive() and len(deltas(topic)) == 1 and publisher.published_at_ms > 0
