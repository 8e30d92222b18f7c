"""The rows of a serving process: a full replica, or a cache."""

from __future__ import annotations

import threading

from param_server.replica.replica import Replica
from param_server.replica.row_cache import CachePolicy, PartialReplica, RowCache
from param_server.replica.shard_reads import ShardReads
from roostream.runtime.address import expand_addresses
from roostream.runtime.clock import Clock
from roostream.runtime.histograms import freshness_histogram
from roostream.runtime.kafka import clients
from roostream.runtime.kafka.kafka_consumer import KafkaConsumer
from roostream.runtime.kafka.topics import ROWS
from roostream.runtime.rpc.client import SocketTransport
from roostream.runtime.thread_group import ThreadGroup
from roostream.schema.schema import Schema
from serving.config import RowSourceSettings, RowsSettings
from serving.rows.row_follower import RowFollower, RowReplica, rows_consumer_options

_JOIN_S = 1.0


class FollowedRows:
    """A replica of all rows that follows the shards and the topic. All methods may be called from any thread,
    except `run`, which is a thread."""

    waiting_for = "rows of the shards"  # what the rows are loaded from, for messages

    def __init__(self, follower: RowFollower) -> None:
        self.follower = follower
        self.gather, self.age_s = follower.replica.gather, follower.age_s

    @property
    def ready(self) -> bool:
        """Whether rows were loaded once."""
        return self.follower.ready

    @property
    def complete(self) -> bool:
        """Whether this thread's last gather got all rows in time."""
        return True

    @property
    def waits(self) -> bool:
        """Whether a gather may wait for a shard."""
        return False

    def metrics(self) -> dict[str, float | None]:
        """Metric name → value."""
        follower = self.follower
        return {
            "roostream_serving_replica_rows": follower.replica.num_rows,
            "roostream_serving_replica_lag_records": follower.lag(),
            "roostream_serving_replica_applied_total": follower.num_applied,
            "roostream_serving_replica_refused_total": follower.num_refused,
            "roostream_serving_replica_bootstraps_total": follower.num_bootstraps,
            "roostream_serving_replica_repaired_buckets_total": follower.num_repaired,
            "roostream_serving_rows_current_timestamp_seconds": follower.current_time_s(),
        }

    def run(self, stop: threading.Event) -> None:
        """Keep the rows up to date until `stop`."""
        self.follower.run(stop)

    def close(self) -> None:
        """Call after `run` has ended."""
        self.follower.topic.close()
        for shard in self.follower.shards:
            shard.close()


class CachedRows(FollowedRows):
    """A cache of the rows that requests use, and some complete buckets."""

    waiting_for = "the end of the rows topic"

    def __init__(self, follower: RowFollower, cache: RowCache) -> None:
        super().__init__(follower)
        self.cache = cache

    @property
    def complete(self) -> bool:
        return self.cache.complete

    @property
    def waits(self) -> bool:
        return self.cache.policy.waits

    def metrics(self) -> dict[str, float | None]:
        cache = self.cache
        return {
            **super().metrics(),
            "roostream_serving_row_cache_lookups_total": cache.num_lookups,
            "roostream_serving_row_cache_misses_total": cache.num_missed,
            "roostream_serving_row_cache_initial_values_total": cache.num_initial_values,
            "roostream_serving_row_cache_evictions_total": cache.num_evicted,
            "roostream_serving_row_cache_absent_keys": cache.num_without_row,
            "roostream_serving_row_reads_failed_total": cache.reads.num_failed,
        }

    def run(self, stop: threading.Event) -> None:
        """Keep the rows up to date until `stop`. A second thread reads the rows that are missing in the cache
        and that no request waits for. Raises RuntimeError: that thread has failed."""
        threads = ThreadGroup(stop)
        threads.start("row-reads", self.cache.run, stop)
        super().run(stop)
        threads.join(_JOIN_S)
        threads.check()

    def close(self) -> None:
        self.cache.reads.close()
        super().close()


def open_follower(config: RowSourceSettings, replica: RowReplica, clock: Clock) -> RowFollower:
    """Open a follower of the deployment's Kafka and shards, which may be away."""
    topic = KafkaConsumer.open(
        config.broker, f"{config.prefix}serving-rows", rows_consumer_options(config.prefix, config.partitions)
    )

    def wait_for_topic(stop: threading.Event) -> None:
        clients.check_topics(config.broker, config.prefix, (ROWS,), config.partitions, stop)

    shards, observe = _connect_shards(config), freshness_histogram().observe
    return RowFollower(replica, topic, shards, observe, clock, wait_for_topic)


def _connect_shards(config: RowSourceSettings) -> list[SocketTransport]:
    """A connection to each shard, opened at its first call."""
    credentials = config.link_credentials()
    return [SocketTransport(address, credentials=credentials) for address in expand_addresses(config.shards)]


def open_rows(config: RowsSettings, schema: Schema, seed: int, clock: Clock) -> FollowedRows:
    """Open the rows that the settings describe; does not wait."""
    if config.rows == "cache":
        return _open_cache(config, schema, seed, clock)
    return FollowedRows(open_follower(config, Replica(schema, seed, num_buckets=config.buckets), clock))


def _open_cache(config: RowsSettings, schema: Schema, seed: int, clock: Clock) -> CachedRows:
    policy = CachePolicy(max_bytes=config.rows_cache_bytes, waits=config.rows_missing == "read")
    cache = RowCache(
        schema,
        seed,
        ShardReads(_connect_shards(config), config.buckets, config.rows_read_timeout_ms / 1000, clock),
        policy,
        config.buckets,
    )
    if not config.rows_buckets:
        return CachedRows(open_follower(config, cache, clock), cache)
    replica = Replica(schema, seed, num_buckets=config.buckets, buckets=config.rows_buckets)
    return CachedRows(open_follower(config, PartialReplica(replica, cache), clock), cache)
