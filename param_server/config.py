"""Settings of a shard process, and which rows it holds."""

from __future__ import annotations

import dataclasses

from roo.config import setting
from roo.errors import ConfigError
from roo.schema import Schema
from runtime.rpc import parse_address
from runtime.topics import NUM_BUCKETS, PARTITIONS, ROWS


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardConfig:
    """See `roo.config`; checked here, loaded by `roo.config.load(ShardConfig, path, program="shard")`."""

    listen: str = setting("127.0.0.1:0", "host:port that workers and readers call; port 0 = draw")
    controller: str = setting(help="host:port of the trainer's controller, which this shard dials")
    index: int = setting(0, "number of this shard, from 0")
    num_shards: int = setting(1, "how many shards there are")
    schema: str = setting(help="path of the schema TOML")
    store: str = setting(help="directory of the checkpoint store: manifests are read from it")
    home: str = setting(help="this shard's own data directory; its committed segments live below it")
    bootstrap: str = setting("", "Kafka, host:port; empty = row deltas are not published")
    prefix: str = setting("", "prefix of topic names")
    publish_interval_ms: int = setting(1000, "how often touched rows go out to `rows`")
    seed: int = setting(0, "seed of rows' initial values; the same in every program")
    max_publish_norm: float = setting(100.0, "rows with a larger Euclidean norm are not published but counted")
    metrics_port: int = setting(0, "port of /metrics; 0 = draw")
    insecure: bool = setting(False, "allow listening on an address other than loopback")

    def __post_init__(self) -> None:
        parse_address(self.listen)
        parse_address(self.controller)
        if not 1 <= self.num_shards <= NUM_BUCKETS:
            raise ConfigError(f"expected num_shards in 1..{NUM_BUCKETS}, got {self.num_shards}")
        if not 0 <= self.index < self.num_shards:
            raise ConfigError(f"expected index in 0..{self.num_shards - 1} (num_shards - 1), got {self.index}")
        if self.publish_interval_ms < 1:
            raise ConfigError(f"expected publish_interval_ms of at least 1, got {self.publish_interval_ms}")
        if not self.max_publish_norm > 0:
            raise ConfigError(f"expected max_publish_norm above 0, got {self.max_publish_norm}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardIdentity:
    """Which rows are this shard's, and what they begin with; the same as long as its data live."""

    schema: Schema
    index: int = 0
    num_shards: int = 1
    num_buckets: int = NUM_BUCKETS
    num_partitions: int = PARTITIONS[ROWS]
    seed: int = 0
    publishing: bool = True
    max_publish_norm: float = 100.0

    @property
    def buckets(self) -> range:
        return range(self.index, self.num_buckets, self.num_shards)
