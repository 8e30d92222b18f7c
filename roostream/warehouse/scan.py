"""A full scan of the table of samples, for statistics: batches of row groups, and the bytes of columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from roostream.errors import CheckpointError
from roostream.runtime.kafka.topics import SAMPLES
from roostream.schema.schema import Schema
from roostream.warehouse.data_file import DataFile
from roostream.warehouse.delta_table import WarehouseTable
from roostream.warehouse.file_reader import SampleFile, check_writers, writer_of
from roostream.warehouse.record_columns import PLAIN
from roostream.warehouse.warehouse import Warehouse
from roostream.wire.batch import Batch
from roostream.wire.dedup import user_numbers


class ColumnBytes(NamedTuple):
    """Size of a column over all files."""

    stored: int  # compressed, as in the files
    values: int  # uncompressed


class TableScan:
    """One version of a warehouse's samples. Not thread-safe."""

    def __init__(self, location: str | Path, first: date | None = None, last: date | None = None) -> None:
        """`location`: a directory or s3://bucket/prefix. Only files of days [first, last] are read; None = no
        bound.

        Raises:
            CheckpointError: there is no table or no file in these days, or it is damaged.
            UnavailableError: it cannot be read now.
        """
        self._warehouse = Warehouse(location)
        self.store = self._warehouse.store
        snapshot = self._warehouse.samples.snapshot()
        self.version, self.files = snapshot.version, snapshot.of_days(first, last)
        if not self.files:
            raise CheckpointError(
                f"{location}: expected files of samples in these days, got none; choose other days"
            )

    @property
    def num_requests(self) -> int:
        return sum(file.rows for file in self.files)

    def schema(self) -> Schema:
        """The schema of the newest file. Raises SchemaError: it is not registered."""
        return writer_of(max(self.files, key=lambda file: file.last_close_ms), self._warehouse.registry)

    def batches(self, reader: Schema) -> Iterator[tuple[DataFile, Batch]]:
        """All row groups, day by day, as `reader` reads them; fewer features mean fewer columns.

        Raises:
            CheckpointError: a file is damaged; the message names it.
            UnavailableError: it cannot be read now.
            SchemaError: `reader` cannot read what a file's writer wrote.
        """
        for opened, _, batch in self._row_groups(reader):
            yield opened.file, batch

    def grouped(self, reader: Schema, by: Literal["user", "session"]) -> Iterator[tuple[Batch, np.ndarray]]:
        """As `batches`, with the user or session of each request as int64 [R]: equal numbers mean the same
        one. A request without a session counts for its user; without both it is alone."""
        for opened, group, batch in self._row_groups(reader):
            if by == "user":
                yield batch, user_numbers(batch)
                continue
            columns, _ = opened.columns({name: PLAIN[name] for name in ("session_id", "user_id")}, [group])
            session_R, user_R = (columns[name].values for name in ("session_id", "user_id"))
            alone_R = -1 - np.arange(batch.num_requests, dtype=np.int64)
            yield batch, np.where(session_R != 0, session_R, np.where(user_R != 0, user_R, alone_R))

    def _row_groups(self, reader: Schema) -> Iterator[tuple[SampleFile, int, Batch]]:
        check_writers(self.files, self._warehouse.registry, reader, self._warehouse.location)
        for file in sorted(self.files, key=lambda file: (file.day, file.partition, file.first_offset)):
            opened = self._warehouse.open_file(SAMPLES, file)
            for group in range(len(opened.rows_of_groups)):
                writer = writer_of(file, self._warehouse.registry)
                yield opened, group, opened.read(writer, reader, [group])

    def bytes_by_column(self) -> dict[str, ColumnBytes]:
        """Column → its bytes, largest first, from footers alone. Raises as `batches`."""
        stored, values = Counter[str](), Counter[str]()
        for file in self.files:
            for name, chunk in self._warehouse.open_file(SAMPLES, file).column_chunks():
                stored[name] += chunk.total_compressed_size
                values[name] += chunk.total_uncompressed_size
        return {name: ColumnBytes(size, values[name]) for name, size in stored.most_common()}


def is_warehouse(location: str | Path) -> bool:
    """Whether this directory, or s3://bucket/prefix, holds a table of samples.

    Raises:
        UnavailableError: the bucket cannot be read now.
    """
    if str(location).startswith("s3://"):
        return WarehouseTable(location, SAMPLES).exists()
    return (Path(location) / SAMPLES / "_delta_log").is_dir()
