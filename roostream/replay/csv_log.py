"""Dataset `csv`: a log as CSV tables in UTF-8 with a header line (table_log.py, docs/bring-your-own-data.md).

The column decides how a cell is read: as a number, a time, or an id (an integer if it has only digits, else
text). A cell that begins with `[` or `{` is JSON. An empty cell is missing.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.csv

from roostream.errors import ConfigError
from roostream.replay.datasets import EventLog
from roostream.replay.input_files import open_file
from roostream.replay.log_lines import UNREADABLE, LogError, LogLineReader
from roostream.replay.table_log import LogTable, TableOptions, open_tables
from roostream.schema.schema import Schema

_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]{0,19})")
_NUMBERS = ("weight", "propensity", "value")
_TEXTS = ("request_id", "time", "surface", "action")
Options = TableOptions


def open(options: Options, schema: Schema, window_ms: int) -> EventLog:
    """See `DatasetModule.open`. Engagements have their own times, so `window_ms` is not used."""
    floats = {f.name for f in (*schema.ro, *schema.nro) if f.kind == "float"} | set(_NUMBERS)

    def value(name: str, cell: str) -> Any:
        if name in _TEXTS:
            return cell
        if name not in floats and name != "position":
            return _ids(name, cell)
        try:
            return int(cell) if name == "position" else float(cell)
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


def _read(path: str, reader: LogLineReader, value: Callable[[str, str], Any]) -> LogTable:
    """Read every column as text. A line with another number of cells is bad; empty lines are ignored.

    Raises:
        ConfigError: the file does not exist, cannot be read, or is not CSV.
        LogError: a bad line that is not skipped.
    """
    skipped_lines: list[int] = []
    refused: list[LogError] = []

    def on_bad(row: pyarrow.csv.InvalidRow) -> str:
        skipped_lines.append(row.number)
        text = f"expected {row.expected_columns} cells, as in the first line, got {row.actual_columns}"
        try:
            reader.refuse(f"{path}:{row.number}", ValueError(text))
        except LogError as error:
            refused.append(error)
            return "error"
        return "skip"

    with open_file(path) as file:
        names = _names(path, file.readline())
        file.seek(0)
        try:
            table = pyarrow.csv.read_csv(
                file,
                read_options=pyarrow.csv.ReadOptions(use_threads=False),
                parse_options=pyarrow.csv.ParseOptions(invalid_row_handler=on_bad, ignore_empty_lines=False),
                convert_options=pyarrow.csv.ConvertOptions(
                    column_types=dict.fromkeys(names, pa.string()), null_values=[""], strings_can_be_null=True
                ),
            )
        except pa.ArrowInvalid as error:
            if refused:
                raise refused[0] from None
            text = f"{path}: expected CSV in UTF-8, got something else ({str(error).splitlines()[0]})"
            raise ConfigError(text) from None
    line_N = np.setdiff1d(np.arange(2, len(table) + len(skipped_lines) + 2), skipped_lines)
    present_N = np.zeros(len(table), np.bool_)  # an empty line is a row without cells
    for column in table.columns:
        present_N |= column.is_valid().to_numpy()
    return LogTable(path, table.filter(pa.array(present_N)), line_N[present_N], value)


def _names(path: str, line: bytes) -> list[str]:
    names = line.decode("utf-8", "replace").removeprefix("\ufeff").strip().split(",")
    if names == [""]:
        raise ConfigError(f"{path}: expected a header line and rows, got an empty file")
    return [name.strip('"') for name in names]
