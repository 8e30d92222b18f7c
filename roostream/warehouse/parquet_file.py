"""How samples are stored in a Parquet file: column types, order and encodings; conversion to Arrow and back;
writing.

A row is a request. What its candidates have is a list; a candidate's list feature is a list of lists. Floats
are split by byte instead of using dictionaries, ids and texts have dictionaries, times are stored as
differences (docs/decisions/0058 has the figures). A missing float is a NaN, kept bit for bit; a missing list
is null.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from roostream.errors import CheckpointError, UnavailableError
from roostream.runtime.checkpoint_store import CheckpointStore
from roostream.warehouse.data_file import DataFile, new_path
from roostream.wire.columnar import ColumnType, FlatColumn

FORMAT = 2
"""Version of the columns and the footer; raised if older readers would read a file wrong. Format 1 has no
topic."""
FORMATS = (1, FORMAT)
"""The formats that can be read."""
FOOTER_KEY = b"roostream"


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileKey:
    """Which rows a file holds."""

    table: str  # samples or corrections
    day: date
    partition: int
    fingerprint: int
    topic: str = ""  # id of the topic of the rows
    sealed: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class FileRows:
    """Columns of R requests; `counts_R` (int32) are their numbers of candidates."""

    columns: Mapping[str, FlatColumn]
    column_types: Mapping[str, ColumnType]
    counts_R: np.ndarray


def write_rows(
    store: CheckpointStore, rows: FileRows, key: FileKey, by_popularity: Sequence[str] = ()
) -> DataFile:
    """Write a new file to the store; columns named by `by_popularity` come first. Nobody sees it before the
    table's log names it.

    Raises:
        UnavailableError: the store cannot be written now. A file that no log names may remain.
    """
    candidates = int(rows.counts_R.sum(dtype=np.int64))
    footer = {
        "format": FORMAT,
        "table": key.table,
        "day": key.day.isoformat(),
        "partition": key.partition,
        "fingerprint": f"{key.fingerprint:016x}",
        "topic": key.topic,
        "candidates": candidates,
        "sealed": key.sealed,
    }
    table = to_arrow(
        rows.columns, rows.column_types, ordered(rows.column_types, by_popularity), rows.counts_R
    )
    table = table.replace_schema_metadata({FOOTER_KEY: json.dumps(footer).encode()})
    out = pa.BufferOutputStream()
    with pq.ParquetWriter(out, table.schema, **writer_options(rows.column_types)) as writer:
        writer.write_table(table, row_group_size=ROWS_OF_GROUP)
    data = out.getvalue().to_pybytes()
    path = new_path(key.day, key.partition, key.fingerprint, candidates, topic=key.topic, sealed=key.sealed)
    store.put(f"{key.table}/{path}", data)
    offset_R, close_ms_R = rows.columns["offset"].values, rows.columns["close_ms"].values
    return DataFile(
        path=path,
        bytes=len(data),
        rows=len(rows.counts_R),
        candidates=candidates,
        day=key.day,
        partition=key.partition,
        fingerprint=key.fingerprint,
        first_offset=int(offset_R.min()),
        last_offset=int(offset_R.max()),
        first_close_ms=int(close_ms_R.min()),
        last_close_ms=int(close_ms_R.max()),
        sealed=key.sealed,
        topic=key.topic,
    )


def delete_files(store: CheckpointStore, table: str, files: Iterable[DataFile]) -> None:
    """Delete files for which no commit was tried. Never raises: a vacuum deletes what is left, a week
    later."""
    with contextlib.suppress(UnavailableError):
        for file in files:
            store.delete(f"{table}/{file.path}")


MAX_VALUES = 1 << 30
"""Values of a column in one file: Arrow's lists count in 32 bits."""
ROWS_OF_GROUP = 4096
"""Requests of a row group, the smallest part of a column that is read."""
FIRST = ("offset", "close_ms")
"""Columns that always come first: the table's log keeps their bounds."""
_ENCODINGS = {"float": "BYTE_STREAM_SPLIT", "time": "DELTA_BINARY_PACKED"}
_ARROW = {"i8": pa.int64(), "i4": pa.int32(), "f4": pa.float32(), "bytes": pa.binary()}
_NUMPY = {pa.int64(): np.int64, pa.int32(): np.int32, pa.float32(): np.float32}


def ordered(names: Iterable[str], by_popularity: Sequence[str] = ()) -> list[str]:
    """`names` with the columns of `by_popularity` first, the others in their order."""
    declared = list(names)
    first = [name for name in (*FIRST, *by_popularity) if name in set(declared)]
    return list(dict.fromkeys((*first, *declared)))


def arrow_type(column_type: ColumnType) -> pa.DataType:
    """Arrow's type of a column: one level of lists for candidates, one for values of a list."""
    plain = pa.string() if column_type.role == "text" else _ARROW[column_type.dtype]
    for _ in range(column_type.is_list + (column_type.of == "candidate")):
        plain = pa.list_(plain)
    return plain


