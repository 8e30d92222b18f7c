"""Options of a local stack, as `up`, `demo`, replays and tests choose them, and their file in the home
folder."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from infra.auditor.config import check_num_auditors
from roostream.errors import ConfigError, reason_of
from roostream.runtime.address import check_addresses
from roostream.runtime.checkpoint_store import FileStore
from roostream.runtime.deployment import MAX_WORKERS
from roostream.runtime.kafka.topics import DEFAULT_BUCKETS, DEFAULT_PARTITIONS
from roostream.schema.settings import MAX_SEED, Settings, from_dict, setting, setting_error

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_HOME = Path(".roostream")
DEMO_SCHEMA = ROOT / "roostream" / "replay" / "schemas" / "demo.toml"
_PREFIX = re.compile(r"^([a-z0-9][a-z0-9._-]{0,30})?$")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StackOptions(Settings):
    """Options of one stack. Every option has a default; `demo()` gives the demo's options."""

    schema: Path = setting(DEMO_SCHEMA, "schema file (TOML) of every program")
    prefix: str = setting("", "prefix of topic names and Redis keys")
    replay: bool = setting(False, "create topics that accept and keep old event times")
    num_shards: int = setting(2, "parameter server shards", ge=1)
    num_workers: int = setting(
        1,
        "trainer workers at the start, at most one per partition; `roostream scale` changes it",
        ge=1,
        le=MAX_WORKERS,
    )
    serving_processes: int = setting(
        1, "serving processes on one port; each keeps its own copy of the rows", ge=1, le=64
    )
    num_archivers: int = setting(
        0, "archivers that write samples to the warehouse in the home; 0 = no archive", ge=0, le=64
    )
    num_updaters: int = setting(
        1, "feature updaters that share the partitions, at most one per partition", ge=1, le=64
    )
    num_auditors: int = setting(
        1, "auditors that share the partitions, a divisor of their number", ge=1, le=64
    )
    num_readers: int = setting(
        0,
        "readers that read the warehouse for workers during training from history; 0 = workers read it",
        ge=0,
        le=64,
    )
    max_readers: int = setting(
        0, "upper limit for readers that are added while workers wait for input; 0 = num_readers", ge=0, le=64
    )
    num_task_managers: int = setting(
        1, "Flink task managers, one slot each; also the joiner's parallelism", ge=1, le=64
    )
    partitions: int = setting(
        DEFAULT_PARTITIONS, "partitions of each topic; dead_letters has one", ge=1, le=1024
    )
    buckets: int = setting(DEFAULT_BUCKETS, "buckets of rows, the unit of row placement", ge=1, le=1 << 16)
    seed: int = setting(0, "seed of initial rows, model and exploration", ge=0, le=MAX_SEED)
    retention_ms: int = setting(6 * 3_600_000, "how long topics keep records of live traffic", ge=1)
    retention_bytes: int = setting(128 << 20, "how many bytes of live traffic a partition keeps", ge=1)
    log_bytes: int = setting(
        16 << 20, "size at which a log file is rotated; one older file is kept", ge=1 << 16
    )
    java: str = setting("", "path of a Java ≥ 17; empty = the runtime that `make setup` installed")
    kafka: str = setting("", "host:port of an external Kafka broker, without TLS and login")
    redis: str = setting("", "host:port of an external Redis, without TLS and password")
    ports: Mapping[str, int] = setting(
        help="program → fixed port, for example serving = 8080; other ports are drawn", factory=dict
    )
    flink: Mapping[str, str] = setting(help="additional Flink configuration keys", factory=dict)
    overrides: Mapping[str, Mapping[str, Any]] = setting(
        help="program → settings of its TOML file", factory=dict
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not _PREFIX.match(self.prefix):
            raise setting_error("prefix", "up to 31 of a-z 0-9 . _ -", self.prefix)
        if self.num_workers > self.partitions:
            raise setting_error(
                "num_workers",
                f"at most partitions = {self.partitions}",
                self.num_workers,
                "each worker trains at least one partition",
            )
        if self.num_shards > self.buckets:
            reason = "each shard owns at least one bucket"
            raise setting_error("num_shards", f"at most buckets = {self.buckets}", self.num_shards, reason)
        if self.num_updaters > self.partitions:
            raise setting_error("num_updaters", f"at most partitions = {self.partitions}", self.num_updaters)
        for key, address in (("kafka", self.kafka), ("redis", self.redis)):
            if address:
                check_addresses(key, *address.split(","))
            if address and key in self.ports:
                raise setting_error("ports", f"no port of {key}, which is at {address}", key)
        shards = [f"shard-{index}" for index in range(self.num_shards)]
        for name in self.ports:
            if name.startswith("shard-") and name not in shards:
                raise setting_error("ports", f"a shard from {shards[0]} to {shards[-1]}", name)
        check_num_auditors(self.num_auditors, self.partitions)
        if self.max_readers and self.max_readers < self.min_readers:
            raise setting_error(
                "max_readers", f"at least num_readers = {self.min_readers}, or 0", self.max_readers
            )

    @property
    def min_readers(self) -> int:
        """Readers during a session; 0 = workers read the warehouse themselves."""
        return max(self.num_readers, 1) if self.max_readers else self.num_readers

    @property
    def window_ms(self) -> int:
        """The joiner's window."""
        return int(self.overrides.get("joiner", {}).get("window_ms", 600_000))

    @property
    def settle_ms(self) -> int:
        return settle_ms(self.window_ms)


def settle_ms(window_ms: int) -> int:
    """How long an event may stay unaccounted for before the auditor calls it overdue: window, orphan timeout,
    one minute."""
    return 2 * window_ms + 60_000


def demo(**changes: Any) -> StackOptions:
    """Options of the demo: short join window, frequent commits, exploration on.

    A request closes when an item was read, but not before 3 s; 4 s after its user asked for the next list; or
    after 20 s. What its user does within 20 s after the close is trained as corrections.
    """
    overrides: dict[str, Mapping[str, Any]] = {
        "joiner": {
            "window_ms": 20_000,
            "lateness_ms": 1_000,
            "terminal_actions": ["read"],
            "engaged_min_wait_ms": 3_000,
            "next_request": "session",
            "linger_ms": 4_000,
            "correction_horizon_ms": 20_000,
        },
        "worker": {"corrections": "on"},
        "shard": {"publish_interval_ms": 1_000},
        "controller": {"commit_interval_ms": 10_000},
        "serving": {"exploration": 0.05},
        "archiver": {"flush_interval_ms": 60_000},
        "compactor": {"keep_days": 7, "keep_bytes": 1 << 30, "vacuum_after_hours": 1},
    }
    changes.setdefault("num_archivers", 1)
    return StackOptions(overrides={**overrides, **changes.pop("overrides", {})}, **changes)


OPTIONS_FILE = "options.json"
_SAVED_FIELDS = (
    "schema",
    "prefix",
    "replay",
    "num_shards",
    "num_workers",
    "serving_processes",
    "num_archivers",
    "num_updaters",
    "num_auditors",
    "num_task_managers",
    "partitions",
    "buckets",
    "seed",
    "overrides",
)


def save_options(home: Path, options: StackOptions) -> None:
    """Store the options in the home, so that `up --home` continues with them. Files in the home are named
    relative to it, because a home may be moved. The file is readable by its owner only, because an override
    may contain a password. Raises UnavailableError if it can't be written: the old one stays."""
    root = os.path.abspath(home)

    def relative(path: str) -> str:
        return os.path.relpath(path, root) if Path(path).is_relative_to(root) else path

    table = {name: to_toml_value(getattr(options, name)) for name in _SAVED_FIELDS}
    table["schema"] = relative(table["schema"])
    table["overrides"] = _with_models(table["overrides"], relative)
    FileStore(home).put(OPTIONS_FILE, f"{json.dumps(table, indent=1)}\n".encode())


def load_saved_options(home: Path) -> StackOptions | None:
    """The options stored in a home; None where there are none.

    Raises:
        ConfigError: the file is damaged.
    """
    file, root = home / OPTIONS_FILE, os.path.abspath(home)
    if not file.is_file():
        return None
    try:
        raw: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        overrides = _with_models(raw.pop("overrides"), lambda path: os.path.join(root, path))
        options = from_dict(StackOptions, raw)
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError, ConfigError) as error:
        raise ConfigError(
            f"{file} can't be read ({reason_of(error)}); delete it and give `up` its options"
        ) from None
    return dataclasses.replace(options, schema=root / options.schema, overrides=overrides)


def _with_models(
    overrides: Mapping[str, Mapping[str, Any]], change: Callable[[str], str]
) -> dict[str, dict[str, Any]]:
    """The overrides with the path of each model file changed."""
    return {
        program: {key: change(value) if key == "model" and value else value for key, value in table.items()}
        for program, table in overrides.items()
    }


def to_toml_value(value: Any) -> Any:
    """Convert paths to text, tuples to lists and dataclasses to tables."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return to_toml_value(dataclasses.asdict(value))
    if isinstance(value, Mapping):
        return {key: to_toml_value(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [to_toml_value(inner) for inner in value]
    return str(value) if isinstance(value, Path) else value
