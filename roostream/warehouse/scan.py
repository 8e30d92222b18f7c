"""A full scan of the table of samples, for statistics: batches of row groups, and the bytes of columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import NamedTuple

from roostream.errors import CheckpointError
from roostream.runtime.kafka.topics import SAMPLES
from roostream.schema.schema import Schema
from roostream.warehouse.data_file import DataFile
from roostream.warehouse.delta_table import WarehouseTable
from roostream.warehouse.file_reader import check_writers, writer_of
from roostream.warehouse.warehouse import Warehouse
from roostream.wire.batch import Batch


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
        check_writers(self.files, self._warehouse.registry, reader, self._warehouse.location)
        for file in sorted(self.files, key=lambda file: (file.day, file.partition, file.first_offset)):
            opened = self._warehouse.open_file(SAMPLES, file)
            for group in range(len(opened.rows_of_groups)):
                yield file, opened.read(writer_of(file, self._warehouse.registry), reader, [group])

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
