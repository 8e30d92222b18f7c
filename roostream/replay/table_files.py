"""Read the tables of another site, whatever their form, as Parquet files.

.parquet              as they are
.csv .tsv .txt        with a first line of names; separated by comma, semicolon, tab or |
.jsonl .ndjson .json  an object on each line is a row

In JSON and Parquet, a row with a list of objects becomes a row for each object, with the row's other values,
and an object becomes columns such as `page_kind`. In Parquet, the list must have one of the names `LISTS`,
and an object of lists alone stays one column, as the value of a sequence. Where several columns have lists of
equal length, `with_row_per_item` makes a row for each of their entries.

A column of text files has the narrowest type that all its cells in all files have: true or false, whole
numbers, numbers, JSON lists, or text. Whole numbers with leading zeros or beyond 64 bits are text. Empty
cells and the words of `_EMPTY` are missing, in columns of JSON only those beside numbers or truth values. The
column LINE of a converted file has the number of each row's line or row.
"""

from __future__ import annotations

import codecs
import csv
import io
import itertools
import os
import re
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from roostream.errors import ConfigError, nearest
from roostream.replay.file_endings import FORMS, ending_of
from roostream.replay.input_files import open_file
from roostream.replay.log_lines import json_object
from roostream.replay.parquet_log import parquet_file

LINE = "roostream: line"  # no column of a site is called so
Refuse = Callable[[str, Exception], None]
"""Called with the place of a row that cannot be read, and why; raises, or counts the row as skipped."""
CountEmpty = Callable[[int], None]
"""Called with a number of rows of text that are empty in every column, and are therefore left out."""

_OPEN_CELL = (
    "expected a quote that ends, got one that only ends in a later row; close it, or write a quote within a "
    'cell as ""'
)
_SKIPPED_BYTES = 16 << 10
_EMPTY = ["", "NULL", "null", "\\N", "NaN", "nan", "#N/A"]
_YES = pa.array(["true", "yes", "t", "y"])
_EMPTY_NUMBERS = pa.array(["NA", "N/A"])  # missing in a column of numbers; texts in a column of texts
_NUMBER = r"^[+-]?((0|[1-9][0-9]*)(P[0-9]*)?|P[0-9]+)([eE][+-]?[0-9]+)?$"  # P: the decimal point
_WHOLE = "^-?(0|[1-9][0-9]*)$"
_KINDS = {
    "flag": ("^(?i:true|false|yes|no|t|f|y|n)$", pa.bool_()),
    "integer": (_WHOLE, pa.int64()),
    "unsigned": (_WHOLE, pa.uint64()),
    "whole number beyond 64 bits": (_WHOLE, pa.string()),  # an id: as a float it would be another one
    "number": (_NUMBER.replace("P", r"\."), pa.float64()),
    "number with comma": (_NUMBER.replace("P", ","), pa.float64()),
}
_IDS = "^[A-Za-z]{1,4}[0-9]+( [A-Za-z]{1,4}[0-9]+)*$"
_FLAGGED_IDS = "^[A-Za-z]{0,4}[0-9]+-[01]( [A-Za-z]{0,4}[0-9]+-[01])*$"
_OF_MIND = ("impression_id", "user_id", "time", "history", "impressions")
CLICKED = "clicked"
LISTS = (
    "candidates",
    "items",
    "impressions",
    "shown",
    "products",
    "results",
    "articles",
    "documents",
    "ads",
)
_ID_NAME = re.compile(r".*id|item|article|product|video|movie|sku|asin", re.IGNORECASE)
_BLOCK_BYTES = 4 << 20
_ROWS = 8192
_OBJECT_ROWS = 512  # rows with lists of objects that are read together


def form_of(paths: Sequence[str]) -> str:
    """The form of files by the endings of their names, without .gz or .zst: `parquet`, `csv` (any separated
    text) or `jsonl`.

    Raises:
        ConfigError: another ending, or files of several forms.
    """
    found = set()
    for path in paths:
        form = FORMS.get(ending_of(path))
        if form is None:
            *others, last = FORMS
            raise ConfigError(
                f"{path}: expected a file that ends in {', '.join(others)} or {last} (or .gz, .zst of "
                "these); docs/bring-your-own-data.md describes the forms"
            )
        found.add(form)
    if len(found) != 1:
        raise ConfigError(
            f"{', '.join(paths) or 'no files'}: expected files of one form, got "
            f"{' and '.join(sorted(found)) or 'none'}; name files of one form"
        )
    return found.pop()


