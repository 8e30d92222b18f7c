"""Settings of a shard process, and which rows it holds."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from roostream.runtime.address import LINK_ASKS, check_addresses, check_listen
from roostream.runtime.bucket_map import BucketMap
from roostream.runtime.deployment import Deployment
from roostream.runtime.kafka.topics import DEFAULT_BUCKETS, DEFAULT_PARTITIONS
from roostream.schema.schema import Schema
from roostream.schema.settings import MAX_SEED, setting, setting_error

MAX_PUBLISH_NORM = 100.0
"""Longest row that shards publish and readers take, unless settings say otherwise."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardConfig(Deployment):
    """`roostream shard --config FILE`. Without `bootstrap`, row deltas are not published."""

    needs: ClassVar[tuple[str, ...]] = ("schema", "store")

    listen: str = setting("127.0.0.1:0", "host:port that workers and readers call; port 0 = draw")
    controller: str = setting(help="host:port of the trainer's controller, which this shard dials")
    index: int = setting(0, "number of this shard, from 0", ge=0)
    num_shards: int = setting(1, "how many shards there are", ge=1)
    home: str = setting(help="this shard's own data directory; its committed segments live below it")
    publish_interval_ms: int = setting(1000, "how often touched rows go out to `rows`", ge=1)
    accept_lost_rows: tuple[str, ...] = setting(
        (),
        "parts of damaged segments, as an error named them, whose rows a restore may leave out; they begin anew",
    )
    seed: int = setting(0, "of rows' initial values; the same in every program", ge=0, le=MAX_SEED)
    max_expired_share: float = setting(
        0.5,
        "a freeze that would expire more than this share of a stack's rows expires none; 1 = any",
        gt=0,
        le=1,
    )
    max_publish_norm: float = setting(
        MAX_PUBLISH_NORM, "rows with a larger Euclidean norm are not published but counted", gt=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_listen(
            "listen", self.listen, insecure=self.insecure, authenticated=self.link.asks, by=LINK_ASKS
        )
        check_addresses("controller", self.controller)
        self.check_shards(self.num_shards)
        if self.index >= self.num_shards:
            raise setting_error("index", f"0..{self.num_shards - 1} (num_shards - 1)", self.index)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardIdentity:
    """Which shard this is, and what its rows begin with; the same as long as its data live. Its buckets are the manifest's."""

    schema: Schema
    index: int = 0
    num_shards: int = 1
    num_buckets: int = DEFAULT_BUCKETS
    num_partitions: int = DEFAULT_PARTITIONS
    seed: int = 0
    publishing: bool = True
    max_publish_norm: float = MAX_PUBLISH_NORM

    @property
    def first_owners(self) -> BucketMap:
        """Where buckets lie at the beginning, and as long as nobody has moved any."""
        return BucketMap.modulo(self.num_buckets, self.num_shards)

    def partition_of(self, bucket: int) -> int:
        """The partition of `rows` that a bucket's deltas are in."""
        return bucket % self.num_partitions