def arrow_schema(column_types: Mapping[str, ColumnType], names: Sequence[str]) -> pa.Schema:
    """Arrow's schema of these columns, in this order."""
    return pa.schema([pa.field(name, arrow_type(column_types[name])) for name in names])


def writer_options(column_types: Mapping[str, ColumnType]) -> dict[str, Any]:
    """Options of pyarrow's ParquetWriter."""
    leaf = {
        name: name + ".list.element" * (column_type.is_list + (column_type.of == "candidate"))
        for name, column_type in column_types.items()
    }
    return {
        "compression": "zstd",
        "compression_level": 3,
        "use_dictionary": [
            leaf[name] for name, column_type in column_types.items() if column_type.role in ("id", "text")
        ],
        "column_encoding": {
            leaf[name]: _ENCODINGS[column_type.role]
            for name, column_type in column_types.items()
            if column_type.role in _ENCODINGS
        },
        "write_statistics": [name for name in FIRST if name in column_types],
        "write_page_checksum": True,
        "write_batch_size": ROWS_OF_GROUP,
    }


def to_arrow(
    columns: Mapping[str, FlatColumn],
    column_types: Mapping[str, ColumnType],
    names: Sequence[str],
    counts_R: np.ndarray,
) -> pa.Table:
    """The columns `names` of requests with `counts_R` (int32 [R]) candidates."""
    starts = _starts(counts_R)
    arrays = [_array(columns[name], column_types[name], starts) for name in names]
    return pa.Table.from_arrays(arrays, schema=arrow_schema(column_types, names))


def _array(column: FlatColumn, column_type: ColumnType, starts: np.ndarray) -> pa.Array:
    plain = arrow_type(column_type._replace(of="request", is_list=False))
    values = column.values
    if column_type.role == "text" and values.dtype.kind == "S":
        decoded = np.char.decode(values, "utf-8", "replace") if len(values) else values
        values = decoded.astype(object)
    array = pa.array(values, type=plain, from_pandas=False)
    if column_type.is_list:
        assert column.lengths is not None
        missing = None if column.present is None or column.present.all() else pa.array(~column.present)
        array = pa.ListArray.from_arrays(pa.array(_starts(column.lengths)), array, mask=missing)
    return pa.ListArray.from_arrays(pa.array(starts), array) if column_type.of == "candidate" else array


def from_arrow(
    table: pa.Table, column_types: Mapping[str, ColumnType]
) -> tuple[dict[str, FlatColumn], np.ndarray]:
    """A table's columns, and the number of candidates of each request (int32 [R], from the column `item`).

    Raises:
        CheckpointError: a candidate column has another number of values than `item`.
    """
    whole = table.combine_chunks()
    counts_R = np.diff(_offsets(_one_chunk(whole["item"]))).astype(np.int32)
    out: dict[str, FlatColumn] = {}
    for name, column_type in column_types.items():
        array = _one_chunk(whole[name])
        if column_type.of == "candidate":
            offsets = _offsets(array)
            if not np.array_equal(np.diff(offsets), counts_R):
                raise CheckpointError(
                    f"expected a value for every candidate in column {name!r}, got other counts"
                )
            array = array.values.slice(offsets[0], offsets[-1] - offsets[0])
        out[name] = _flat(array, column_type)
    return out, counts_R


def _flat(array: pa.Array, column_type: ColumnType) -> FlatColumn:
    if not column_type.is_list:
        return FlatColumn(_values(array, column_type))
    offsets = _offsets(array)
    present = array.is_valid().to_numpy(zero_copy_only=False)
    values = _values(array.values.slice(offsets[0], offsets[-1] - offsets[0]), column_type)
    return FlatColumn(values, np.diff(offsets).astype(np.int32), present)


def _values(array: pa.Array, column_type: ColumnType) -> np.ndarray:
    if column_type.role == "text" and column_type.dtype.startswith("S"):
        texts = array.dictionary_encode()
        known = np.array([text.encode() for text in texts.dictionary.to_pylist()], dtype=column_type.dtype)
        return (
            known[texts.indices.to_numpy()] if len(known) else np.zeros(len(array), dtype=column_type.dtype)
        )
    if column_type.role == "text" or column_type.dtype == "bytes":
        return np.array([*array.to_pylist(), None], dtype=object)[:-1]
    return array.to_numpy(zero_copy_only=False).astype(_NUMPY[array.type], copy=False)


def _one_chunk(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks else pa.array([], type=column.type)


def _offsets(array: pa.ListArray) -> np.ndarray:
    return array.offsets.to_numpy().astype(np.int64) if len(array) else np.zeros(1, dtype=np.int64)


def _starts(counts: np.ndarray) -> np.ndarray:
    """int32 [N + 1]: where each row's values begin. Raises ValueError: there are more than 32 bits can
    count."""
    if (total := int(counts.sum(dtype=np.int64))) >= 1 << 31:
        raise ValueError(f"expected fewer than 2**31 values in a column of a file, got {total}")
    out = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=out[1:])
    return out