def as_parquet(
    paths: Sequence[str],
    folder: Path,
    refuse: Refuse,
    max_rows: int | None = None,
    keep_missing: Container[str] | None = (),
    count_empty: CountEmpty = lambda number: None,
) -> list[str]:
    """Parquet files with the rows of `paths`: new files in `folder`, or Parquet files themselves.

    A text file is read twice, in pieces: for the types of its columns, and to write them. Of each converted
    file only about `max_rows` rows are read. Missing entries of a text file's lists are left out, but for the
    columns `keep_missing`; None = all columns.

    Raises:
        ConfigError: a file cannot be read, is not in UTF-8, or has no names of columns.
        SetupError: there is no space to decompress a file.
        OSError: `folder` cannot be written.
    """
    form = form_of(paths)
    if form == "parquet":
        return [
            _as_plain_parquet(path, folder / f"table-{n}.parquet", refuse, max_rows)
            for n, path in enumerate(paths)
        ]
    columns: dict[str, _TextColumn | _JsonColumn] = {}
    if form == "csv":
        with open_file(paths[0]) as file:
            delimiter = delimiter_of(first_line(paths[0], file))
        read: Callable[..., Iterator[_Batch]] = partial(_read_text, delimiter)
        new_column: Callable[[bool], _TextColumn | _JsonColumn] = partial(_TextColumn, delimiter == ";")
    else:
        read = partial(_read_json, _list_of_rows(paths[0]))
        new_column = _JsonColumn
    for path in paths:
        for batch in _first(read(path, refuse, count_empty), max_rows):
            for name, cells in batch.columns.items():
                if name not in columns:
                    columns[name] = new_column(keep_missing is None or name in keep_missing)
                columns[name].observe(cells)
    if not columns:
        raise ConfigError(f"{', '.join(paths)}: expected rows, got none; check the files")
    names = {name: _names_of(name, column, columns) for name, column in columns.items()}
    fields = [
        field for name, column in columns.items() for field in zip(names[name], column.types, strict=True)
    ]
    schema = pa.schema([*fields, (LINE, pa.int64())])
    converted = []
    for number, path in enumerate(paths):
        converted.append(str(folder / f"table-{number}.parquet"))
        with pq.ParquetWriter(converted[-1], schema) as writer:
            for batch in _first(read(path, lambda where, error: None, lambda number: None), max_rows):
                missing = pa.nulls(len(batch.lines))
                arrays = [
                    array
                    for name, column in columns.items()
                    for array in (
                        column.arrays(batch.columns[name])
                        if name in batch.columns
                        else [missing.cast(kind) for kind in column.types]
                    )
                ]
                writer.write_batch(
                    pa.record_batch([*arrays, pa.array(batch.lines, pa.int64())], schema=schema)
                )
    return converted


def _as_plain_parquet(path: str, out: Path, refuse: Refuse, max_rows: int | None) -> str:
    """`path`, or a new file `out` if it has objects, or a list of objects with a name of `LISTS`."""
    with parquet_file(path) as file:
        lists = [
            f.name for f in file.schema_arrow if is_list(f.type) and pa.types.is_struct(f.type.value_type)
        ]
        rows_in = _shown_items(path, [name for name in lists if name in LISTS])
        if not rows_in and not any(_is_object(field.type) for field in file.schema_arrow):
            return path
        first, taken = 1, 0
        empty = _plain_rows(file.schema_arrow.empty_table(), rows_in, first)
        with pq.ParquetWriter(out, empty.schema) as writer:
            for batch in file.iter_batches(_OBJECT_ROWS):
                if max_rows is not None and taken >= max_rows:
                    break
                table = pa.Table.from_batches([batch])
                if rows_in:
                    lengths = pc.fill_null(pc.list_value_length(table[rows_in]), 0)
                    for n in np.flatnonzero(np.asarray(lengths) == 0).tolist():
                        refuse(f"{path}:{first + n}", _no_items(rows_in))
                rows = _plain_rows(table, rows_in, first)
                writer.write_table(rows)
                first, taken = first + len(batch), taken + len(rows)
    return str(out)


def first_text(file: pq.ParquetFile, column: str) -> str:
    """The first cell of a converted file that makes its column one of texts, as ", such as 'n/a' in line 7"
    for a message; "" if there is none."""
    if LINE not in file.schema_arrow.names or not pa.types.is_string(file.schema_arrow.field(column).type):
        return ""
    plain = "|".join(_KINDS[kind][0] for kind in ("number", "number with comma", "flag"))
    for batch in file.iter_batches(columns=[column, LINE]):
        is_text = pc.invert(pc.match_substring_regex(batch.column(column), plain))
        is_text = pc.and_(is_text, pc.invert(pc.is_in(batch.column(column), _EMPTY_NUMBERS)))
        for cell, line in zip(*(part.to_pylist() for part in batch.filter(is_text).slice(0, 1)), strict=True):
            return f", such as {cell[:64]!r} in line {line}"
    return ""


