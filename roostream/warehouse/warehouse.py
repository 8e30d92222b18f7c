"""A warehouse: tables, schemas and pins in one place.

<place>/samples/        a table, with its log in _delta_log/
<place>/corrections/    a table
<place>/schemas/        every schema that wrote rows (roostream/schema/registry.py)
<place>/pins/           versions that are being read (roostream/warehouse/version_pins.py)
<place>/popularity/     which columns are asked for most
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
from roostream.wire.columnar import ColumnType

COLUMN_ORDER = "popularity/columns"
"""A JSON list of names of columns, those that are asked for most first; absent = as declared."""


class Warehouse:
    """Where a deployment's past is. Nothing is read before the first call. One thread."""

    def __init__(self, place: str | Path) -> None:
        """`place`: a directory, or s3://bucket/prefix.

        Raises:
            ConfigError: a place of another kind.
        """
        self.place = str(place)
        self.tables = {name: WarehouseTable(place, name) for name in (SAMPLES, CORRECTIONS)}
        self.store: CheckpointStore = open_store(place)
        self.registry: Registry = open_registry(self.store)

    @property
    def samples(self) -> WarehouseTable:
        return self.tables[SAMPLES]

    @property
    def corrections(self) -> WarehouseTable:
        return self.tables[CORRECTIONS]

    def create(self) -> None:
        """Make its tables where they aren't. Idempotent. UnavailableError: its place can't be written."""
        for table in self.tables.values():
            table.create()

    def open_file(self, table: str, file: DataFile, over_read: float = MAX_OVER_READ) -> SampleFile:
        """Raises as `SampleFile`."""
        return SampleFile(self.store, table, file, over_read=over_read)

    def column_order(self) -> list[str]:
        """Names of columns, those that are asked for most first; [] where nobody has told. UnavailableError: not now."""
        try:
            return [str(name) for name in json.loads(self.store.get(COLUMN_ORDER))]
        except (CheckpointError, ValueError):
            return []


def forms_of(file: SampleFile, known: dict[str, ColumnType]) -> dict[str, ColumnType]:
    """Those of `known` that the file has."""
    there = set(file.footer.schema.to_arrow_schema().names)
    return {name: form for name, form in known.items() if name in there}
