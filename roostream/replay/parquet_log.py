"""Dataset `parquet`: a log as Parquet tables (table_log.py, docs/bring-your-own-data.md).

Lists and structs are those of Arrow. Times are timestamps (without zone: UTC), integers in ms, or text.
Messages name a row by its number in the file, from 1.
"""

from __future__ import annotations

import contextlib
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

Options = TableOptions


def open(options: Options, schema: Schema, window_ms: int) -> EventLog:
    """See `DatasetModule.open`. Engagements have their own times, so `window_ms` is not used."""
    return open_tables(options, schema, _read)


@contextlib.contextmanager
def parquet_file(path: str) -> Iterator[pq.ParquetFile]:
    """Open a Parquet file. Raises ConfigError: the file does not exist, cannot be read, or is not Parquet."""
    with open_file(path) as file:
        try:
            parquet = pq.ParquetFile(file)
        except (pa.ArrowInvalid, OSError) as error:
            text = f"{path}: expected a Parquet file, got something else ({str(error).splitlines()[0]}); "
            text += "check the file"
            raise ConfigError(text) from None
        yield parquet


def _read(path: str, reader: LogLineReader) -> LogTable:
    with parquet_file(path) as file:
        try:
            table = file.read()
        except (pa.ArrowInvalid, OSError) as error:
            raise ConfigError(
                f"{path}: expected a complete Parquet file, got a damaged one ({str(error).splitlines()[0]})"
            ) from None
    return LogTable(path, table, np.arange(1, len(table) + 1), lambda name, cell: cell)
