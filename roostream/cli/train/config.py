"""Settings of `roostream train`; each is a flag."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

from infra.options import DEFAULT_HOME, DEMO_SCHEMA
from roostream.errors import ConfigError
from roostream.runtime.address import check_addresses, is_loopback, parse_address
from roostream.runtime.kafka.topics import DEFAULT_PARTITIONS
from roostream.schema.settings import MAX_SEED, Settings, setting, setting_error
from roostream.warehouse.readers.config import ReaderCountConfig
from roostream.warehouse.sessions.session import Labels, SessionSpec, days_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig(Settings):
    """Settings of `roostream train`, which trains a model from the warehouse."""

    warehouse: str = setting("", "archive of samples: a directory or s3://bucket/prefix; '' = that of --home")
    days: str = setting(
        "", "days on which samples closed, such as 2024-05-01..2024-05-07; either end is optional; '' = all"
    )
    home: str = setting(str(DEFAULT_HOME), "directory for the model; an interrupted training resumes there")
    schema: str = setting("", "schema TOML; '' = that of the demo")
    model: str = setting("", "model TOML; '' = the default ranker")
    set: tuple[str, ...] = setting((), "settings of the training loop, such as worker.batch_requests=512")
    num_shards: int = setting(
        2, "parameter server shards of the model, as in the stack that will continue with it", ge=1, le=64
    )
    workers: int = setting(1, "number of workers; several workers run in processes of their own", ge=1, le=64)
    rows: Literal["shards", "torchrec"] = setting(
        "shards",
        "owners of the rows during training: shards in this process, or the worker processes with TorchRec's "
        "sharded collections (extra torchrec)",
    )
    placement: str = setting(
        "",
        "rows = torchrec: '' = every table spread by rows; planner = TorchRec's planner; or a file of "
        "`placement plan --write-torchrec`",
    )
    profiles: str = setting(
        "",
        "placement = planner: checkpoint store with profiles of the features, of this or another model: a "
        "directory or s3://bucket/prefix; '' = that of --home",
    )
    profile_share: float = setting(
        0.03, "share of batches whose lookups are counted for placement (docs/placement.md)", ge=0, le=1
    )
    partitions: int = setting(DEFAULT_PARTITIONS, "partitions of the archived topic", ge=1, le=1024)
    seed: int = setting(0, "seed of initial weights and rows, and of the order of files", ge=0, le=MAX_SEED)
    labels: Labels = setting("latest", "latest = with corrections until now; as_streamed = at the close")
    commit_interval_ms: int = setting(30_000, "time between commits", ge=100)
    readers: int = setting(0, "number of reader programs; 0 = workers read files themselves", ge=0, le=64)
    max_readers: int = setting(
        0, "start up to this many readers while workers wait for data; 0 = as many as readers", ge=0, le=64
    )
    pool: Literal["processes", "ray"] = setting(
        "processes",
        "where readers run: processes of this machine, or the nodes of its Ray cluster (extra ray)",
    )
    readers_listen: str = setting(
        "127.0.0.1:0",
        "host:port on which the master of the readers listens; other machines of a Ray cluster must reach it",
    )
    link: str = setting(
        "",
        "TOML with a table [link], the security of calls to and from readers; its files must be on each node",
    )
    insecure: bool = setting(False, "accept connections from other machines without authentication")
    report: str = setting("", "file for the JSON report")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.home:  # not the current folder
            raise setting_error("home", "a path", self.home, "is a variable of the shell unset?")
        if not self.schema_path.is_file():
            raise ConfigError(f"{self.schema}: no such file; expected a schema TOML")
        if self.max_readers and self.max_readers < max(self.readers, 1):
            raise setting_error(
                "max_readers", f"at least readers = {max(self.readers, 1)}, or 0", self.max_readers
            )
        check_addresses("readers_listen", self.readers_listen)
        if self.pool == "ray" and not self.uses_readers:
            raise setting_error("pool", "processes without readers", self.pool, "set readers or max_readers")
        if self.uses_worker_processes and (
            self.link or not is_loopback(parse_address(self.readers_listen)[0])
        ):
            raise setting_error(
                "readers_listen",
                "a loopback address with several workers or rows = torchrec",
                self.readers_listen,
            )
        if self.workers > self.partitions:
            remedy = "each worker trains at least one partition"
            raise setting_error("workers", f"at most partitions = {self.partitions}", self.workers, remedy)
        if self.placement and self.rows != "torchrec":
            raise setting_error("placement", "'' with rows = shards", self.placement, "set rows = torchrec")
        if self.profiles and self.placement != "planner":
            raise setting_error(
                "profiles", "'' without the planner", self.profiles, "set placement = planner"
            )
        _ = self.session  # raises ConfigError if `days` is invalid

    @property
    def schema_path(self) -> Path:
        return Path(self.schema) if self.schema else DEMO_SCHEMA

    @property
    def uses_worker_processes(self) -> bool:
        """Whether workers run in processes of their own."""
        return self.workers > 1 or self.rows == "torchrec"

    @property
    def num_owners(self) -> int:
        """Number of owners of rows during training."""
        return self.workers if self.rows == "torchrec" else self.num_shards

    @property
    def uses_readers(self) -> bool:
        return self.readers > 0 or self.max_readers > 0

    @property
    def reader_count(self) -> ReaderCountConfig:
        least = max(self.readers, 1)
        return ReaderCountConfig(min_readers=least, max_readers=max(self.max_readers, least))

    @property
    def warehouse_url(self) -> str:
        return self.warehouse or str(Path(self.home) / "warehouse")

    @property
    def session(self) -> SessionSpec:
        """The session to train; its version is fixed when training begins."""
        first, last = days_of(self.days) if self.days else ("", "")
        return SessionSpec(
            table=self.warehouse_url,
            version=0,
            first_day=first,
            last_day=last,
            shuffle_seed=self.seed,
            labels=self.labels,
        )
