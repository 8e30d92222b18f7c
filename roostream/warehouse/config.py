"""Settings of the archiver and the compactor."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from roostream.runtime.deployment import Deployment, ProgramSettings
from roostream.schema.settings import Settings, setting, setting_error


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarehouseSettings(Settings):
    """A program that writes to a warehouse."""

    warehouse: str = setting(
        "", "where samples are stored: a directory, or s3://bucket/prefix of a store with conditional put"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArchiverConfig(WarehouseSettings, Deployment):
    """`roostream archiver`: writes samples and corrections from their topics to the warehouse, exactly
    once."""

    needs: ClassVar[tuple[str, ...]] = ("bootstrap", "store", "warehouse")

    index: int = setting(0, "number of this archiver, from 0", ge=0, le=1023)
    num_archivers: int = setting(
        1, "archivers of this deployment; partition p belongs to number p mod num_archivers", ge=1, le=1024
    )
    flush_bytes: int = setting(64 << 20, "bytes of records that are written to files together", ge=1)
    flush_interval_ms: int = setting(300_000, "time that a record may wait until it is written", ge=1)
    max_raw_bytes: int = setting(
        4096, "bytes of an unreadable record that its dead letter keeps", ge=0, le=1 << 20
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_share(self.index, "num_archivers")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompactorConfig(WarehouseSettings, ProgramSettings):
    """`roostream compactor`: seals days of the warehouse and deletes files that are not needed any more."""

    seal_after_ms: int = setting(
        3_600_000,
        "a day is sealed when the newest close time is this far behind the day's end",
        ge=0,
        le=30 * 86_400_000,
    )
    max_rows: int = setting(1 << 18, "requests of a sealed file", ge=1)
    merge_bytes: int = setting(
        128 << 20,
        "uncompressed bytes of samples that a seal merges at once; it needs about five times as much memory",
        ge=1 << 10,
    )
    keep_days: int = setting(
        0, "days of close time that are kept, the newest first; 0 = all", ge=0, le=100_000
    )
    keep_bytes: int = setting(
        0,
        "bytes of samples that are kept: the oldest days go first, then the oldest files of the last day; "
        "0 = no limit",
        ge=0,
    )
    vacuum_after_hours: int = setting(
        168,
        "hours that a file is kept after another one has replaced it; a reader must pin its version within "
        "this time",
        ge=1,
        le=100_000,
    )
    interval_ms: int = setting(60_000, "time between two runs", ge=100)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.warehouse:
            raise setting_error("warehouse", "a directory or s3://bucket/prefix", "nothing", "add it")
