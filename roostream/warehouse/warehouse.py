"""A warehouse: tables, schemas and pins in one directory or bucket prefix.

<location>/samples/        a table, with its log in _delta_log/
<location>/corrections/    a table
<location>/schemas/        every schema that wrote rows (roostream/schema/registry.py)
<location>/pins/           versions that are being read (roostream/warehouse/version_pins.py)
<location>/popularity/     which columns sessions read most
"""

from __future__ import annotations

import json
from pathlib import Path

from roostream.errors import CheckpointError
from roostream.runtime.checkpoint_store import CheckpointStore, open_store
from roostream.runtime.kafka.topics import CORRECTIONS, SAMPLES
from roostream.schema.registry import open_registry
from roostream.schema.schema import Registry
from roostream.warehouse.data_file import DataFile
from roostream.warehouse.delta_table import WarehouseTable
from roostream.warehouse.file_reader import MAX_OVER_READ, SampleFile

COLUMN_ORDER = "popularity/columns"
"""A JSON list of column names, the most popular ones first; absent = as declared."""


class Warehouse:
    """The tables, schemas, pins and column order of one warehouse. Nothing is read before the first call. One
    thread."""

    def __init__(self, location: str | Path) -> None:
        """`location`: a directory, or s3://bucket/prefix.

        Raises:
            ConfigError: another kind of location.
        """
        self.location = str(location)
        self.tables = {name: WarehouseTable(location, name) for name in (SAMPLES, CORRECTIONS)}
        self.store: CheckpointStore = open_store(location)
        self.registry: Registry = open_registry(self.store)

    @property
    def samples(self) -> WarehouseTable:
        return self.tables[SAMPLES]

    @property
    def corrections(self) -> WarehouseTable:
        return self.tables[CORRECTIONS]

    def create(self) -> None:
        """Create the missing tables. Idempotent.

        Raises:
            UnavailableError: the location cannot be written.
        """
        for table in self.tables.values():
            table.create()

    def open_file(self, table: str, file: DataFile, over_read: float = MAX_OVER_READ) -> SampleFile:
        """Raises as `SampleFile`."""
        return SampleFile(self.store, table, file, over_read=over_read)

    def column_order(self) -> list[str]:
        """Column names, the most popular ones first; [] if no session has been recorded.

        Raises:
            UnavailableError: the store cannot be read now.
        """
        try:
            names = json.loads(self.store.get(COLUMN_ORDER))
        except (CheckpointError, ValueError):
            return []
        return [str(name) for name in names] if isinstance(names, list) else []
