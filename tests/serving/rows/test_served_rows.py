"""The rows of a serving process: a full replica of all rows, or a bounded cache."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from param_server.replica.row_cache import CachePolicy, PartialReplica, RowCache
from param_server.replica.shard_reads import ShardReads
from roostream.runtime.clock import FakeClock, SystemClock
from roostream.runtime.rpc.transport import Answer, InMemoryTransport
from roostream.schema.settings import SettingError
from serving.rows.row_follower import RowFollower
from serving.rows.served_rows import CachedRows, FollowedRows, open_rows
from tests.serving.rows.test_row_follower import ITEM, delta, lookup_of
from tests.serving.serving_cases import NOW_MS, SCHEMA
from tests.serving.serving_fakes import FakeRowTopic


def config_of(**settings: Any) -> Any:
    from serving.config import ServingConfig

    return ServingConfig(
        bootstrap="127.0.0.1:9", schema="s.toml", store="/tmp/s", home=Path("/tmp/h"), **settings
    )


def test_a_replica_is_the_default_row_store() -> None:
    rows = open_rows(config_of(shards=("127.0.0.1:9",)), SCHEMA, 0, SystemClock())
    assert isinstance(rows, FollowedRows) and rows.waiting_for == "rows of the shards" and not rows.ready
    assert (
        rows.metrics()["roostream_serving_rows_current_timestamp_seconds"] is None
        and rows.metrics()["roostream_serving_replica_lag_records"] is None
    )
    rows.close()


class CacheFixture:
    """A row cache over one fake shard, with a fake topic and clock."""

    def __init__(self, waits: bool = True) -> None:
        self.clock, self.topic, self.num_reads = FakeClock(NOW_MS), FakeRowTopic(), 0
        self.transport = InMemoryTransport(self._shard)
        reads = ShardReads([self.transport], 64, 0.05, self.clock)
        self.cache = RowCache(SCHEMA, 0, reads, CachePolicy(max_bytes=1 << 20, waits=waits))
        follower = RowFollower(self.cache, self.topic, [self.transport], lambda fixture, ms: None, self.clock)
        self.served = CachedRows(follower, self.cache)

    def _shard(self, method: str, header: dict[str, Any], arrays: Any) -> Answer:
        if method == "owners":
            return {"incarnation": 1}, []
        assert method == "read"
        self.num_reads += 1
        n = len(arrays[1])
        return {"incarnation": 1}, [
            np.full((n, ITEM.dim), 0.5, np.float32),
            np.ones(n, np.uint8),
            np.ones(n, np.uint64),
        ]

    def value(self, item: int) -> float:
        return float(self.served.gather(lookup_of(item))[ITEM.stack][0, 0])


def test_a_cache_reads_missing_rows_and_keeps_them_current() -> None:
    fixture = CacheFixture()
    assert not fixture.served.ready and fixture.served.waiting_for == "the end of the rows topic"
    fixture.served.follower.bootstrap()
    assert (
        fixture.served.ready
        and fixture.value(8) == 0.5
        and fixture.value(8) == 0.5
        and fixture.num_reads == 1
    )
    fixture.topic.add(delta(8, 0.75, 2))
    fixture.served.follower.step()
    assert fixture.value(8) == 0.75 and fixture.served.age_s() == 0 and fixture.served.complete
    numbers = fixture.served.metrics()
    assert (
        numbers["roostream_serving_row_cache_lookups_total"],
        numbers["roostream_serving_row_cache_misses_total"],
        numbers["roostream_serving_row_cache_initial_values_total"],
        numbers["roostream_serving_replica_rows"],
    ) == (3, 1, 0, 1)


def test_a_cache_without_shard_and_topic_answers_with_cached_rows_and_counts_missing_ones() -> None:
    fixture = CacheFixture()
    fixture.served.follower.bootstrap()
    fixture.value(8)
    fixture.served.follower.step()
    fixture.transport.down, fixture.topic.away = True, True
    fixture.clock.advance(20)
    fixture.served.follower.step()
    assert fixture.value(8) == 0.5 and fixture.served.complete
    assert fixture.value(9) != 0.5 and not fixture.served.complete and fixture.served.age_s() == 20
    assert (
        fixture.served.metrics()["roostream_serving_row_cache_initial_values_total"] == 1
        and fixture.served.metrics()["roostream_serving_row_reads_failed_total"] == 1
    )


def test_a_non_blocking_cache_reads_in_the_background_until_stop() -> None:
    fixture, stop = CacheFixture(waits=False), threading.Event()
    fixture.topic.on_poll = lambda: (
        stop.set() if fixture.cache.num_rows else fixture.served.gather(lookup_of(8))
    )
    fixture.served.run(stop)
    assert fixture.value(8) == 0.5 and fixture.served.complete


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"rows": "cache"}, "expected the shards"),
        ({"rows_buckets": (1,), "shards": ("127.0.0.1:9",)}, 'with rows = "cache"'),
        ({"rows": "cache", "shards": ("127.0.0.1:9",), "rows_buckets": (64,)}, "numbers below buckets = 64"),
        ({"rows": "some"}, "rows"),
    ],
)
def test_contradicting_row_settings_are_refused(settings: dict[str, Any], expected: str) -> None:
    with pytest.raises(SettingError, match=expected):
        config_of(**settings)


def test_a_cache_and_a_part_of_the_buckets_can_be_configured() -> None:
    shards = ("127.0.0.1:9", "127.0.0.1:10")
    cached = open_rows(config_of(rows="cache", shards=shards), SCHEMA, 0, SystemClock())
    assert (
        isinstance(cached, CachedRows)
        and cached.follower.replica is cached.cache
        and cached.cache.policy.waits
    )
    cached.close()
    partial = open_rows(
        config_of(rows="cache", shards=shards, rows_buckets=(1, 2), rows_missing="initial"),
        SCHEMA,
        0,
        SystemClock(),
    )
    assert (
        isinstance(partial, CachedRows)
        and isinstance(partial.follower.replica, PartialReplica)
        and not partial.cache.policy.waits
    )
    assert partial.follower.replica.replica.buckets == {1, 2}
    partial.close()


def test_the_process_stops_if_the_thread_that_reads_rows_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are missing in the cache would keep their initial values for ever."""
    fixture, stop = CacheFixture(), threading.Event()

    def defect() -> None:
        raise ValueError("no such bucket")

    monkeypatch.setattr(fixture.cache.reads, "refresh_bucket_map", defect)
    monkeypatch.setattr(FollowedRows, "run", lambda self, stop: stop.wait(10))
    with pytest.raises(RuntimeError, match="threads failed: row-reads"):
        fixture.served.run(stop)
    assert stop.is_set()
    fixture.served.close()
