"""Settings that say where a serving process keeps embedding rows and how it follows them."""

from __future__ import annotations

import dataclasses
from typing import Literal

from roostream.runtime.address import check_addresses
from roostream.runtime.deployment import Deployment
from roostream.schema.settings import SettingError, setting, setting_error


@dataclasses.dataclass(frozen=True, kw_only=True)
class FollowsRows(Deployment):
    """A program that reads rows of the shards."""

    shards: tuple[str, ...] = setting(
        (), "host:port of every shard, in order, to bootstrap rows from; one with {N} stands for N of them"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_addresses("shards", *self.shards)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServesRows(FollowsRows):
    """A program that scores with them."""

    rows: Literal["replica", "cache"] = setting(
        "replica",
        "replica keeps all rows in this process, cache keeps the rows that requests ask for",
    )
    rows_bytes: int = setting(256 << 20, "of memory for a cache's rows", ge=1 << 16, le=1 << 40)
    rows_missing: Literal["read", "initial"] = setting(
        "read",
        "a row that a cache lacks: the request waits for its shard, or takes its initial value while it is read beside",
    )
    rows_read_ms: int = setting(
        50,
        "a request waits so long for rows that a cache lacks, then takes their initial values and is degraded",
        ge=1,
        le=10_000,
    )
    rows_buckets: tuple[int, ...] = setting((), "buckets that are held whole beside a cache")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rows == "cache" and not self.shards:
            raise SettingError("shards", 'expected the shards with rows = "cache", got none; name them')
        if self.rows_buckets and (
            self.rows != "cache" or not set(self.rows_buckets) <= set(range(self.buckets))
        ):
            raise setting_error(
                "rows_buckets",
                f'numbers below buckets = {self.buckets}, with rows = "cache"',
                self.rows_buckets,
            )