def with_row_per_item(
    paths: Sequence[str], files: Sequence[str], columns: Sequence[str], folder: Path, refuse: Refuse
) -> list[str]:
    """New Parquet files in `folder` with a row for each entry of the lists in `columns`.

    `files`: from `as_parquet(paths)`. A list that is missing has missing entries. A row is refused if its
    first list is empty, or another one has another length.

    Raises:
        ConfigError: a column is absent, or has no lists.
        OSError: `folder` cannot be written.
    """
    written = [str(folder / f"items-{n}.parquet") for n in range(len(paths))]
    for path, name, out in zip(paths, files, written, strict=True):
        with parquet_file(name) as file:
            known = file.schema_arrow.names
            for column in columns:
                if column not in known:
                    raise ConfigError(
                        f"{path}: column {column!r} is absent{nearest(column, known)}; correct the map"
                    )
                kind = file.schema_arrow.field(column).type
                if not is_list(kind) and not pa.types.is_null(kind):
                    raise ConfigError(
                        f"{path}: column {column!r} (lists): expected lists, got {kind}; correct the map"
                    )
            empty = pa.RecordBatch.from_pylist([], schema=file.schema_arrow)
            first = 1
            with pq.ParquetWriter(out, _row_per_item(path, empty, columns, first, refuse).schema) as writer:
                for batch in file.iter_batches(_OBJECT_ROWS):
                    writer.write_table(_row_per_item(path, batch, columns, first, refuse))
                    first += len(batch)
    return written


def _row_per_item(
    path: str, batch: pa.RecordBatch, columns: Sequence[str], first: int, refuse: Refuse
) -> pa.Table:
    """`first`: number of the first row."""
    lines = batch.column(LINE) if LINE in batch.schema.names else pa.array(np.arange(len(batch)) + first)
    lists = {name: batch.column(name) for name in columns}
    for name, cells in lists.items():
        if pa.types.is_null(cells.type):  # a column without values
            lists[name] = cells.cast(pa.list_(pa.null()))
    length_N = {name: np.asarray(pc.fill_null(pc.list_value_length(x), -1)) for name, x in lists.items()}
    shown_N = length_N[columns[0]]
    fits_N = shown_N > 0
    for name in columns:
        fits_N &= (length_N[name] == shown_N) | (length_N[name] < 0)
    for n in np.flatnonzero(~fits_N).tolist():
        refuse(f"{path}:{lines[n].as_py()}", _unequal({name: int(x[n]) for name, x in length_N.items()}))
    row_M = np.repeat(np.flatnonzero(fits_N), shown_N[fits_N])
    place_M = np.arange(len(row_M)) - np.repeat(np.cumsum(shown_N[fits_N]) - shown_N[fits_N], shown_N[fits_N])
    out = {}
    for name in batch.schema.names:
        if name in lists:
            own_N = np.maximum(length_N[name], 0)
            at_M = (np.cumsum(own_N) - own_N)[row_M] + place_M
            out[name] = lists[name].flatten().take(pa.array(at_M, mask=length_N[name][row_M] < 0))
        else:
            out[name] = batch.column(name).take(pa.array(row_M))
    return pa.table({**out, LINE: lines.take(pa.array(row_M)).cast(pa.int64())})


def _unequal(lengths: dict[str, int]) -> ValueError:
    (column, wanted), *others = lengths.items()
    if wanted <= 0:
        return ValueError(f"column {column!r}: expected a list of shown items with one or more, got none")
    other, length = next((name, length) for name, length in others if length not in (wanted, -1))
    return ValueError(
        f"column {other!r}: expected {wanted} entries, as many as in column {column!r}, got {length}"
    )


