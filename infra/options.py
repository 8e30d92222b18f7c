"""What a local stack is made of: settings that `up`, `demo`, replays and tests choose."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roostream.runtime.deployment import MAX_WORKERS
from roostream.runtime.kafka.topics import DEFAULT_BUCKETS, DEFAULT_PARTITIONS
from roostream.schema.settings import MAX_SEED, Settings, setting, setting_error

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_HOME = Path(".roostream")
DEMO_SCHEMA = ROOT / "roostream" / "replay" / "schemas" / "demo.toml"
_PREFIX = re.compile(r"^([a-z0-9][a-z0-9._-]{0,30})?$")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StackOptions(Settings):
    """One stack; everything has a default, the demo's settings are `demo()`."""

    schema: Path = setting(DEMO_SCHEMA, "schema TOML of every program")
    prefix: str = setting("", "of topic names and Redis keys")
    replay: bool = setting(False, "topics keep and accept old event times")
    num_shards: int = setting(2, "shard processes", ge=1)
    num_workers: int = setting(
        1,
        "trainer workers to begin with, partitions at most; `roostream scale` changes it",
        ge=1,
        le=MAX_WORKERS,
    )
    serving_processes: int = setting(
        1,
        "serving processes that listen on one port; each keeps the rows in its own memory",
        ge=1,
        le=64,
    )
    num_archivers: int = setting(
        0, "that keep samples in the warehouse below the home; 0 = nothing is kept", ge=0, le=64
    )
    num_readers: int = setting(
        0,
        "that read the warehouse for workers while a model is trained from it; 0 = workers read for themselves",
        ge=0,
        le=64,
    )
    max_readers: int = setting(
        0,
        "more than num_readers: as many as keep workers from waiting, up to so many; 0 = num_readers",
        ge=0,
        le=64,
    )
    num_task_managers: int = setting(
        1, "Flink task managers, one slot each; also the joiner's parallelism", ge=1
    )
    partitions: int = setting(DEFAULT_PARTITIONS, "of each topic; dead_letters has one", ge=1, le=1024)
    buckets: int = setting(DEFAULT_BUCKETS, "that the rows of a stack are divided into", ge=1, le=1 << 16)
    seed: int = setting(0, "of initial rows, model and exploration", ge=0, le=MAX_SEED)
    retention_ms: int = setting(6 * 3_600_000, "how long topics keep live records", ge=1)
    retention_bytes: int = setting(128 << 20, "how much a partition keeps of live records", ge=1)
    log_bytes: int = setting(
        16 << 20, "size at which a log file is rotated (one older file is kept)", ge=1 << 16
    )
    java: str = setting("", "path of a java ≥ 17; empty = the runtime that set-up installed")
    kafka: str = setting("", "host:port of a broker to use instead of an own one")
    redis: str = setting("", "host:port of a Redis to use instead of an own one")
    ports: Mapping[str, int] = setting(
        help="port name → fixed port instead of a drawn one, for example serving = 8080", factory=dict
    )
    flink: Mapping[str, str] = setting(help="Flink configuration keys beyond ours", factory=dict)
    overrides: Mapping[str, Mapping[str, Any]] = setting(help="program → keys of its TOML", factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not _PREFIX.match(self.prefix):
            raise setting_error("prefix", "up to 31 of a-z 0-9 . _ -", self.prefix)
        if self.num_workers > self.partitions:
            raise setting_error(
                "num_workers",
                f"at most partitions = {self.partitions}",
                self.num_workers,
                "each worker trains one at least",
            )

        if self.max_readers and self.max_readers < self.min_readers:
            raise setting_error(
                "max_readers", f"at least num_readers = {self.min_readers}, or 0", self.max_readers
            )

    @property
    def min_readers(self) -> int:
        """While a session is read; 0 = workers read for themselves."""
        return max(self.num_readers, 1) if self.max_readers else self.num_readers

    @property
    def settle_ms(self) -> int:
        return settle_ms(int(self.overrides.get("joiner", {}).get("window_ms", 600_000)))


def settle_ms(window_ms: int) -> int:
    """How long an event can wait before the auditor calls it overdue: window, orphan timeout, and a minute."""
    return 2 * window_ms + 60_000


def demo(**changes: Any) -> StackOptions:
    """The demo's stack: short window, quick commits, exploration on."""
    overrides: dict[str, Mapping[str, Any]] = {
        "joiner": {"window_ms": 20_000, "lateness_ms": 1_000},
        "shard": {"publish_interval_ms": 1_000},
        "controller": {"commit_interval_ms": 10_000},
        "serving": {"exploration": 0.05},
        "archiver": {"flush_interval_ms": 60_000},
        "compactor": {"keep_days": 7, "keep_bytes": 1 << 30, "vacuum_after_hours": 1},
    }
    changes.setdefault("num_archivers", 1)
    return StackOptions(overrides={**overrides, **changes.pop("overrides", {})}, **changes)
