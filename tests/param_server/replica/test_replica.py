"""A replica of the rows for serving. Guarantee G4 (docs/architecture.md): it applies the newest version of
each bucket and never goes back. Rows are read whole, and missing rows have initial values."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from param_server.client import Client
from param_server.initial_rows import initial_rows
from param_server.publish import Publisher
from param_server.replica.replica import Replica
from param_server.server import Shard, ShardRpcHandler
from roostream.errors import SchemaError, UnavailableError, WireError
from roostream.runtime.clock import FakeClock
from roostream.runtime.rpc.transport import InMemoryTransport
from roostream.schema.ids import bucket_of, unsigned
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from tests.param_server.memory_rows import InMemoryRows
from tests.param_server.shard_support import (
    ADAGRAD,
    ITEM,
    NEVER_STOP,
    Follower,
    PublishLoop,
    commit,
    gradients_of,
    lookup_of,
    make_shard,
    small_schema,
    started_shard,
    table_id,
    transport_to,
)
from tests.trainer.memory_store import MemoryStore

BUCKET = bucket_of(1, table_id(ITEM), 64)


def delta(
    sequence: int, value: float, incarnation: int = 1, is_tombstone: bool = False, **changes: object
) -> pb.RowDelta:
    """A delta of the row of item 1."""
    message = pb.RowDelta(
        bucket=BUCKET,
        incarnation=incarnation,
        sequence=sequence,
        table_id=table_id(ITEM),
        dim=4,
        ids=[1],
        rows=[] if is_tombstone else [value] * 4,
        num_tombstones=int(is_tombstone),
        stack=ADAGRAD,
    )
    for name, new in changes.items():
        if isinstance(new, list):
            message.ClearField(name)  # type: ignore[arg-type]
            getattr(message, name).extend(new)
        else:
            setattr(message, name, new)
    return message


def barrier(incarnation: int) -> pb.Barrier:
    return pb.Barrier(stack=ADAGRAD, bucket=BUCKET, incarnation=incarnation)


def item_1(replica: Replica) -> float:
    """The first number of the row of item 1, or -1 if the row has its initial value."""
    row = replica.gather(lookup_of({ITEM: [1]}))[ADAGRAD][0]
    initial = initial_rows(0, np.array([table_id(ITEM)], np.uint32), np.array([1], np.int64), 4, 0.05)[0]
    return -1.0 if row.tobytes() == initial.tobytes() else float(row[0])


def test_g4_only_newer_versions_are_applied() -> None:
    replica = Replica(small_schema(), 0)
    steps = [
        (delta(1, 1.0), True, 1.0),
        (delta(3, 3.0), True, 3.0),
        (delta(2, 2.0), False, 3.0),  # late
        (delta(3, 9.0), False, 3.0),  # repeated
        (delta(4, 0.0, is_tombstone=True), True, -1.0),
        (delta(3, 3.0), False, -1.0),  # a tombstone also has a version
        (delta(1, 5.0, incarnation=2), True, 5.0),
        (delta(99, 1.0, incarnation=1), False, 5.0),  # from a dead shard that still publishes
    ]
    for message, applied, value in steps:
        assert replica.apply(message) is applied
        assert item_1(replica) == value
    assert (replica.num_applied, replica.num_dropped) == (4, 4)


def test_g4_deltas_of_older_incarnations_are_dropped_after_a_barrier() -> None:
    replica = Replica(small_schema(), 0)
    replica.apply(delta(5, 5.0))
    assert replica.apply(barrier(2)) and replica.version(ADAGRAD, BUCKET) == (2, 0)
    assert not replica.apply(delta(6, 6.0)) and item_1(replica) == 5.0
    assert not replica.apply(barrier(1))
    assert (
        replica.apply(barrier(2)) and replica.apply(delta(1, 7.0, incarnation=2)) and item_1(replica) == 7.0
    )


def is_stale_after(*messages: pb.RowDelta | pb.Barrier) -> bool:
    """Whether the item's bucket is stale after delta 1 of incarnation 1 and then these messages."""
    replica = Replica(small_schema(), 0)
    for message in (delta(1, 1.0), *messages):
        replica.apply(message)
    assert replica.stale <= {(ADAGRAD, BUCKET)}
    return bool(replica.stale)


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([delta(2, 2.0), delta(3, 3.0)], False),
        ([delta(1, 2.0)], False),
        ([delta(3, 3.0)], True),
        ([delta(3, 3.0), delta(2, 2.0)], True),
        ([barrier(2), delta(1, 2.0, incarnation=2)], False),
        ([barrier(2), delta(2, 2.0, incarnation=2)], True),
        ([delta(2, 2.0, incarnation=2)], True),
    ],
)
def test_a_gap_in_versions_makes_the_bucket_stale(
    messages: list[pb.RowDelta | pb.Barrier], expected: bool
) -> None:
    assert is_stale_after(*messages) is expected


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (delta(1, 1.0, stack="d9-x"), SchemaError),
        (delta(1, 1.0, bucket=64), SchemaError),
        (delta(1, 1.0, dim=3), SchemaError),
        (delta(1, 1.0, rows=[1.0] * 5), WireError),
        (delta(1, 1.0, num_tombstones=2), WireError),
        (delta(1, 1.0, rows=[1.0, float("nan"), 1.0, 1.0]), WireError),
        (delta(1, 51.0), WireError),
    ],
)
def test_a_delta_that_doesn_t_fit_changes_nothing(message: pb.RowDelta, error: type[Exception]) -> None:
    replica = Replica(small_schema(), 0)
    replica.apply(delta(1, 1.0))
    with pytest.raises(error):
        replica.apply(message)
    assert item_1(replica) == 1.0 and replica.version(ADAGRAD, BUCKET) == (1, 1)


