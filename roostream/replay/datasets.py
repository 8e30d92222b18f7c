"""The logs that can be replayed. One more is a module with its `Options` and `open`, and a row of DATASETS.

    DATASETS ─► the module's Options ─► flags of `roostream replay NAME`
                the module's open(options, schema, window_ms) ─► EventLog ─► roostream/replay/replay_log.py

Modules are named, not imported: a reader may need packages that only its own log needs.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol, cast

import numpy as np

from roostream.errors import ConfigError, WireError, nearest
from roostream.replay.events import Event
from roostream.schema.schema import Schema
from roostream.schema.settings import Settings


@dataclasses.dataclass(frozen=True, kw_only=True)
class DatasetOptions(Settings):
    """What a log needs to be found and read; each dataset's own class adds its settings."""

    default_schema: ClassVar[Path | None] = None
    """What is used where no schema is given; None = one must be."""
    rehearsed_batches: ClassVar[int] = 0
    """`rehearsal.batches` of the worker where nothing is said of it: what pays on this log."""
    ranker: ClassVar[Mapping[str, object]] = {}
    """Settings of the ranker where no model is chosen: what pays on this log."""


class Clicks(NamedTuple):
    """Clicks that are no events of a log, int64 [N] each, in time order."""

    user_N: np.ndarray
    item_N: np.ndarray
    time_ms_N: np.ndarray


class Skipped(NamedTuple):
    """Events that a log left out: how many, and why the first ones were."""

    number: int = 0
    first: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class EventLog:
    """What a dataset gives: `events` once, in time order."""

    events: Iterator[Event]
    num_requests: int = 0  # 0 = not known beforehand
    unlogged_clicks: Clicks | None = (
        None  # from before its first event, or between its events; each counts from its own time on
    )
    refuse: Callable[[Event, WireError], None] | None = (
        None  # called for an event that doesn't fit the schema; None: raise
    )
    skipped: Callable[[], Skipped] = Skipped  # events left out so far


class DatasetModule(Protocol):
    """What a module of DATASETS holds."""

    Options: type[DatasetOptions]

    def open(self, options: Any, schema: Schema, window_ms: int) -> EventLog:
        """Check the files' form and give their events, of requests that are joined for `window_ms`.

        Raises:
            ConfigError, SchemaError: a file or the schema can't be used; names file and column. While events are read, a
                RoostreamError for one that can't be used, with file and line.
        """


class Dataset(NamedTuple):
    """A row: where the module is, and what the command's help says."""

    module: str
    help: str
    example: str


DATASETS = {
    "ebnerd": Dataset(
        "roostream.replay.ebnerd",
        "A log in the form of the EB-NeRD news data set (parquet).",
        "--behaviors behaviors.parquet --history history.parquet --measure-from 2023-05-23 --report out.json",
    ),
    "jsonl": Dataset(
        "roostream.replay.jsonl_log",
        "A log of any site, one JSON object a line (docs/bring-your-own-data.md).",
        "--log monday.jsonl tuesday.jsonl.gz --schema my_site.toml --report out.json",
    ),
    "parquet": Dataset(
        "roostream.replay.parquet_log",
        "A log of any site as Parquet tables: a row a shown candidate, and a row an engagement.",
        "--impressions shown.parquet --engagements done.parquet --schema my_site.toml --report out",
    ),
    "csv": Dataset(
        "roostream.replay.csv_log",
        "A log of any site as CSV tables: a row a shown candidate, and a row an engagement.",
        "--impressions shown.csv.gz --engagements done.csv --schema my_site.toml --report out",
    ),
}


def load_dataset(name: str) -> DatasetModule:
    """The module of a row.

    Raises:
        ConfigError: there is no such row.
    """
    if name not in DATASETS:
        raise ConfigError(
            f"key 'dataset': expected one of {', '.join(DATASETS)}, got {name!r}{nearest(name, DATASETS)}"
        )
    return cast(DatasetModule, importlib.import_module(DATASETS[name].module))