def _plain_rows(table: pa.Table, rows_in: str, first: int) -> pa.Table:
    """The rows without objects: one for each object in the lists `rows_in`, or with "" one for each row.
    `first`: number of the first row."""
    row_N = pa.array(np.arange(len(table)))
    shown: dict[str, Any] = {}
    if rows_in:
        lists = table[rows_in].combine_chunks()
        row_N, objects = pc.list_parent_indices(lists), lists.flatten()
        kinds = objects.type
        shown = _without_objects({kinds[n].name: part for n, part in enumerate(objects.flatten())})
        table = table.drop_columns([rows_in])
    outer = _without_objects(dict(zip(table.column_names, table.columns, strict=True)))
    columns = {name: column.take(row_N) for name, column in outer.items()}
    columns |= {_name_beside(outer, name): column for name, column in shown.items()}
    return pa.table({**columns, LINE: pc.add(row_N.cast(pa.int64()), first)})


def _without_objects(columns: dict[str, Any]) -> dict[str, Any]:
    """Columns by name; a value of an object has the names of both, joined by `_`."""
    while any(_is_object(column.type) for column in columns.values()):
        parts: dict[str, Any] = {}
        for name, column in columns.items():
            if _is_object(column.type):
                names = [f"{name}_{column.type[n].name}" for n in range(column.type.num_fields)]
                parts |= zip(names, column.flatten(), strict=True)
            else:
                parts[name] = column
        columns = parts
    return columns


def _is_object(kind: pa.DataType) -> bool:
    """Whether this is a struct, other than one of lists alone, which is a sequence or ids with weights."""
    return pa.types.is_struct(kind) and not all(is_list(field.type) for field in kind)


def is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _name_beside(outer: Container[str], name: str) -> str:
    """The column of a value of a shown item: `id` is `item_id`; a name that the row also has gets `item_`."""
    name = "item_id" if name == "id" else name
    return f"item_{name}" if name in outer else name


def _no_items(rows_in: str) -> ValueError:
    return ValueError(f"{rows_in}: expected a list of shown items with one or more")


class _Batch(NamedTuple):
    """Rows of a file: cells by column, of text files as Arrow arrays of texts; and the line of each row."""

    columns: dict[str, Any]
    lines: Sequence[int] | np.ndarray


def _first(batches: Iterable[_Batch], max_rows: int | None) -> Iterator[_Batch]:
    """The first batches, until they have `max_rows` rows; None = all."""
    taken = 0
    for batch in batches:
        yield batch
        taken += len(batch.lines)
        if max_rows is not None and taken >= max_rows:
            return


def _names_of(name: str, column: _TextColumn | _JsonColumn, names: Container[str]) -> list[str]:
    """The names of a column's arrays. Flags of a `_TextColumn` are called `clicked`, unless another column
    is."""
    flags = CLICKED if CLICKED not in names else f"{name}_{CLICKED}"
    return [name, flags][: len(column.types)]


class _TextColumn:
    """A column of separated text: the kinds that fit all cells seen.

    Cells such as `N55689-1 N35729-0` become two lists, of the ids before the hyphens and of the flags behind
    them. Several ids in a cell, such as `N55689 N35729`, become a list. Both are the form of MIND.
    """

    def __init__(self, decimal_comma: bool, keeps_missing: bool) -> None:
        self._fitting = [kind for kind in _KINDS if decimal_comma or kind != "number with comma"]
        self._lists: _JsonColumn | None = _JsonColumn(keeps_missing)  # None: not all cells are JSON lists
        self._is_seen = self._has_several = False
        self._are_ids = self._are_flagged = True

    def observe(self, cells: pa.Array) -> None:
        texts = cells.drop_null()
        if not len(texts):
            return
        self._is_seen = True
        numbers = texts.filter(pc.invert(pc.is_in(texts, _EMPTY_NUMBERS)))
        self._fitting = [kind for kind in self._fitting if len(numbers) and _fits(numbers, *_KINDS[kind])]
        if self._lists is not None:
            may_be = pc.all(pc.starts_with(texts, "[")).as_py()
            lists = [_json_list(text) for text in texts.to_pylist()] if may_be else [None]
            self._lists = None if None in lists else self._lists
            if self._lists is not None:
                self._lists.observe(lists)
        self._are_ids = self._are_ids and _match(texts, _IDS)
        self._are_flagged = self._are_flagged and _match(texts, _FLAGGED_IDS)
        self._has_several |= bool(pc.any(pc.match_substring(texts, " ")).as_py())

    @property
    def type(self) -> pa.DataType:
        """The type of the first array."""
        return self.types[0]

    @property
    def types(self) -> list[pa.DataType]:
        if not self._is_seen:
            return [pa.null()]
        if self._lists is not None:
            return self._lists.types
        if self._has_several and (self._are_ids or self._are_flagged):
            return [pa.list_(pa.string()), pa.list_(pa.int64())][: 1 + self._are_flagged]
        return [_KINDS[self._fitting[0]][1] if self._fitting else pa.string()]

    def arrays(self, cells: pa.Array) -> list[pa.Array]:
        """The cells in the column's types."""
        if not self._is_seen:
            return [pa.nulls(len(cells))]
        if self._lists is not None:
            return self._lists.arrays([_json_list(text or "") for text in cells.to_pylist()])
        if pa.types.is_list(self.type):
            words = pc.split_pattern(cells, " ")
            if not self._are_flagged:
                return [words]
            ids, flags = (
                pc.utf8_slice_codeunits(words.flatten(), 0, -2),
                pc.utf8_slice_codeunits(words.flatten(), -1),
            )
            return [
                pa.ListArray.from_arrays(words.offsets, values, mask=words.is_null())
                for values in (ids, flags.cast(pa.int64()))
            ]
        return [self._array(cells)]

    def _array(self, cells: pa.Array) -> pa.Array:
        if pa.types.is_string(self.type):
            return cells
        present = pc.if_else(pc.is_in(cells, _EMPTY_NUMBERS), None, cells)
        if pa.types.is_boolean(self.type):
            return pc.if_else(pc.is_valid(present), pc.is_in(pc.utf8_lower(present), _YES), None)
        if self._fitting[0] == "number with comma":
            present = pc.replace_substring(present, ",", ".")
        return pc.cast(pc.utf8_ltrim(present, "+"), self.type)