def test_string_ids_beyond_int64_are_found() -> None:
    replica = Replica(small_schema(), 0)
    id_ = -3
    replica.apply(delta(1, 2.0, ids=[unsigned(id_)], bucket=bucket_of(id_, table_id(ITEM), 64)))
    assert replica.gather(lookup_of({ITEM: [id_]}))[ADAGRAD][0, 0] == 2.0


# Bootstraps


def push_items(shard: Shard, *ids: int, value: float = 1.0) -> None:
    client = Client(small_schema(), [transport_to(shard)], worker=int(value * 1000) % 997)
    client.set_incarnation(shard.incarnation)
    lookup = lookup_of({ITEM: ids})
    client.push(lookup, gradients_of(lookup, value), step=0, time_ms=0)


def rows_of(shard: Shard, *ids: int) -> bytes:
    return (
        Client(small_schema(), [transport_to(shard)], worker=0)
        .pull(lookup_of({ITEM: ids}))[ADAGRAD]
        .tobytes()
    )


def test_a_bootstrap_loads_all_rows_of_all_shards() -> None:
    shards = [started_shard(index=i, num_shards=2) for i in range(2)]
    client = Client(small_schema(), [transport_to(s) for s in shards], worker=0)
    client.set_incarnation(1)
    lookup = lookup_of({ITEM: range(500)})
    client.push(lookup, gradients_of(lookup, 1.0), step=0, time_ms=0)
    replica = Replica(small_schema(), 0)
    replica.bootstrap([transport_to(s) for s in shards])
    assert replica.num_rows == 500
    assert replica.gather(lookup)[ADAGRAD].tobytes() == client.pull(lookup)[ADAGRAD].tobytes()
    client.close()


def test_a_bootstrap_without_all_buckets_is_repeated() -> None:
    """A shard that is named twice, or buckets that moved between the answers of two shards."""
    transports = [transport_to(started_shard(index=i, num_shards=2)) for i in range(2)]
    replica = Replica(small_schema(), 0)
    with pytest.raises(UnavailableError, match="none of 32 buckets such as 1"):
        replica.bootstrap([transports[0], transports[0]])
    assert replica.needs_bootstrap
    replica.bootstrap(transports)
    assert not replica.needs_bootstrap


