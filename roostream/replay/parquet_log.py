"""Dataset `parquet`: a log as Parquet tables (table_log.py, docs/bring-your-own-data.md).

Lists and structs are those of Arrow. Times are timestamps (without zone: UTC), integers in ms, or text.
Decimals and truth values are numbers in features of kind float. Messages name a row by its number in the
file, from 1.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from roostream.errors import ConfigError, nearest
from roostream.replay.datasets import EventLog
from roostream.replay.input_files import open_file
from roostream.replay.log_lines import LogLineReader
from roostream.replay.table_log import LogTable, TableOptions, open_tables
from roostream.schema.schema import Schema

Options = TableOptions


def open(options: Options, schema: Schema, window_ms: int) -> EventLog:
    """See `DatasetModule.open`. Engagements have their own times, so `window_ms` is not used."""
    floats = {f.name for f in (*schema.ro, *schema.nro) if f.kind == "float"}
    return open_tables(options, schema, partial(_read, floats))


@contextlib.contextmanager
def parquet_file(path: str) -> Iterator[pq.ParquetFile]:
    """Open a Parquet file. Raises ConfigError: the file does not exist, cannot be read, is not Parquet, or
    has columns that Arrow cannot read or convert."""
    with open_file(path) as file:
        try:
            parquet = pq.ParquetFile(file)
        except (pa.ArrowInvalid, OSError) as error:
            text = f"{path}: expected a Parquet file, got something else ({str(error).splitlines()[0]}); "
            text += "check the file"
            raise ConfigError(text) from None
        try:
            yield parquet
        except pa.ArrowNotImplementedError as error:
            text = f"{path}: expected columns that Arrow can read ({error}); write lists of categories as "
            raise ConfigError(f"{text}lists of text") from None


def read_columns(
    path: str,
    required: Mapping[str, pa.DataType],
    optional: Mapping[str, pa.DataType],
    nullable: Collection[str] = (),
) -> pa.Table:
    """The columns, cast to the given types; a missing optional column is all null. `nullable`: the required
    columns that may have nulls.

    Raises:
        ConfigError: the file is not Parquet, lacks a required column or has nulls in it, or has a column of
            another type; names file and column.
    """
    with parquet_file(path) as file:
        there = file.schema_arrow.names
        for name in required:
            if name not in there:
                text = (
                    f"{path}: column {name!r} is absent{nearest(name, there)}; expected {', '.join(required)}"
                )
                raise ConfigError(text)
        raw = file.read([name for name in (*required, *optional) if name in there])
    columns = {}
    for name, kind in {**required, **optional}.items():
        columns[name] = _cast(path, name, raw[name], kind) if name in there else pa.nulls(len(raw), kind)
        nulls = columns[name].null_count
        if nulls and name in required and name not in nullable:
            text = f"{path}: column {name!r}: expected a value in every row, got {nulls} nulls"
            raise ConfigError(f"{text}; is this the right file?")
    return pa.table(columns)


def _cast(path: str, name: str, column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    """Raises ConfigError: the values cannot be cast to `kind`."""
    try:
        return column.cast(kind, safe=False)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        text = f"{path}: column {name!r}: expected {kind}, got {column.type}; is this the right file?"
        raise ConfigError(text) from None


def damaged_file(path: str, error: Exception) -> ConfigError:
    """The error of a Parquet file of which a part cannot be read."""
    return ConfigError(
        f"{path}: expected a complete Parquet file, got a damaged one ({str(error).splitlines()[0]})"
    )


def times_in_ms(table: pa.Table) -> pa.Table:
    """The table with its timestamps, also those in lists and objects, in ms of UTC. Python reads those in ns
    only with pandas, and those of a zone only where the system knows it."""
    fields = [field.with_type(_with_times(field.type, pa.timestamp("ms"))) for field in table.schema]
    return table.cast(pa.schema(fields), safe=False)


def lists_in_ms(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """The column with the timestamps in its lists and objects as integers in ms."""
    for of_times in (pa.timestamp("ms"), pa.int64()):
        kind = _with_times(column.type, of_times)
        if pa.types.is_nested(kind) and kind != column.type:
            column = column.cast(kind, safe=False)
    return column


def _with_times(kind: pa.DataType, of_times: pa.DataType) -> pa.DataType:
    """The type with `of_times` for each timestamp."""
    if pa.types.is_timestamp(kind):
        return of_times
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_with_times(field.type, of_times)) for field in kind])
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        entry = _with_times(kind.value_type, of_times)
        return kind if entry == kind.value_type else pa.list_(entry)
    return kind


def _read(floats: Collection[str], path: str, reader: LogLineReader) -> LogTable:
    with parquet_file(path) as file:
        try:
            table = times_in_ms(file.read())
        except (pa.ArrowInvalid, OSError) as error:
            raise damaged_file(path, error) from None
    for n, field in enumerate(table.schema):
        kind = field.type
        if pa.types.is_dictionary(kind):  # as pandas writes its categories
            kind = kind.value_type
        if field.name in floats and (pa.types.is_boolean(kind) or pa.types.is_decimal(kind)):
            kind = pa.float64()
        if kind != field.type:
            table = table.set_column(n, field.name, table.column(n).cast(kind))
        elif pa.types.is_nested(kind):
            table = table.set_column(n, field.name, lists_in_ms(table.column(n)))
    return LogTable(path, table, np.arange(1, len(table) + 1), lambda name, cell: cell)
