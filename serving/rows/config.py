"""Settings of rows: of a serving process, and of the program that keeps those which several processes share."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import ClassVar, Literal

from roostream.runtime.address import check_addresses
from roostream.runtime.deployment import Deployment
from roostream.schema.settings import MAX_SEED, Refusal, refusal, setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class FollowsRows(Deployment):
    """A program that reads rows of the shards."""

    shards: tuple[str, ...] = setting(
        (), "host:port of every shard, in order, to bootstrap rows from; one with {N} stands for N of them"
    )
    rows_home: str = setting(
        "", "directory of rows that processes of this machine share: on tmpfs, or it is written to disk too"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_addresses("shards", *self.shards)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServesRows(FollowsRows):
    """A program that scores with them."""

    rows: Literal["replica", "shared", "cache"] = setting(
        "replica",
        "all of them in this process, those that a `serving-rows` program keeps in rows_home, or those that requests ask for",
    )
    rows_bytes: int = setting(256 << 20, "of memory for a cache's rows", least=1 << 16, most=1 << 40)
    rows_missing: Literal["read", "initial"] = setting(
        "read",
        "a row that a cache lacks: the request waits for its shard, or takes its initial value while it is read beside",
    )
    rows_read_ms: int = setting(
        50,
        "a request waits so long for rows that a cache lacks, then takes their initial values and is degraded",
        least=1,
        most=10_000,
    )
    rows_buckets: tuple[int, ...] = setting((), "buckets that are held whole beside a cache")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rows == "shared" and not self.rows_home:
            raise Refusal(
                "rows_home",
                'expected a directory with rows = "shared", got nothing; name that of serving-rows',
            )
        if self.rows == "cache" and not self.shards:
            raise Refusal("shards", 'expected the shards with rows = "cache", got none; name them')
        if self.rows_buckets and (
            self.rows != "cache" or not set(self.rows_buckets) <= set(range(self.buckets))
        ):
            raise refusal(
                "rows_buckets",
                f'numbers below buckets = {self.buckets}, with rows = "cache"',
                self.rows_buckets,
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowsConfig(FollowsRows):
    """`roostream serving-rows`: keeps the rows of a machine in memory that its serving processes share."""

    needs: ClassVar[tuple[str, ...]] = ("bootstrap", "schema", "rows_home", "shards")

    seed: int = setting(0, "of initial rows; the trainer's", least=0, most=MAX_SEED)

    @property
    def folder(self) -> Path:
        return Path(self.rows_home)