def test_buckets_that_a_shard_did_not_return_stay_stale_and_the_repair_fails() -> None:
    transports = [transport_to(started_shard(index=i, num_shards=2)) for i in range(2)]
    replica = Replica(small_schema(), 0)
    replica.bootstrap(transports)
    replica.mark_stale(1)
    with pytest.raises(UnavailableError, match="expected bucket 1 from shard 1"):
        replica.repair(transports[::-1])
    assert {bucket for _, bucket in replica.stale} == {1}
    replica.repair(transports)
    assert not replica.stale


def test_deltas_that_a_bootstrap_already_contained_are_dropped() -> None:
    shard, topic = started_shard(), InMemoryRows()
    publisher = Publisher(shard, topic, FakeClock())
    push_items(shard, 1, value=1.0)
    publisher.turn(NEVER_STOP)
    follower = Follower(topic)
    push_items(shard, 1, value=2.0)
    publisher.turn(NEVER_STOP)
    follower.replica.bootstrap([transport_to(shard)])  # the follower still starts at offset 0 of the topic
    newest = rows_of(shard, 1)
    for value in topic.values[BUCKET % 4]:
        follower.read(BUCKET % 4, 1)
        assert follower.rows(ITEM, 1).tobytes() == newest, value
    assert follower.replica.num_dropped == 2


def test_a_bootstrap_removes_rows_that_the_shard_dropped() -> None:
    replica = Replica(small_schema(), 0)
    replica.apply(delta(1, 1.0))
    shard = make_shard()
    shard.restore(2, "")
    replica.bootstrap([transport_to(shard)])
    assert replica.num_rows == 0 and item_1(replica) == -1.0


def test_g4_only_stale_buckets_are_reloaded() -> None:
    shards = [started_shard(index=i, num_shards=2) for i in range(2)]
    topic = InMemoryRows()
    publishers = [Publisher(shard, topic, FakeClock()) for shard in shards]
    follower, transports = Follower(topic), [transport_to(shard) for shard in shards]
    follower.bootstrap(*shards)
    lookup = lookup_of({ITEM: range(40)})
    client = Client(small_schema(), transports, worker=0)
    client.set_incarnation(1)
    for n in range(3):
        client.push(lookup, gradients_of(lookup, 1.0 + n), step=0, time_ms=0)
        for publisher in publishers:
            publisher.turn(NEVER_STOP)
        if n == 1:
            for partition, values in enumerate(topic.values):
                follower.offsets[partition] = len(values)  # the follower misses this round
        follower.catch_up(*shards)
    buckets = {(ADAGRAD, bucket_of(i, table_id(ITEM), 64)) for i in range(40)}
    assert follower.replica.stale == buckets and follower.num_bootstraps == 1
    follower.replica.repair(transports)
    assert not follower.replica.stale
    assert follower.replica.gather(lookup)[ADAGRAD].tobytes() == client.pull(lookup)[ADAGRAD].tobytes()
    client.close()


def test_a_bucket_is_marked_stale_in_every_stack_and_an_unknown_one_needs_a_bootstrap() -> None:
    replica = Replica(small_schema(), 0)
    replica.bootstrap([transport_to(started_shard())])
    replica.mark_stale(BUCKET)
    assert (
        replica.stale == {(stack, BUCKET) for stack in small_schema().stacks} and not replica.needs_bootstrap
    )
    with pytest.raises(UnavailableError):
        replica.repair([transport_to(make_shard())])
    assert replica.stale, "the bucket must stay stale until the repair succeeds"
    replica.bootstrap([transport_to(started_shard())])
    assert not replica.stale, "a bootstrap reloads all buckets"
    replica.mark_stale(64)
    assert replica.needs_bootstrap


