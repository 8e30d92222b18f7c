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
    """A model from the warehouse alone: everything in one process, or several workers beside it."""

    warehouse: str = setting(
        "", "where samples are archived, a directory or s3://bucket/prefix; '' = that of the home"
    )
    days: str = setting(
        "", "of close, as 2024-05-01..2024-05-07, in order; either end may be left out; '' = all"
    )
    home: str = setting(
        str(DEFAULT_HOME), "where the model goes; training that was interrupted goes on there"
    )
    schema: str = setting(str(DEMO_SCHEMA), "schema TOML")
    model: str = setting("", "path of the model TOML; empty = defaults")
    set: tuple[str, ...] = setting((), "settings of the trainer's loop, as worker.batch_requests=512")
    num_shards: int = setting(
        2, "parameter server shards, as the stack that goes on with the model will have", ge=1, le=64
    )
    workers: int = setting(
        1, "that train together, in processes of their own where there are several", ge=1, le=64
    )
    rows: Literal["shards", "workers"] = setting(
        "shards",
        "who holds rows while this trains: shards here, or the worker processes, until they go to num_shards",
    )
    partitions: int = setting(DEFAULT_PARTITIONS, "of the topic that was archived", ge=1, le=1024)
    seed: int = setting(0, "of initial weights and rows, and of the order of files", ge=0, le=MAX_SEED)
    labels: Labels = setting("latest", "with corrections until now, or as_streamed at the close")
    commit_interval_ms: int = setting(30_000, "between commits", ge=100)
    readers: int = setting(
        0, "`reader` programs that read for training; 0 = this process reads for itself", ge=0, le=64
    )
    max_readers: int = setting(
        0,
        "more than readers: as many as keep training from waiting, up to so many; 0 = readers",
        ge=0,
        le=64,
    )
    pool: Literal["processes", "ray"] = setting(
        "processes",
        "who runs readers: this machine, or the Ray cluster that it belongs to, on any of its nodes (extra ray)",
    )
    ask_at: str = setting(
        "127.0.0.1:0",
        "host:port at which readers ask what to read; with a Ray cluster of several machines one that all reach",
    )
    link: str = setting(
        "", "TOML of which [link] is read: how readers call and are called; its files on each node, too"
    )
    insecure: bool = setting(
        False, "ask_at and readers may be reached by others, although nothing asks who they are"
    )
    report: str = setting("", "file for the JSON report")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not Path(self.schema).is_file():
            raise ConfigError(f"{self.schema}: no such file; expected a schema TOML")
        if self.max_readers and self.max_readers < max(self.readers, 1):
            raise setting_error(
                "max_readers", f"at least readers = {max(self.readers, 1)}, or 0", self.max_readers
            )
        check_addresses("ask_at", self.ask_at)
        if self.pool == "ray" and not self.reads_by_programs:
            raise setting_error("pool", "readers or max_readers above 0 with it", self.pool, "say how many")
        if self.by_processes and (self.link or not is_loopback(parse_address(self.ask_at)[0])):
            raise setting_error(
                "ask_at",
                "one worker, with rows at shards, where readers are reached from outside",
                self.ask_at,
            )
        if self.workers > self.partitions:
            error = "each trains one of the partitions at least"
            raise setting_error("workers", f"at most partitions = {self.partitions}", self.workers, error)
        assert self.session

    @property
    def by_processes(self) -> bool:
        """Whether workers are programs beside this one."""
        return self.workers > 1 or self.rows == "workers"

    @property
    def num_owners(self) -> int:
        """Who hold rows while this trains."""
        return self.workers if self.rows == "workers" else self.num_shards

    @property
    def reads_by_programs(self) -> bool:
        return self.readers > 0 or self.max_readers > 0

    @property
    def reader_count(self) -> ReaderCountConfig:
        least = max(self.readers, 1)
        return ReaderCountConfig(min_readers=least, max_readers=max(self.max_readers, least))

    @property
    def place(self) -> str:
        return self.warehouse or str(Path(self.home) / "warehouse")

    @property
    def session(self) -> SessionSpec:
        """What is trained, of a version that is yet to be fixed."""
        first, last = days_of(self.days) if self.days else ("", "")
        return SessionSpec(
            table=self.place,
            version=0,
            first_day=first,
            last_day=last,
            shuffle_seed=self.seed,
            labels=self.labels,
        )
