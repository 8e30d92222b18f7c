"""Rows of a serving process: its own, or those that another program keeps for several."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serving_cases import NOW_MS, SCHEMA
from serving_fakes import FakeRowTopic

from param_server.replica.replica import Replica
from param_server.replica.row_cache import CachePolicy, RowCache
from param_server.replica.shard_reads import ShardReads
from param_server.replica.shared_files import SharedFolder
from param_server.replica.shared_reader import SharedReader
from param_server.replica.shared_rows import SharedOwner
from param_server.replica.some_buckets import SomeBuckets
from roostream.errors import ConfigError
from roostream.runtime.clock import FakeClock, SystemClock
from roostream.runtime.transport import Answer, InMemoryTransport
from roostream.schema.settings import Refusal
from serving.rows.config import RowsConfig
from serving.rows.main import shown_by
from serving.rows.row_follower import RowFollower
from serving.rows.served_rows import CachedRows, FollowedRows, SharedServedRows, open_rows
from tests.serving.rows.test_row_follower import ITEM, Shard, barrier, delta, lookup_of


class Kept:
    """A serving-rows program, and a serving process that reads its rows; shards and topic are in memory."""

    def __init__(self, folder: Path, rows: dict[int, float]) -> None:
        self.clock, self.topic, self.shard = FakeClock(NOW_MS), FakeRowTopic(), Shard(rows)
        shared = SharedFolder(folder, SCHEMA, 0)
        self.owner = SharedOwner(shared, SCHEMA, 0, 64, self.clock).open()
        replica = Replica(SCHEMA, 0, stores=self.owner.stores)
        self.follower = RowFollower(
            replica,
            self.topic,
            [InMemoryTransport(self.shard)],
            lambda stage, ms: None,
            self.clock,
            shown_by(self.owner),
        )
        self.served = SharedServedRows(SharedReader(shared, SCHEMA, 0, self.clock), self.clock)

    def value(self, item: int) -> float:
        return float(self.served.gather(lookup_of(item))[ITEM.stack][0, 0])


def test_a_reader_is_ready_when_the_owner_s_rows_are_complete_and_follows_from_there(tmp_path: Path) -> None:
    kept = Kept(tmp_path, {8: 0.5})
    kept.served.reader.look()
    assert not kept.served.ready and kept.served.waiting_for == "rows of serving-rows"
    kept.follower.bootstrap()
    assert kept.served.ready and kept.value(8) == 0.5 and kept.served.age_s() is None
    kept.topic.add(delta(8, 0.75, 2))
    kept.follower.step()
    assert kept.value(8) == 0.75 and kept.served.age_s() == 0
    now_ms = pytest.approx(kept.clock.now_ms(), abs=1)
    assert kept.served.numbers() == {"replica_rows": 1, "rows_current_at_ms": now_ms, "rows_again": 0}


def test_a_reader_whose_owner_is_gone_goes_on_and_says_how_old_its_rows_are(tmp_path: Path) -> None:
    kept = Kept(tmp_path, {8: 0.5})
    kept.follower.bootstrap()
    kept.follower.step()
    kept.served.reader.look()
    kept.owner.close()
    kept.clock.advance(90)
    assert kept.served.ready and kept.value(8) == 0.5 and kept.served.age_s() == pytest.approx(90, abs=0.01)
    again = Kept(tmp_path, {8: 0.25})
    again.follower.bootstrap()
    kept.served.reader.look()
    assert kept.value(8) == 0.25


def test_rows_that_are_read_again_because_of_a_barrier_stay_whole_for_readers(tmp_path: Path) -> None:
    kept = Kept(tmp_path, {8: 0.5, 9: 0.25})
    kept.follower.bootstrap()
    kept.served.reader.look()
    kept.topic.add(barrier(8, 2, rebootstrap=True))
    kept.shard.rows, kept.shard.version = {9: 0.375}, (2, 1)
    stop = threading.Event()
    kept.topic.on_poll = lambda: stop.set() if kept.follower.num_bootstraps == 2 else None
    kept.follower.run(stop)
    assert kept.value(9) == 0.375 and kept.served.numbers()["replica_rows"] == 1


def test_a_process_looks_for_rows_until_it_stops(tmp_path: Path) -> None:
    kept = Kept(tmp_path, {8: 0.5})
    kept.follower.bootstrap()
    stop = threading.Event()
    kept.clock.sleep = lambda seconds, stop: stop.set() or True  # type: ignore[method-assign, union-attr, assignment]
    kept.served.run(stop)
    assert kept.served.ready
    kept.served.close()


def config_of(**settings: Any) -> Any:
    from serving.config import ServingConfig

    return ServingConfig(
        bootstrap="127.0.0.1:9", schema="s.toml", store="/tmp/s", home=Path("/tmp/h"), **settings
    )


def test_the_setting_says_where_rows_are(tmp_path: Path) -> None:
    shared = open_rows(config_of(rows="shared", rows_home=str(tmp_path)), SCHEMA, 0, SystemClock())
    assert isinstance(shared, SharedServedRows) and not shared.ready
    own = open_rows(config_of(shards=("127.0.0.1:9",)), SCHEMA, 0, SystemClock())
    assert isinstance(own, FollowedRows) and own.waiting_for == "rows of the shards" and not own.ready
    assert own.numbers()["rows_current_at_ms"] is None and own.numbers()["replica_lag"] is None
    own.close()
    with pytest.raises(Refusal, match="name that of serving-rows"):
        config_of(rows="shared")
    with pytest.raises(ConfigError, match="rows_home"):
        RowsConfig(bootstrap="127.0.0.1:9", schema="s.toml", shards=("127.0.0.1:9",))


class CachedStage:
    """A process with a cache over one shard of a real table."""

    def __init__(self, waits: bool = True) -> None:
        self.clock, self.topic, self.num_reads = FakeClock(NOW_MS), FakeRowTopic(), 0
        self.transport = InMemoryTransport(self._shard)
        reads = ShardReads([self.transport], 64, 0.05, self.clock)
        self.cache = RowCache(SCHEMA, 0, reads, CachePolicy(max_bytes=1 << 20, waits=waits))
        follower = RowFollower(self.cache, self.topic, [self.transport], lambda stage, ms: None, self.clock)
        self.served = CachedRows(follower, self.cache)

    def _shard(self, method: str, header: dict[str, Any], arrays: Any) -> Answer:
        if method == "pull":
            return {}, []
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


def test_a_cache_reads_what_it_lacks_and_follows_it() -> None:
    stage = CachedStage()
    assert not stage.served.ready and stage.served.waiting_for == "the end of the rows topic"
    stage.served.follower.bootstrap()
    assert stage.served.ready and stage.value(8) == 0.5 and stage.value(8) == 0.5 and stage.num_reads == 1
    stage.topic.add(delta(8, 0.75, 2))
    stage.served.follower.step()
    assert stage.value(8) == 0.75 and stage.served.age_s() == 0 and stage.served.complete
    numbers = stage.served.numbers()
    assert (
        numbers["rows_asked"],
        numbers["rows_missed"],
        numbers["rows_unread"],
        numbers["replica_rows"],
    ) == (3, 1, 0, 1)


def test_a_cache_whose_shard_and_topic_are_away_answers_what_it_has_and_says_what_it_lacks() -> None:
    stage = CachedStage()
    stage.served.follower.bootstrap()
    stage.value(8)
    stage.served.follower.step()
    stage.transport.down, stage.topic.away = True, True
    stage.clock.advance(20)
    stage.served.follower.step()
    assert stage.value(8) == 0.5 and stage.served.complete
    assert stage.value(9) != 0.5 and not stage.served.complete and stage.served.age_s() == 20
    assert stage.served.numbers()["rows_unread"] == 1 and stage.served.numbers()["row_reads_failed"] == 1


def test_a_cache_that_does_not_wait_reads_beside_until_the_process_stops() -> None:
    stage, stop = CachedStage(waits=False), threading.Event()
    stage.topic.on_poll = lambda: stop.set() if stage.cache.num_rows else stage.served.gather(lookup_of(8))
    stage.served.run(stop)
    assert stage.value(8) == 0.5 and stage.served.complete


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"rows": "cache"}, "expected the shards"),
        ({"rows_buckets": (1,), "shards": ("127.0.0.1:9",)}, 'with rows = "cache"'),
        ({"rows": "cache", "shards": ("127.0.0.1:9",), "rows_buckets": (64,)}, "numbers below buckets = 64"),
        ({"rows": "some"}, "rows"),
    ],
)
def test_settings_of_rows_that_don_t_fit_are_refused(settings: dict[str, Any], expected: str) -> None:
    with pytest.raises(Refusal, match=expected):
        config_of(**settings)


def test_a_cache_and_some_buckets_are_settings() -> None:
    shards = ("127.0.0.1:9", "127.0.0.1:10")
    cached = open_rows(config_of(rows="cache", shards=shards), SCHEMA, 0, SystemClock())
    assert (
        isinstance(cached, CachedRows)
        and cached.follower.replica is cached.cache
        and cached.cache.policy.waits
    )
    cached.close()
    some = open_rows(
        config_of(rows="cache", shards=shards, rows_buckets=(1, 2), rows_missing="initial"),
        SCHEMA,
        0,
        SystemClock(),
    )
    assert (
        isinstance(some, CachedRows)
        and isinstance(some.follower.replica, SomeBuckets)
        and not some.cache.policy.waits
    )
    assert some.follower.replica.replica.buckets == {1, 2}
    some.close()
