"""A generic log in Parquet files, as docs/bring-your-own-data.md says: see `roostream/replay/table_log.py`. Lists and structs are Arrow's
own; times are timestamps (naive = UTC), ms as integers, or text. A row is named by its number in the file, from 1."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from roostream.errors import ConfigError
from roostream.replay.datasets import EventLog
from roostream.replay.input_files import open_file
from roostream.replay.log_lines import LogLineReader
from roostream.replay.table_log import LogTable, TableOptions, open_tables
from roostream.schema.schema import Schema


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(TableOptions):
    """As every log of tables."""


def open(options: Options, schema: Schema, window_ms: int) -> EventLog:
    """See `roostream.replay.datasets.DatasetModule`; engagements have times of their own, so `window_ms` changes nothing."""
    return open_tables(options, schema, _read)


@contextlib.contextmanager
def parquet_file(path: str) -> Iterator[pq.ParquetFile]:
    """Raises ConfigError: it isn't there, can't be read, or isn't Parquet."""
    with open_file(path) as file:
        try:
            parquet = pq.ParquetFile(file)
        except (pa.ArrowInvalid, OSError) as error:
            raise ConfigError(
                f"{path}: expected a parquet file, got something else ({str(error).splitlines()[0]})"
            ) from None
        yield parquet


def _read(path: str, reader: LogLineReader) -> LogTable:
    with parquet_file(path) as file:
        try:
            table = file.read()
        except (pa.ArrowInvalid, OSError) as error:
            raise ConfigError(
                f"{path}: expected a whole parquet file, got a damaged one ({str(error).splitlines()[0]})"
            ) from None
    return LogTable(path, table, np.arange(1, len(table) + 1), lambda name, cell: cell)