def _match(texts: pa.Array, pattern: str) -> bool:
    return bool(pc.all(pc.match_substring_regex(texts, pattern)).as_py())


def _fits(texts: pa.Array, pattern: str, kind: pa.DataType) -> bool:
    """Whether all texts match, and are within the range of the type."""
    if not _match(texts, pattern):
        return False
    try:
        return not pa.types.is_integer(kind) or bool(pc.cast(texts, kind))
    except pa.ArrowInvalid:
        return False


def _json_list(text: str) -> list[Any] | None:
    """The JSON list that a text is, or None if it is none or has lists or objects in it."""
    try:
        found: list[Any] = msgspec.json.decode(text, type=list[str | int | float | bool | None])
    except msgspec.MsgspecError:
        return None
    return found


class _JsonColumn:
    """A column of JSON values: the types of all values seen, of lists those of their entries. The texts of
    `_EMPTY` fit every type, and are missing in a column that is not text. Missing entries of lists are left
    out, unless the column `keeps_missing`."""

    def __init__(self, keeps_missing: bool) -> None:
        self._keeps_missing = keeps_missing
        self._types: set[type] = set()
        self._is_list = False
        self._low = self._high = 0  # of the integers

    def observe(self, cells: Iterable[Any]) -> None:
        for cell in cells:
            self._is_list |= isinstance(cell, list)
            for value in cell if isinstance(cell, list) else (cell,):
                if value is not None and not _is_empty(value):
                    self._types.add(type(value))
                    if type(value) is int:
                        self._low, self._high = min(self._low, value), max(self._high, value)

    @property
    def type(self) -> pa.DataType:
        return pa.list_(self._entry()) if self._is_list else self._entry()

    @property
    def types(self) -> list[pa.DataType]:
        return [self.type]

    def _entry(self) -> pa.DataType:
        if not self._types:
            return pa.null()
        if self._types == {bool}:
            return pa.bool_()
        if self._types == {int} and self._low >= -(1 << 63) and self._high < 1 << 63:
            return pa.int64()
        if self._types == {int} and self._low >= 0 and self._high < 1 << 64:
            return pa.uint64()
        is_exact = max(-self._low, self._high) < 1 << 53
        is_number = self._types <= {int, float}
        return pa.float64() if is_number and is_exact else pa.string()

    def arrays(self, cells: Iterable[Any]) -> list[pa.Array]:
        """The values in the column's type; a value beside lists is a list of one."""
        convert: Callable[[Any], Any] = _CONVERTERS.get(self._entry(), _text)

        def missing(value: Any) -> bool:
            return value is None or (_is_empty(value) and (convert is not _text or not self._types))

        if not self._is_list:
            return [pa.array([None if missing(cell) else convert(cell) for cell in cells], self.type)]
        lists = (cell if isinstance(cell, list) or missing(cell) else [cell] for cell in cells)

        def entries(cell: list[Any]) -> list[Any]:
            found = [None if missing(value) else convert(value) for value in cell]
            return found if self._keeps_missing else [value for value in found if value is not None]

        return [pa.array([entries(cell) if isinstance(cell, list) else None for cell in lists], self.type)]


