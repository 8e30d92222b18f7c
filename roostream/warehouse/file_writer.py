"""Columns to the bytes of a file, and the file to its store."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from datetime import date

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from roostream.runtime.checkpoint_store import CheckpointStore
from roostream.warehouse import layout
from roostream.warehouse.data_file import DataFile, new_path
from roostream.wire.columnar import FlatColumn, Form

FORMAT = 2
"""Of a file's columns and what its footer says; raised when a reader of before would read them wrong. 1 tells no topic."""
FORMATS = (1, FORMAT)
"""Those that are read."""
FOOTER_KEY = b"roostream"


@dataclasses.dataclass(frozen=True, kw_only=True)
class FilePlace:
    """Which rows a file holds."""

    table: str  # samples or corrections: the table's folder
    day: date
    partition: int
    fingerprint: int
    topic: str = ""  # id of the topic that they came from
    sealed: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class FileRows:
    """Columns of R requests; `counts_R` (int32) are their candidates."""

    columns: Mapping[str, FlatColumn]
    forms: Mapping[str, Form]
    counts_R: np.ndarray


def encode_rows(rows: FileRows, place: FilePlace, by_popularity: Sequence[str] = ()) -> bytes:
    """A file in memory: columns that are asked for most (`by_popularity`) lie in front."""
    names = layout.ordered(rows.forms, by_popularity)
    table = layout.to_arrow(rows.columns, rows.forms, names, rows.counts_R)
    said = {
        "format": FORMAT,
        "table": place.table,
        "day": place.day.isoformat(),
        "partition": place.partition,
        "fingerprint": f"{place.fingerprint:016x}",
        "topic": place.topic,
        "candidates": int(rows.counts_R.sum(dtype=np.int64)),
        "sealed": place.sealed,
    }
    table = table.replace_schema_metadata({FOOTER_KEY: json.dumps(said).encode()})
    out = pa.BufferOutputStream()
    with pq.ParquetWriter(out, table.schema, **layout.writer_options(rows.forms)) as writer:
        writer.write_table(table, row_group_size=layout.ROWS_OF_GROUP)
    return out.getvalue().to_pybytes()


def write_rows(
    store: CheckpointStore, rows: FileRows, place: FilePlace, by_popularity: Sequence[str] = ()
) -> DataFile:
    """A new file in the store, which nobody sees before the table's log names it.

    Raises:
        UnavailableError: the store can't be written now; nothing, or a file that nobody names, is there.
    """
    data = encode_rows(rows, place, by_popularity)
    candidates = int(rows.counts_R.sum(dtype=np.int64))
    path = new_path(
        place.day, place.partition, place.fingerprint, candidates, topic=place.topic, sealed=place.sealed
    )
    store.put(f"{place.table}/{path}", data)
    offset_R, close_ms_R = rows.columns["offset"].values, rows.columns["close_ms"].values
    return DataFile(
        path=path,
        bytes=len(data),
        rows=len(rows.counts_R),
        candidates=candidates,
        day=place.day,
        partition=place.partition,
        fingerprint=place.fingerprint,
        first_offset=int(offset_R.min()),
        last_offset=int(offset_R.max()),
        first_close_ms=int(close_ms_R.min()),
        last_close_ms=int(close_ms_R.max()),
        sealed=place.sealed,
        topic=place.topic,
    )
