"""The row follower with a real replica; the shard and the topic of rows are in memory.

Guarantees (docs/architecture.md, Guarantees): G4, row versions never go backwards in a replica; G5, damaged
messages are detected.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from param_server.initial_rows import initial_rows
from param_server.replica.replica import Replica
from roostream.errors import RoostreamError, SchemaError, UnavailableError, WireError
from roostream.runtime.clock import FakeClock
from roostream.runtime.kafka.consumer import RecordsGoneError
from roostream.runtime.kafka.topics import DEFAULT_BUCKETS
from roostream.runtime.rpc.transport import Answer, InMemoryTransport
from roostream.schema.ids import bucket_of
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.lookup import Lookup, StackLookup
from serving.rows.row_follower import RowFollower
from tests.serving.serving_cases import NOW_MS, SCHEMA
from tests.serving.serving_fakes import FakeRowTopic

ITEM = SCHEMA.table_by_name["item"]


class FakeShard:
    """A shard that answers `scan` with given rows: id → value of all columns."""

    def __init__(self, rows: dict[int, float], version: tuple[int, int] = (1, 1)) -> None:
        self.rows, self.version, self.num_scans = rows, version, 0

    def __call__(self, method: str, header: dict[str, Any], arrays: Any) -> Answer:
        if method == "owners":
            return {"incarnation": self.version[0], "version": 0, "num_owners": 1}, [np.zeros(64, np.int32)]
        assert method == "scan"
        self.num_scans += 1
        ids = np.array(sorted(self.rows) if header["stack"] == ITEM.stack else [], np.int64)
        rows = np.array([[self.rows[i]] * self._dim(header["stack"]) for i in ids.tolist()], np.float32)
        buckets = [[b, *self.version, 0] for b in range(DEFAULT_BUCKETS)]
        columns = [
            np.full(len(ids), ITEM.id, np.uint32),
            ids,
            rows.reshape(len(ids), self._dim(header["stack"])),
        ]
        return {"cursor": -1, "incarnation": self.version[0], "buckets": buckets}, columns

    def _dim(self, stack: str) -> int:
        return SCHEMA.stacks[stack][0].dim


def delta(item: int, value: float, sequence: int, incarnation: int = 1, **times: int) -> bytes:
    message = pb.RowDelta(
        schema=SCHEMA.fingerprint,
        stack=ITEM.stack,
        bucket=bucket_of(item, ITEM.id, DEFAULT_BUCKETS),
        incarnation=incarnation,
        sequence=sequence,
        table_id=ITEM.id,
        dim=ITEM.dim,
        ids=[item],
        rows=[value] * ITEM.dim,
        **times,  # type: ignore[arg-type]
    )
    return wire.encode(wire.ROW_DELTA, message)


def barrier(item: int, incarnation: int, rebootstrap: bool) -> bytes:
    bucket = bucket_of(item, ITEM.id, DEFAULT_BUCKETS)
    message = pb.Barrier(stack=ITEM.stack, bucket=bucket, incarnation=incarnation, rebootstrap=rebootstrap)
    return wire.encode(wire.BARRIER, message)


def lookup_of(item: int) -> Lookup:
    return Lookup({ITEM.stack: StackLookup(np.array([ITEM.id], np.uint32), np.array([item], np.int64), {})})


class FollowerFixture:
    """A row follower of one fake shard, with a fake topic and clock."""

    def __init__(self, shard: FakeShard) -> None:
        self.shard, self.topic, self.clock = shard, FakeRowTopic(), FakeClock(NOW_MS)
        self.transport = InMemoryTransport(shard)
        self.observed: list[tuple[str, float]] = []
        self.replica = Replica(SCHEMA, 0)
        self.follower = RowFollower(self.replica, self.topic, [self.transport], self._observe, self.clock)

    def _observe(self, fixture: str, ms: float) -> None:
        self.observed.append((fixture, ms))

    def value(self, item: int) -> np.ndarray:
        return self.replica.gather(lookup_of(item))[ITEM.stack][0]


def test_rows_are_loaded_from_shards_and_then_from_the_topic() -> None:
    fixture = FollowerFixture(FakeShard({8: 0.5}))
    fixture.topic.add(
        delta(8, 0.1, 1)
    )  # published before the bootstrap, so the shard's answer already has it
    assert not fixture.follower.ready and fixture.follower.lag() is None
    fixture.follower.bootstrap()
    assert fixture.follower.ready and fixture.value(8).tolist() == [0.5] * 4
    initial = initial_rows(
        0, np.array([ITEM.id], np.uint32), np.array([9], np.int64), ITEM.dim, ITEM.init_scale
    )
    np.testing.assert_array_equal(fixture.value(9), initial[0])
    fixture.topic.add(delta(8, 0.75, 2))
    fixture.topic.add(delta(9, 0.25, 2))
    assert fixture.follower.lag() == 2 and fixture.follower.step() == 2
    assert fixture.value(8).tolist() == [0.75] * 4 and fixture.value(9).tolist() == [0.25] * 4
    assert fixture.follower.lag() == 0 and fixture.follower.num_applied == 2


def test_rows_are_not_loaded_before_their_topic_exists() -> None:
    """At the first start of a stack, the topic does not exist yet, and a bootstrap would fail."""
    fixture, stop, seen = FollowerFixture(FakeShard({8: 0.5})), threading.Event(), []

    def wait_for_topic(stopping: threading.Event) -> None:
        seen.append(fixture.follower.num_bootstraps)
        stopping.set()

    fixture.follower.wait_for_topic = wait_for_topic
    fixture.follower.run(stop)
    assert seen == [0] and not fixture.follower.ready


def test_g4_an_older_delta_changes_nothing() -> None:
    fixture = FollowerFixture(FakeShard({8: 0.5}, version=(1, 5)))
    fixture.follower.bootstrap()
    fixture.topic.add(delta(8, 0.1, 4))
    fixture.follower.step()
    assert (
        fixture.value(8).tolist() == [0.5] * 4 and fixture.follower.num_applied == 0 and not fixture.observed
    )


def test_freshness_is_observed_when_a_delta_becomes_servable() -> None:
    fixture = FollowerFixture(FakeShard({}))
    fixture.follower.bootstrap()
    fixture.topic.add(delta(8, 0.1, 2, oldest_trained_ms=NOW_MS - 700, oldest_engagement_ms=NOW_MS - 21_000))
    fixture.topic.add(delta(8, 0.2, 3))
    fixture.follower.step()
    assert fixture.observed == [("trained_to_servable", 700.0), ("engagement_to_servable", 21_000.0)]


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"\x63\x01",
        wire.encode(wire.HEARTBEAT, pb.Heartbeat()),
        delta(8, float("nan"), 2),
        delta(8, 1, 2)[:-3],
    ],
    ids=["empty", "unknown type", "not for rows", "not finite", "cut"],
)
def test_g5_a_bad_record_is_counted_and_its_bucket_reloaded(value: bytes) -> None:
    fixture = FollowerFixture(FakeShard({8: 0.5}))
    fixture.follower.bootstrap()
    fixture.topic.add(value, bucket_of(8, ITEM.id, DEFAULT_BUCKETS))
    fixture.topic.add(delta(8, 0.75, 3))
    fixture.shard.rows, fixture.shard.version = {8: 0.875}, (1, 4)
    fixture.follower.step()
    assert (
        fixture.follower.num_refused == 1
        and fixture.value(8).tolist() == [0.875] * 4
        and not fixture.replica.stale
    )


def test_a_bad_record_of_an_unknown_bucket_reloads_all_rows() -> None:
    fixture = FollowerFixture(FakeShard({8: 0.5}))
    fixture.follower.bootstrap()
    fixture.topic.add(b"")
    with pytest.raises(RecordsGoneError):
        fixture.follower.step()


def test_an_unavailable_shard_is_retried_for_a_stale_bucket() -> None:
    fixture = FollowerFixture(FakeShard({8: 0.5}, version=(1, 0)))
    fixture.follower.bootstrap()
    fixture.topic.add(delta(8, 0.75, 2))
    scans = fixture.shard.num_scans
    fixture.follower.step()
    assert fixture.replica.stale and fixture.shard.num_scans == scans + 1, (
        "the shard's rows are older than those of the replica"
    )
    fixture.follower.step()
    assert fixture.shard.num_scans == scans + 1, "the shard is not asked again immediately"
    fixture.shard.version = (1, 2)
    fixture.clock.advance(5)
    fixture.follower.step()
    assert (
        not fixture.replica.stale
        and fixture.value(8).tolist() == [0.5] * 4
        and fixture.follower.num_repaired == 1
    )


def test_a_reset_barrier_reloads_all_rows_while_requests_continue() -> None:
    fixture = FollowerFixture(FakeShard({8: 0.5}))
    fixture.follower.bootstrap()
    fixture.topic.add(barrier(8, 2, rebootstrap=True))
    with pytest.raises(RecordsGoneError):
        fixture.follower.step()
    assert fixture.follower.ready and fixture.value(8).tolist() == [0.5] * 4
    fixture.shard.rows, fixture.shard.version = {8: 0.375}, (2, 1)
    fixture.follower.bootstrap()
    assert fixture.value(8).tolist() == [0.375] * 4 and fixture.follower.num_bootstraps == 2
    assert fixture.follower.step() == 0


def run_until(fixture: FollowerFixture, done: Callable[[], bool]) -> None:
    """Run the follower's loop until `done` returns true."""
    stop = threading.Event()
    fixture.topic.on_poll = lambda: stop.set() if done() else None
    fixture.follower.run(stop)