def _is_empty(value: Any) -> bool:
    return isinstance(value, str) and value in _EMPTY


def _text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


_CONVERTERS: dict[pa.DataType, Callable[[Any], Any]]
_CONVERTERS = {pa.bool_(): bool, pa.int64(): int, pa.uint64(): int, pa.float64(): float}


def delimiter_of(line: str) -> str:
    """The delimiter of a table, guessed from its first line: comma, semicolon, tab or bar, whichever is most
    frequent outside quotes."""
    outside = "".join(line.split('"')[::2])
    return max(",;\t|", key=outside.count)


def first_line(path: str, file: BinaryIO) -> str:
    """The first line of separated text.

    Raises:
        ConfigError: it is not in UTF-8, or lines end in a carriage return alone.
    """
    try:
        line = file.readline().decode("utf-8").removeprefix("\ufeff").rstrip("\r\n")
    except UnicodeDecodeError:
        raise not_utf8(path) from None
    if "\r" in line:
        raise ConfigError(
            f"{path}: expected lines that end in \\n or \\r\\n, got \\r alone; convert it, such as with "
            f"`tr '\\r' '\\n' < {path}`"
        )
    return line


def not_utf8(path: str) -> ConfigError:
    """The error of a text file in another encoding, or of a Parquet file with another ending."""
    with open_file(path) as file:
        start = file.read(4)
    if start == b"PAR1":
        return ConfigError(f"{path}: expected text, got a Parquet file; let its name end in .parquet")
    is_utf16 = start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return ConfigError(
        f"{path}: expected text in UTF-8, got another encoding; convert it, such as with "
        f"`iconv -f {'UTF-16' if is_utf16 else 'WINDOWS-1252'} -t UTF-8 {path}`"
    )


def column_names(line: str, delimiter: str) -> list[str]:
    """The names in a first line; one without a name, as pandas writes it for its index, is `column_<n>`."""
    cells = next(csv.reader([line], delimiter=delimiter), [])
    return [cell.strip() or f"column_{n}" for n, cell in enumerate(cells, 1)]


def _names(path: str, line: str, delimiter: str) -> list[str]:
    """The `column_names` of a table that must have several, each with its own name.

    Raises:
        ConfigError: the first line has no names, or one twice.
    """
    names = column_names(line, delimiter)
    if all(name == f"column_{n}" for n, name in enumerate(names, 1)):
        raise ConfigError(f"{path}: expected a first line with the names of the columns, got an empty line")
    if len(names) < 2:
        raise ConfigError(
            f"{path}: expected names separated by a comma, a semicolon, a tab or |, got {line[:64]!r}; "
            "convert another separator, such as with `sed 's/::/\\t/g'`, and write a line of names above the "
            "rows if there is none"
        )
    number = re.compile(_KINDS["number"][0])
    if values := [name for name in names if number.match(name)]:
        is_mind = len(names) == len(_OF_MIND) and re.match(_FLAGGED_IDS, names[-1])
        example = delimiter.join(_OF_MIND if is_mind else ("user", "item", "time", "click"))
        raise ConfigError(
            f"{path}: expected a first line with the names of the columns, got a row with the value "
            f"{values[0][:64]!r}; write a line of names above it, such as {example!r}"
        )
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise ConfigError(f"{path}: two columns are named {twice[0]!r}; rename one in the first line")
    return names


def _read_text(delimiter: str, path: str, refuse: Refuse, count_empty: CountEmpty) -> Iterator[_Batch]:
    """Rows of separated text, all cells as texts. A row with another number of cells is refused."""
    with open_file(path) as file:
        names = _names(path, first_line(path, file), delimiter)
        yield _Batch({name: pa.array([], pa.string()) for name in names}, [])  # of a file without rows
        for rows, line_N in text_rows(path, file, names, delimiter, _EMPTY, refuse, count_empty):
            yield _Batch({name: rows.column(name) for name in names}, line_N)


