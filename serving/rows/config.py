"""Settings of rows: of a serving process, and of the program that keeps those which several processes share."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import ClassVar, Literal

from roo.config import MAX_SEED, Refusal, setting
from runtime.address import check_addresses
from runtime.deployment import Deployment


@dataclasses.dataclass(frozen=True, kw_only=True)
class FollowsRows(Deployment):
    """A program that reads rows of the shards."""

    shards: tuple[str, ...] = setting((), "host:port of every shard, in order; rows are bootstrapped from them")
    rows_home: str = setting("", "directory of rows that processes of this machine share: on tmpfs, or it is written to disk too")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_addresses("shards", *self.shards)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServesRows(FollowsRows):
    """A program that scores with them."""

    rows: Literal["replica", "shared"] = setting(
        "replica", "all of them in this process, or those that a `serving-rows` program keeps in rows_home"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rows == "shared" and not self.rows_home:
            raise Refusal("rows_home", 'expected a directory with rows = "shared", got nothing; name that of serving-rows')


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowsConfig(FollowsRows):
    """`roostream serving-rows`: keeps the rows of a machine in memory that its serving processes share."""

    needs: ClassVar[tuple[str, ...]] = ("bootstrap", "schema", "rows_home", "shards")

    seed: int = setting(0, "of initial rows; the trainer's", least=0, most=MAX_SEED)

    @property
    def folder(self) -> Path:
        return Path(self.rows_home)
