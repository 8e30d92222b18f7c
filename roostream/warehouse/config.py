"""Settings of the warehouse's programs."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from roostream.runtime.deployment import Deployment, ProgramSettings
from roostream.schema.settings import Settings, setting, setting_error


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarehouseSettings(Settings):
    """A program that writes to a warehouse."""

    warehouse: str = setting(
        "", "where samples are kept: a directory, or s3://bucket/prefix of a store with conditional put"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArchiverConfig(WarehouseSettings, Deployment):
    """`roostream archiver`: samples and corrections from their topics into the warehouse, exactly once."""

    needs: ClassVar[tuple[str, ...]] = ("bootstrap", "store", "warehouse")

    index: int = setting(0, "which of the archivers this is, from 0", ge=0, le=1023)
    num_archivers: int = setting(
        1, "of this deployment: partition p is of number p mod num_archivers", ge=1, le=1024
    )
    flush_bytes: int = setting(64 << 20, "bytes of records that become files together", ge=1)
    flush_interval_ms: int = setting(300_000, "how long a record may wait for its file", ge=1)
    max_raw_bytes: int = setting(
        4096, "how much of a record that can't be read its dead letter holds", ge=0, le=1 << 20
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.index >= min(self.num_archivers, self.partitions):
            most = min(self.num_archivers, self.partitions)
            raise setting_error(
                "index", f"less than {most}, the smaller of num_archivers and partitions", self.index
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompactorConfig(WarehouseSettings, ProgramSettings):
    """`roostream compactor`: seals days of the warehouse, and deletes what nobody needs."""

    seal_after_ms: int = setting(
        3_600_000,
        "a day is sealed when the newest close lies so far behind its end",
        ge=0,
        le=30 * 86_400_000,
    )
    max_rows: int = setting(1 << 18, "requests of a sealed file", ge=1)
    keep_days: int = setting(0, "days of close that are kept, the newest first; 0 = all", ge=0, le=100_000)
    keep_bytes: int = setting(
        0,
        "of samples: beyond it the oldest days go, and of a day that alone is larger its oldest files; 0 = no bound",
        ge=0,
    )
    vacuum_after_hours: int = setting(
        168, "how long a file is kept that no version in use names", ge=0, le=100_000
    )
    interval_ms: int = setting(60_000, "between two looks at the table", ge=100)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.warehouse:
            raise setting_error("warehouse", "a place", "nothing", "add it")