def test_shards_and_kafka_may_be_unavailable_at_the_start(caplog: pytest.LogCaptureFixture) -> None:
    fixture = FollowerFixture(FakeShard({8: 0.5}))
    fixture.topic.outages = 3
    fixture.transport.fail_next("scan")
    fixture.transport.fail_next("scan", "after")
    run_until(fixture, lambda: fixture.follower.ready)
    assert fixture.follower.ready and fixture.value(8).tolist() == [0.5] * 4
    assert "waiting for rows of the shards" in caplog.text


def test_a_deleted_offset_reloads_all_rows() -> None:
    fixture = FollowerFixture(FakeShard({8: 0.5}))
    fixture.topic.losses = 1
    run_until(fixture, lambda: fixture.follower.num_bootstraps == 2)
    assert fixture.follower.num_bootstraps == 2


@pytest.mark.parametrize(
    "error",
    [WireError("oversized", "expected a frame of at most 1 GiB"), SchemaError("expected a stack of d16-x")],
)
def test_an_unreadable_answer_of_a_shard_is_retried(error: RoostreamError) -> None:
    """Shards get a wider table before serving does, which answers with its rows until it is replaced."""
    fixture = FollowerFixture(FakeShard({8: 0.5}))
    handler, failures = fixture.transport.handler, iter(range(3))

    def unreadable(method: str, header: Any, arrays: Any) -> Answer:
        if method == "scan" and next(failures, None) is not None:
            raise error
        return handler(method, header, arrays)

    fixture.transport.handler = unreadable
    run_until(fixture, lambda: fixture.follower.ready)
    assert fixture.value(8).tolist() == [0.5] * 4


