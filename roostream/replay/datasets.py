"""The datasets that can be replayed. To add one, write a module with `Options` and `open`, and add a row to
DATASETS.

    DATASETS ─► Options of the module ─► flags of `roostream replay NAME`
                open(options, schema, window_ms) of the module ─► EventLog ─► roostream/replay/replay_log.py

Modules are imported by name when they are used, because each may need packages of its own.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol, cast

import numpy as np

from roostream.errors import ConfigError, SchemaError, WireError, nearest
from roostream.replay.events import Event
from roostream.schema.schema import Schema
from roostream.schema.settings import Settings


@dataclasses.dataclass(frozen=True, kw_only=True)
class DatasetOptions(Settings):
    """Base class of a dataset's settings."""

    default_schema: ClassVar[Path | None] = None
    """Schema that is used without --schema; None = --schema is required."""
    rehearsed_batches: ClassVar[int] = 0
    """Default of the worker's `rehearsal.batches` on this dataset."""
    ranker: ClassVar[Mapping[str, object]] = {}
    """Default settings of the ranker on this dataset."""


class Clicks(NamedTuple):
    """Clicks that are not events of the log, for example a user's history: int64 [N] each, in time order."""

    user_N: np.ndarray
    item_N: np.ndarray
    time_ms_N: np.ndarray


class Skipped(NamedTuple):
    """Lines that were skipped: their number, and the error messages of the first ones; and the number of rows
    that are empty in every column."""

    number: int = 0
    first: tuple[str, ...] = ()
    empty_rows: int = 0

    def warnings(self) -> list[str]:
        """A sentence about the empty rows, if there are any."""
        left_out = f"{self.empty_rows:,} rows that are empty in every column were left out"
        return [left_out] if self.empty_rows else []


@dataclasses.dataclass(frozen=True, kw_only=True)
class EventLog:
    """The events of a dataset, in time order; they can be read once."""

    events: Iterator[Event]
    num_requests: int = 0  # 0 = unknown
    unlogged_clicks: Clicks | None = None  # they change the online counters from their own time on
    refuse: Callable[[Event, WireError], None] | None = None  # called for an event that does not fit the
    # Schema; None: the error is raised.
    skipped: Callable[[], Skipped] = Skipped  # lines skipped so far


class DatasetModule(Protocol):
    """The interface of a dataset's module."""

    Options: type[DatasetOptions]

    def open(self, options: Any, schema: Schema, window_ms: int) -> EventLog:
        """Check the format of the files and return their events. `window_ms` is the join window.

        Raises:
            ConfigError, SchemaError: a file or the schema cannot be used; the message names file and column.
            While events are read, a RoostreamError for an event that cannot be used, with file and line.
        """


class Dataset(NamedTuple):
    """The module of a dataset, and the help text of its sub-command."""

    module: str
    help: str
    example: str


DATASETS = {
    "ebnerd": Dataset(
        "roostream.replay.ebnerd",
        "A log in the format of the EB-NeRD news dataset (Parquet).",
        "--behaviors behaviors.parquet --history history.parquet --measure-from 2023-05-23 --report out.json",
    ),
    "yambda": Dataset(
        "roostream.replay.yambda",
        "A log in the format of the Yambda music dataset (Parquet).",
        "--multi-event multi_event.parquet --engine local --streaming-window 1d --report out.json",
    ),
    "jsonl": Dataset(
        "roostream.replay.jsonl_log",
        "A log of any site with one JSON object per line (docs/bring-your-own-data.md).",
        "--log monday.jsonl tuesday.jsonl.gz --schema my_site.toml --report out.json",
    ),
    "parquet": Dataset(
        "roostream.replay.parquet_log",
        "A log of any site as Parquet tables: one row per shown candidate, and one row per engagement.",
        "--impressions shown.parquet --engagements done.parquet --schema my_site.toml --report out",
    ),
    "csv": Dataset(
        "roostream.replay.csv_log",
        "A log of any site as CSV tables: one row per shown candidate, and one row per engagement.",
        "--impressions shown.csv.gz --engagements done.csv --schema my_site.toml --report out",
    ),
}


def load_dataset(name: str) -> DatasetModule:
    """Import the module of a dataset.

    Raises:
        ConfigError: there is no such dataset.
    """
    if name not in DATASETS:
        text = f"key 'dataset': expected one of {', '.join(DATASETS)}, got {name!r}{nearest(name, DATASETS)}"
        raise ConfigError(text)
    return cast(DatasetModule, importlib.import_module(DATASETS[name].module))


def check_offered(schema: Schema, dataset: str, offered: Mapping[str, Collection[str]]) -> None:
    """Check the features that a schema declares. `offered`: side → the features that the dataset has.

    Raises:
        SchemaError: a feature is neither online nor offered.
    """
    for side, names in offered.items():
        for feature in getattr(schema, side):
            if not feature.online and feature.name not in names:
                known = f"expected an online feature or one of {dataset} ({', '.join(names)})"
                near = nearest(feature.name, names)
                raise SchemaError(f"feature {feature.name!r}: {known}, got neither{near}; remove it")