def text_rows(
    path: str,
    file: BinaryIO,
    names: Sequence[str],
    delimiter: str,
    missing: Sequence[str],
    refuse: Refuse,
    count_empty: CountEmpty,
) -> Iterator[tuple[pa.RecordBatch, np.ndarray]]:
    """Rows of the open file below its first line, and the line on which each begins (int64); all cells are
    texts, those in `missing` null. A row with another number of cells is refused; one without any cell, such
    as an empty line, is counted and left out.

    Raises:
        ConfigError: the file is not separated text in UTF-8, or ends within quotes.
    """
    lines, text = _RowLines(path, delimiter, refuse), _TextLines(file)
    file.seek(0)
    if not file.readline().endswith(b"\n"):  # of a table without rows, which Arrow refuses
        return
    file.seek(0)
    try:
        batches = pyarrow.csv.open_csv(
            file,
            read_options=pyarrow.csv.ReadOptions(
                use_threads=False, block_size=_BLOCK_BYTES, column_names=names, skip_rows=1
            ),
            parse_options=pyarrow.csv.ParseOptions(
                delimiter=delimiter,
                newlines_in_values=True,
                ignore_empty_lines=False,
                invalid_row_handler=lines.on_bad,
            ),
            convert_options=pyarrow.csv.ConvertOptions(
                column_types=dict.fromkeys(names, pa.string()), null_values=missing, strings_can_be_null=True
            ),
        )
        last: tuple[int, str] | None = None  # the line of the last row, and its last cell
        for batch in batches:
            line_N, present_N = lines.of(batch), np.zeros(len(batch), np.bool_)
            for column in batch.columns:
                present_N |= np.asarray(column.is_valid())
            count_empty(int((~present_N).sum()))
            breaks_N = _line_breaks(batch)
            for n in np.flatnonzero(breaks_N).tolist():
                # Other text follows the quote: the cell was open, and this is the first quote of a later row.
                row = text.read(int(line_N[n]), 1 + int(breaks_N[n]))
                if "expected after" in _csv_error(row, delimiter):
                    refuse(f"{path}:{line_N[n]}", ValueError(_OPEN_CELL))
                    present_N[n] = False
            if len(batch):
                last = int(line_N[-1]), batch.columns[-1][-1].as_py() or ""
            yield batch.filter(pa.array(present_N)), line_N[present_N]
        lines.of(batches.schema.empty_table())
        if last is not None and "\n" in last[1] and not _ends_with_quote(file):
            raise _open_quote(path, last[0])
    except pa.ArrowInvalid as error:
        if "UTF8" in str(error) or "UTF-8" in str(error):
            raise not_utf8(path) from None
        if "straddl" in str(error):
            raise ConfigError(
                f"{path}: expected rows of at most {_BLOCK_BYTES >> 20} MiB, got a longer one; close its "
                "quotes"
            ) from None
        raise ConfigError(
            f"{path}: expected rows of text ({str(error).splitlines()[0]}); correct it"
        ) from None


def _ends_with_quote(file: BinaryIO) -> bool:
    """Whether the last character of the file is a quote, apart from line breaks."""
    file.seek(max(0, file.seek(0, 2) - 4096))
    return file.read().rstrip(b"\r\n").endswith(b'"')


def _open_quote(path: str, line: int) -> ConfigError:
    return ConfigError(
        f"{path}:{line}: expected a quote that ends, got the end of the file in a row that begins here; "
        'close the quote, or write a quote within a cell as ""'
    )


def _csv_error(row: str, delimiter: str) -> str:
    """What is wrong with the quotes of a row, in the words of `csv`; "" = nothing."""
    try:
        deque(csv.reader(io.StringIO(row, newline=""), delimiter=delimiter, strict=True), maxlen=0)
    except csv.Error as error:
        return str(error)
    return ""


def _line_breaks(rows: pa.RecordBatch | pa.Table) -> np.ndarray:
    """int64 [N]: line breaks within the cells of each row."""
    breaks_N = np.zeros(len(rows), np.int64)
    for column in rows.columns:
        breaks_N += np.asarray(pc.fill_null(pc.count_substring(column, "\n"), 0))
    return breaks_N


class _TextLines:
    """Reads lines of a file in ascending order, beside another reader of it."""

    def __init__(self, file: BinaryIO) -> None:
        self._handle, self._line, self._at = file.fileno(), 1, 0

    def read(self, first: int, count: int) -> str:
        """Lines `first`, counted from 1, to `first + count - 1`."""
        self._skip(first - self._line)
        begin = self._at
        self._skip(count)
        return os.pread(self._handle, self._at - begin, begin).decode(errors="replace")

    def _skip(self, count: int) -> None:
        self._line += count
        while count and (piece := os.pread(self._handle, _SKIPPED_BYTES, self._at)):
            lines = piece.split(b"\n", count)
            count -= len(lines) - 1
            self._at += len(piece) if count else len(piece) - len(lines[-1])


