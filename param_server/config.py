"""Settings of a shard process."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

from roostream.runtime.address import check_addresses
from roostream.runtime.bucket_map import BucketMap
from roostream.runtime.checkpoint_store import is_object_store
from roostream.runtime.deployment import Deployment
from roostream.runtime.kafka.topics import DEFAULT_BUCKETS, DEFAULT_PARTITIONS
from roostream.schema.schema import Schema
from roostream.schema.settings import MAX_SEED, setting, setting_error

MAX_PUBLISH_NORM = 100.0
"""Default norm limit of a row that shards publish and replicas accept."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardConfig(Deployment):
    """`roostream shard --config FILE`. Without `bootstrap`, row deltas are not published."""

    needs: ClassVar[tuple[str, ...]] = ("schema", "store")

    listen: str = setting("127.0.0.1:0", "host:port that workers and replicas call; port 0 picks a free port")
    controller: str = setting(help="host:port of the controller, which this shard connects to")
    index: int = setting(0, "number of this shard, from 0", ge=0)
    num_shards: int = setting(1, "number of shards of the deployment", ge=1)
    home: str = setting(help="data directory of this shard; its committed segments are stored below it")
    upload_segments: Literal["auto", "always", "never"] = setting(
        "auto",
        "copy rows to the checkpoint store before they are committed: always, never, or auto = if the store "
        "is an object store (s3://…)",
    )
    publish_interval_ms: int = setting(
        1000, "time between two publications of changed rows to the topic `rows`", ge=1
    )
    accept_lost_rows: tuple[str, ...] = setting(
        (),
        "damaged segment parts, as named by an error, whose rows a restore may lose; lost rows start "
        "from initial values",
    )
    seed: int = setting(0, "seed of initial rows; the same in every program", ge=0, le=MAX_SEED)
    max_expired_share: float = setting(
        0.5,
        "a commit that would expire more than this share of a table's rows expires none; 1 = no limit",
        gt=0,
        le=1,
    )
    max_publish_norm: float = setting(
        MAX_PUBLISH_NORM, "rows with a larger Euclidean norm are counted and not published", gt=0
    )

    @property
    def uploads(self) -> bool:
        """Whether rows are copied to the checkpoint store."""
        is_auto = self.upload_segments == "auto"
        return is_object_store(self.store) if is_auto else self.upload_segments == "always"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_link_port(self.listen)
        check_addresses("controller", self.controller)
        self.check_shards(self.num_shards)
        if self.index >= self.num_shards:
            raise setting_error("index", f"0..{self.num_shards - 1} (num_shards - 1)", self.index)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardIdentity:
    """Settings of a shard that must not change as long as its rows exist. The manifest says which buckets it
    owns."""

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
        """The bucket map of a new deployment, until buckets are moved."""
        return BucketMap.modulo(self.num_buckets, self.num_shards)

    def partition_of(self, bucket: int) -> int:
        """The partition of the topic `rows` that a bucket's deltas go to."""
        return bucket % self.num_partitions
