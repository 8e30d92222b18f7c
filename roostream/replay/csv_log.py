"""A generic log in CSV files (UTF-8, a line of names first), as docs/bring-your-own-data.md says: see `roostream/replay/table_log.py`.

CSV has no types, so a cell is read as what its column is: a number, a time, or an id, where digits are an integer and everything
else is text. A cell that begins with `[` or `{` is JSON. An empty one is missing.
"""

from __future__ import annotations

import dataclasses
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(TableOptions):
    """As every log of tables."""


def open(options: Options, schema: Schema, window_ms: int) -> EventLog:
    """See `roostream.replay.datasets.DatasetModule`; engagements have times of their own, so `window_ms` changes nothing."""
    floats = {f.name for f in (*schema.ro, *schema.nro) if f.kind == "float"} | set(_NUMBERS)

    def value(name: str, cell: str) -> Any:
        if name in _TEXTS:
            return cell
        if name in floats or name == "position":
            return _number(name, cell)
        return _ids(name, cell)

    return open_tables(options, schema, lambda path, reader: _read(path, reader, value))


def _number(name: str, cell: str) -> float | int:
    try:
        return int(cell) if name == "position" else float(cell)
    except ValueError:
        raise ValueError(f"{name}: expected a number, got {cell[:64]!r}") from None


def _ids(name: str, cell: str) -> Any:
    if cell[0] in "[{":
        try:
            return msgspec.json.decode(cell)
        except UNREADABLE:
            raise ValueError(
                f"{name}: expected JSON, since it begins with {cell[0]!r}, got {cell[:64]!r}"
            ) from None
    return int(cell) if _INTEGER.fullmatch(cell) else cell


def _read(path: str, reader: LogLineReader, value: Callable[[str, str], Any]) -> LogTable:
    """Every column as text. A line with another number of cells is a bad one; an empty line is none.

    Raises:
        ConfigError: it isn't there, can't be read, or isn't CSV.
        LogError: a bad line, unless such lines are skipped.
    """
    left_out: list[int] = []
    refused: list[LogError] = []

    def on_bad(row: pyarrow.csv.InvalidRow) -> str:
        left_out.append(row.number)
        wrong = ValueError(
            f"expected {row.expected_columns} cells as in the first line, got {row.actual_columns}"
        )
        try:
            reader.refuse(f"{path}:{row.number}", wrong)
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
            raise ConfigError(
                f"{path}: expected CSV in UTF-8, got something else ({str(error).splitlines()[0]})"
            ) from None
    line_N = np.setdiff1d(np.arange(2, len(table) + len(left_out) + 2), left_out)
    there_N = np.zeros(len(table), np.bool_)  # an empty line is a row without any cell
    for column in table.columns:
        there_N |= column.is_valid().to_numpy()
    return LogTable(path, table.filter(pa.array(there_N)), line_N[there_N], value)


def _names(path: str, line: bytes) -> list[str]:
    names = line.decode("utf-8", "replace").removeprefix("\ufeff").strip().split(",")
    if names == [""]:
        raise ConfigError(f"{path}: expected a line of names and then rows, got an empty file")
    return [name.strip('"') for name in names]