def test_a_topic_that_fails_while_it_is_followed_does_not_end_the_follower() -> None:
    fixture = FollowerFixture(FakeShard({8: 0.5}))
    polled = iter(range(100))

    def poll() -> None:
        if next(polled) == 1:
            raise UnavailableError("injected")

    stop = threading.Event()
    fixture.topic.on_poll = lambda: (poll(), stop.set() if fixture.follower.num_bootstraps == 2 else None)
    fixture.follower.run(stop)
    assert fixture.follower.num_bootstraps == 2


def test_rows_of_a_newer_incarnation_than_the_shards_are_not_reported_as_current(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fixture = FollowerFixture(FakeShard({8: 0.5}, version=(3, 1)))
    fixture.follower.bootstrap()
    fixture.follower.step()
    assert fixture.follower.age_s() == 0
    fixture.shard.version = (1, 9)
    for _ in range(8):
        fixture.clock.advance(10)
        fixture.follower.step()
    assert fixture.follower.age_s() == 80 and caplog.text.count("not known to be current") == 1


def test_a_shard_that_is_restored_late_causes_no_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fixture = FollowerFixture(FakeShard({8: 0.5}, version=(2, 1)))
    fixture.follower.bootstrap()
    for incarnation in (3, 4, 5):
        fixture.topic.add(barrier(8, incarnation, rebootstrap=False))
        for _ in range(2):
            fixture.clock.advance(10)
            fixture.follower.step()
        assert fixture.follower.current_s != fixture.clock.monotonic_s(), (
            "the shard has not reached the new incarnation"
        )
        fixture.shard.version = (incarnation, 1)
        fixture.clock.advance(10)
        fixture.follower.step()
        assert fixture.follower.age_s() == 0
    assert "WARNING" not in [line.levelname for line in caplog.records]


def test_a_row_follower_stops_while_it_waits() -> None:
    fixture, stop = FollowerFixture(FakeShard({})), threading.Event()
    fixture.topic.outages, fixture.topic.on_outage = 1 << 30, stop.set
    fixture.follower.run(stop)
    assert not fixture.follower.ready


# Tests of the age of the rows


def test_row_age_grows_without_topic_or_shards() -> None:
    fixture = FollowerFixture(FakeShard({8: 0.5}))
    assert fixture.follower.age_s() is None and fixture.follower.current_time_s() is None
    fixture.follower.bootstrap()
    assert fixture.follower.age_s() is None, "the topic has not been read yet"
    fixture.follower.step()
    assert fixture.follower.age_s() == 0
    current_at_ms = fixture.clock.now_ms()
    fixture.topic.away = True
    for _ in range(3):
        fixture.clock.advance(10)
        fixture.follower.step()
    assert fixture.follower.current_time_s() == current_at_ms / 1000
    assert (
        fixture.follower.age_s() == 30 and fixture.follower.ready and fixture.value(8).tolist() == [0.5] * 4
    )
    fixture.topic.away = False
    fixture.follower.step()
    assert fixture.follower.age_s() == 0


def test_row_age_grows_while_a_shard_is_unavailable_and_retries_are_limited() -> None:
    fixture = FollowerFixture(FakeShard({8: 0.5}))
    fixture.follower.bootstrap()
    fixture.follower.step()
    fixture.transport.down = True
    fixture.clock.advance(0.5)
    fixture.follower.step()
    assert fixture.follower.age_s() == 0, "the shard answered a moment ago"
    fixture.clock.advance(1)
    fixture.follower.step()
    fixture.transport.down = False
    fixture.clock.advance(4)
    fixture.follower.step()
    assert fixture.follower.age_s() == 5
    fixture.clock.advance(1)
    fixture.follower.step()
    assert fixture.follower.age_s() == 0


def test_unread_records_or_a_stale_bucket_make_rows_not_current() -> None:
    fixture = FollowerFixture(FakeShard({8: 0.5}, version=(1, 0)))
    fixture.follower.bootstrap()
    fixture.follower.step()
    fixture.topic.add(delta(8, 0.75, 2))
    fixture.clock.advance(2)
    fixture.follower.step()
    assert fixture.replica.stale and fixture.follower.age_s() == 2
