"""Settings of the warehouse's programs."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from roostream.runtime.deployment import Deployment, Watched
from roostream.schema.settings import Settings, refusal, setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class Housed(Settings):
    """A program that writes to a warehouse."""

    warehouse: str = setting(
        "", "where samples are kept: a directory, or s3://bucket/prefix of a store with conditional put"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArchiverConfig(Housed, Deployment):
    """`roostream archiver`: samples and corrections from their topics into the warehouse, exactly once."""

    needs: ClassVar[tuple[str, ...]] = ("bootstrap", "store", "warehouse")

    index: int = setting(0, "which of the archivers this is, from 0", least=0, most=1023)
    num_archivers: int = setting(
        1, "of this deployment: partition p is of number p mod num_archivers", least=1, most=1024
    )
    flush_bytes: int = setting(64 << 20, "bytes of records that become files together", least=1)
    flush_interval_ms: int = setting(300_000, "how long a record may wait for its file", least=1)
    max_raw_bytes: int = setting(
        4096, "how much of a record that can't be read its dead letter holds", least=0, most=1 << 20
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.index >= min(self.num_archivers, self.partitions):
            most = min(self.num_archivers, self.partitions)
            raise refusal(
                "index", f"less than {most}, the smaller of num_archivers and partitions", self.index
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompactorConfig(Housed, Watched):
    """`roostream compactor`: seals days of the warehouse, and deletes what nobody needs."""

    seal_after_ms: int = setting(
        3_600_000,
        "a day is sealed when the newest close lies so far behind its end",
        least=0,
        most=30 * 86_400_000,
    )
    max_rows: int = setting(1 << 18, "requests of a sealed file", least=1)
    keep_days: int = setting(
        0, "days of close that are kept, the newest first; 0 = all", least=0, most=100_000
    )
    keep_bytes: int = setting(
        0,
        "of samples: beyond it the oldest days go, and of a day that alone is larger its oldest files; 0 = no bound",
        least=0,
    )
    vacuum_after_hours: int = setting(
        168, "how long a file is kept that no version in use names", least=0, most=100_000
    )
    interval_ms: int = setting(60_000, "between two looks at the table", least=100)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.warehouse:
            raise refusal("warehouse", "a place", "nothing", "add it")