def test_a_shard_that_is_behind_or_unavailable_leaves_rows_unchanged() -> None:
    replica = Replica(small_schema(), 0)
    replica.apply(delta(1, 1.0, incarnation=7))
    for shard in (started_shard(), make_shard()):
        with pytest.raises(UnavailableError):
            replica.bootstrap([transport_to(shard)])
        assert replica.needs_bootstrap and item_1(replica) == 1.0


@pytest.mark.parametrize("is_in_flight", [False, True], ids=["waiting", "in flight"])
def test_rows_that_a_bootstrap_saw_before_the_topic_did_are_read_again_after_a_kill(
    is_in_flight: bool,
) -> None:
    """No later record of the topic would correct these rows."""
    store, topic = MemoryStore(), InMemoryRows()
    shard = started_shard(store=store)
    Publisher(shard, topic, FakeClock()).turn(NEVER_STOP)
    push_items(shard, 1)
    if is_in_flight:
        shard.take_round()
    follower = Follower(topic)
    follower.bootstrap(shard)
    assert follower.rows(ITEM, 1).tobytes() == rows_of(shard, 1)
    restarted = make_shard(store=store)
    restarted.restore(2, "")
    Publisher(restarted, topic, FakeClock()).turn(NEVER_STOP)
    follower.catch_up(restarted)
    assert follower.num_bootstraps == 2
    assert follower.rows(ITEM, 1).tobytes() == rows_of(restarted, 1)


def test_rows_that_have_been_published_since_need_no_second_bootstrap() -> None:
    store, topic = MemoryStore(), InMemoryRows()
    shard = started_shard(store=store)
    publisher = Publisher(shard, topic, FakeClock())
    publisher.turn(NEVER_STOP)
    push_items(shard, 1)
    follower = Follower(topic)
    follower.bootstrap(shard)
    publisher.turn(NEVER_STOP)
    name = commit(shard, store, 1)
    shard.restore(2, name)
    publisher.turn(NEVER_STOP)
    follower.catch_up(shard)
    assert follower.num_bootstraps == 1 and not follower.replica.needs_bootstrap


