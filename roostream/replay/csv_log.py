"""Dataset `csv`: a log as tables of text in UTF-8 with a header line (table_log.py,
docs/bring-your-own-data.md), separated by comma, semicolon, tab or |.

The column decides how a cell is read: as a number (with a decimal comma in tables with semicolons; true and
yes are 1, false and no are 0), a time, or an id (an integer if it has only digits, else text). A cell that
begins with `[` or `{` is JSON. An empty cell is missing.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from roostream.errors import ConfigError
from roostream.replay.datasets import EventLog
from roostream.replay.input_files import open_file
from roostream.replay.log_lines import UNREADABLE, LogLineReader
from roostream.replay.table_files import column_names, delimiter_of, first_line, text_rows
from roostream.replay.table_log import LogTable, TableOptions, open_tables
from roostream.schema.schema import Schema

_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]{0,19})")
_TRUTH = {"true": 1.0, "yes": 1.0, "t": 1.0, "y": 1.0, "false": 0.0, "no": 0.0, "f": 0.0, "n": 0.0}
_NUMBERS = ("weight", "propensity", "value")
_TEXTS = ("request_id", "time", "surface", "action")
Options = TableOptions


def open(options: Options, schema: Schema, window_ms: int) -> EventLog:
    """See `DatasetModule.open`. Engagements have their own times, so `window_ms` is not used."""
    floats = {f.name for f in (*schema.ro, *schema.nro) if f.kind == "float"} | set(_NUMBERS)

    def value(decimal_comma: bool, name: str, cell: str) -> Any:
        if name in _TEXTS:
            return cell
        if name not in floats and name != "position":
            return _ids(name, cell)
        try:
            if name == "position":
                return int(cell)
            truth = _TRUTH.get(cell.lower())
            return float(cell.replace(",", ".") if decimal_comma else cell) if truth is None else truth
        except ValueError:
            raise ValueError(f"{name}: expected a number, got {cell[:64]!r}") from None

    return open_tables(options, schema, lambda path, reader: _read(path, reader, value))


def _ids(name: str, cell: str) -> Any:
    if cell[0] in "[{":
        try:
            return msgspec.json.decode(cell)
        except UNREADABLE:
            text = f"{name}: expected JSON, since it begins with {cell[0]!r}, got {cell[:64]!r}"
            raise ValueError(text) from None
    return int(cell) if _INTEGER.fullmatch(cell) else cell


def _read(path: str, reader: LogLineReader, value: Callable[[bool, str, str], Any]) -> LogTable:
    """Read every column as text. A line with another number of cells is bad; empty lines are counted.

    Raises:
        ConfigError: the file does not exist, cannot be read, or is not CSV in UTF-8.
        LogError: a bad line that is not skipped.
    """
    with open_file(path) as file:
        header = first_line(path, file)
        delimiter = delimiter_of(header)
        names = column_names(header, delimiter)
        if not names:
            raise ConfigError(f"{path}: expected a header line and rows, got an empty file")
        parts = list(text_rows(path, file, names, delimiter, [""], reader.refuse, reader.count_empty))
    schema = pa.schema([(name, pa.string()) for name in names])
    table = pa.Table.from_batches([rows for rows, _ in parts], schema)
    line_N = np.concatenate([np.zeros(0, np.int64), *(lines for _, lines in parts)])
    return LogTable(path, table, line_N, partial(value, delimiter == ";"))