class _RowLines:
    """The line on which each row begins: pyarrow counts rows, whose cells may have line breaks."""

    def __init__(self, path: str, delimiter: str, refuse: Refuse) -> None:
        self._path, self._delimiter, self._refuse = path, delimiter, refuse
        self._row = self._line = 2  # of the next row; 1 has the names
        # A row, its line breaks, and what is wrong; "" = its quotes are open.
        self._bad = deque[tuple[int, int, str]]()

    def on_bad(self, row: pyarrow.csv.InvalidRow) -> str:
        text = f"expected {row.expected_columns} cells, as in the first line, got {row.actual_columns}"
        if '"' in row.text and re.search("end of data|field limit", _csv_error(row.text, self._delimiter)):
            text = ""
        self._bad.append((row.number, row.text.count("\n"), text))
        return "skip"

    def of(self, rows: pa.RecordBatch | pa.Table) -> np.ndarray:
        """The lines of the next rows. Refuses the bad rows before, between and after them."""
        breaks_N, line_N, done = _line_breaks(rows), np.zeros(len(rows), np.int64), 0
        while True:
            while self._bad and self._bad[0][0] == self._row:
                _, breaks, text = self._bad.popleft()
                if not text:
                    raise _open_quote(self._path, self._line)
                self._refuse(f"{self._path}:{self._line}", ValueError(text))
                self._row, self._line = self._row + 1, self._line + 1 + breaks
            if done == len(rows):
                return line_N
            end = min(len(rows), done + self._bad[0][0] - self._row) if self._bad else len(rows)
            size_M = 1 + breaks_N[done:end]
            line_N[done:end] = self._line + np.cumsum(size_M) - size_M
            self._row, self._line, done = self._row + end - done, self._line + int(size_M.sum()), end


def _list_of_rows(path: str) -> str:
    """The key of the lists of shown items in the first 1,000 lines; "" = none, and a line is one row.

    A list of objects with a name beyond `LISTS` must be in every line, or its objects must have an id: a
    review has pictures in some lines.

    Raises:
        ConfigError: several keys have such lists.
    """
    found, with_ids, num_lines = Counter[str](), set[str](), 0
    for _, line in itertools.islice(_json_lines(path, lambda where, error: None), 1000):
        num_lines += 1
        for key, value in line.items():
            if _is_rows(value):
                found[key] += 1
                with_ids |= {key} if any(_ID_NAME.fullmatch(name) for name in value[0]) else set()
    lists = [key for key in found if key in (*LISTS, *with_ids) or found[key] == num_lines]
    return _shown_items(path, lists)


def _shown_items(path: str, lists: Sequence[str]) -> str:
    """Return the name of the list that has the shown items, of these lists of objects; "" if there are none.

    Raises:
        ConfigError: several may have them.
    """
    names = [name for name in LISTS if name in lists] or lists
    if len(names) > 1:
        raise ConfigError(
            f"{path}: expected one list of objects in each row, that of the shown items, got "
            f"{' and '.join(map(repr, names))}; rename the shown items to 'candidates'"
        )
    return names[0] if names else ""


def _is_rows(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(entry, dict) for entry in value)


def _json_lines(path: str, refuse: Refuse) -> Iterator[tuple[int, dict[str, Any]]]:
    with open_file(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    yield number, json_object(line)
                except ValueError as error:
                    refuse(f"{path}:{number}", error)


def _read_json(rows_in: str, path: str, refuse: Refuse, count_empty: CountEmpty) -> Iterator[_Batch]:
    """The objects in the list `rows_in` of each line, or with "" the lines themselves. A line without shown
    items is refused; none is empty."""
    rows, lines = list[dict[str, Any]](), list[int]()
    for number, line in _json_lines(path, refuse):
        shown = line.pop(rows_in, None) if rows_in else [{}]
        if not _is_rows(shown):
            refuse(f"{path}:{number}", _no_items(rows_in))
            continue
        outer = dict(_flattened(line))
        for row in shown:
            rows.append(outer | {_name_beside(outer, key): value for key, value in _flattened(row)})
            lines.append(number)
        if len(rows) >= _ROWS:
            yield _batch_of(rows, lines)
            rows, lines = [], []
    if rows:
        yield _batch_of(rows, lines)


def _batch_of(rows: list[dict[str, Any]], lines: list[int]) -> _Batch:
    names = dict.fromkeys(name for row in rows for name in row)
    return _Batch({name: [row.get(name) for row in rows] for name in names}, lines)


def _flattened(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Values by name; a value of an object within has the names of both, joined by `_`."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flattened(value, f"{prefix}{key}_")
        else:
            yield f"{prefix}{key}", value