def test_readers_never_see_partial_rows() -> None:
    replica = Replica(small_schema(), 0, max_norm=1e9)
    replica.apply(delta(1, 1.0))
    stop, torn_rows = threading.Event(), []

    def read() -> None:
        while not stop.wait(0.0005):
            row = replica.gather(lookup_of({ITEM: [1]}))[ADAGRAD][0]
            if len(set(row.tolist())) > 1:
                torn_rows.append(row)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for sequence in range(2, 400):
        replica.apply(delta(sequence, float(sequence)))
        if sequence % 100 == 0:  # growth moves the arrays
            ids = [i for i in range(10_000) if bucket_of(i, table_id(ITEM), 64) == BUCKET][: sequence // 4]
            replica.apply(delta(sequence + 1, 0.5, ids=ids, rows=[0.5] * 4 * len(ids)))
    stop.set()
    for reader in readers:
        reader.join(10)
    assert torn_rows == []


# A bucket that is too large for one answer is read in slices while it changes.


SLICED = 5
IDS = [id_ for id_ in range(6000) if bucket_of(id_, table_id(ITEM), 64) == SLICED][:60]
OTHERS = [id_ for id_ in range(200) if id_ not in IDS]


class SlicedReading:
    """A replica that bootstraps from a shard whose answers hold a few rows only. `before_scan` runs before
    each answer."""

    def __init__(self, seed: int = 0) -> None:
        self.loop, self.random = PublishLoop(started_shard()), random.Random(seed)
        self.replica, self.offsets = Replica(small_schema(), 0), [0] * len(self.loop.topic.values)
        self.before_scan: Callable[[int], None] = lambda number: None
        self.num_scans = self.num_slices = 0
        handler = ShardRpcHandler(self.loop.shard, max_scan_bytes=8 * (4 * 4 + 20))

        def handle(method: str, header: Any, arrays: Sequence[np.ndarray]) -> Any:
            if method == "scan":
                self.before_scan(self.num_scans)
                self.num_scans += 1
                self.num_slices += "num_slices" in header
            return handler.handle(method, header, arrays)

        self.transport = InMemoryTransport(handle)

    def change(self) -> None:
        self.loop.push(*sorted(self.random.sample(IDS, 20)))
        if self.random.random() < 0.6:
            self.loop.turn()

    def bootstrap(self) -> None:
        self.offsets = [len(values) for values in self.loop.topic.values]
        self.replica.bootstrap([self.transport])

    def read_one(self) -> bool:
        for partition, values in enumerate(self.loop.topic.values):
            if self.offsets[partition] < len(values):
                self.replica.apply(wire.decode(values[self.offsets[partition]])[1])  # type: ignore[arg-type]
                self.offsets[partition] += 1
                return True
        return False

    def rows(self) -> np.ndarray:
        return self.replica.gather(lookup_of({ITEM: IDS}))[ADAGRAD]


def test_a_large_bucket_is_read_in_slices_and_equals_its_shard() -> None:
    reading = SlicedReading()
    reading.loop.push(*IDS, *OTHERS)
    reading.loop.turn()
    reading.bootstrap()
    assert reading.num_slices >= 8 and reading.replica.num_rows == len(IDS) + len(OTHERS)
    assert np.array_equal(reading.rows(), reading.loop.rows(*IDS))
    assert reading.replica.version(ADAGRAD, SLICED) == (1, 1) and not reading.replica.stale


@pytest.mark.parametrize("seed", range(3))
def test_g4_no_row_goes_back_while_a_bucket_is_read_in_slices(seed: int) -> None:
    """All gradients are positive, so every push lowers its rows."""
    reading = SlicedReading(seed)
    reading.loop.push(*IDS)
    for _ in range(3):
        reading.change()
    reading.before_scan = lambda number: reading.change()
    reading.bootstrap()
    assert reading.num_slices >= 8
    reading.before_scan = lambda number: None
    for _ in range(5):
        reading.change()
    reading.loop.turn()
    before = reading.rows()
    while reading.read_one():
        after = reading.rows()
        assert (after <= before).all()
        before = after
    assert np.array_equal(before, reading.loop.rows(*IDS)) and not reading.replica.stale


@pytest.mark.parametrize("fails_at", [2, 9])
def test_a_failure_between_two_slices_leaves_rows_that_deltas_do_not_roll_back(fails_at: int) -> None:
    reading = SlicedReading(1)
    reading.loop.push(*IDS)
    reading.loop.turn()

    def fail(number: int) -> None:
        reading.change()
        if number == fails_at:
            raise UnavailableError("away")

    reading.before_scan = fail
    with pytest.raises(UnavailableError):
        reading.bootstrap()
    reading.before_scan = lambda number: None
    reading.loop.turn()
    before = reading.rows()
    while reading.read_one():
        assert (reading.rows() <= before).all()
        before = reading.rows()
    reading.bootstrap()
    assert np.array_equal(reading.rows(), reading.loop.rows(*IDS))


def test_a_stale_bucket_is_repaired_in_slices() -> None:
    reading = SlicedReading()
    reading.loop.push(*IDS)
    reading.loop.turn()
    reading.bootstrap()
    reading.loop.push(*IDS[:7])
    reading.loop.turn()
    reading.replica.mark_stale(SLICED)
    before = reading.num_slices
    reading.replica.repair([reading.transport])
    assert reading.num_slices > before and not reading.replica.stale
    assert np.array_equal(reading.rows(), reading.loop.rows(*IDS))


def test_invalid_slices_are_refused() -> None:
    handler = ShardRpcHandler(started_shard())
    request = {"stack": ADAGRAD, "cursor": SLICED, "limit": 1, "slice": 0}
    for num_slices in (0, -1, 1 << 21):
        with pytest.raises(WireError, match="slices"):
            handler.handle("scan", {**request, "num_slices": num_slices}, [])
    with pytest.raises(UnavailableError, match="does not own"):
        handler.handle("scan", {**request, "cursor": 64, "num_slices": 2}, [])
