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

from roostream.errors import CheckpointError, UnavailableError
from roostream.runtime.checkpoint_store import CheckpointStore, open_store
from roostream.runtime.kafka.topics import CORRECTIONS, SAMPLES
from roostream.schema.ids import hash64
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

    def table_ids(self) -> dict[str, str]:
        """Table → its id, of the tables that exist.

        Raises:
            UnavailableError: the location cannot be read now.
            CheckpointError: a log is damaged.
        """
        return {name: table.snapshot().table_id for name, table in self.tables.items() if table.exists()}

    def open_remembered(self, memory: CheckpointStore) -> None:
        """Create the tables for a deployment that never had any here; otherwise check that they are those of
        before. `memory` is the deployment's store and keeps their ids: an empty mount or a foreign table must
        not be taken for a new warehouse.

        Raises:
            UnavailableError: the tables are not there now, or a store cannot be used.
            CheckpointError: other tables are there.
        """
        location = self.location if "://" in self.location else str(Path(self.location).absolute())
        name = f"warehouses/{hash64(location):016x}.json"
        try:
            body = memory.get(name)
        except CheckpointError:  # absent: this deployment has never archived here
            self.create()
            memory.create(name, json.dumps({"location": location, "tables": self.table_ids()}).encode())
            body = memory.get(name)  # that of another archiver if it was first
        try:
            expected = {str(table): str(id_) for table, id_ in json.loads(body)["tables"].items()}
        except (ValueError, KeyError, AttributeError, TypeError):
            raise CheckpointError(
                f"{name} of this deployment's store is damaged: expected ids of the tables at {location}; "
                "remove it if the right warehouse is there"
            ) from None
        found = self.table_ids()
        forget = f"or remove {name} from this deployment's store to begin a new warehouse there"
        if missing := sorted(expected.keys() - found.keys()):
            raise UnavailableError(
                f"{location}: expected the warehouse that this deployment has archived into, found no table "
                f"{' and '.join(missing)}; mount or restore it, {forget}"
            )
        for table, id_ in expected.items():
            if found[table] != id_:
                raise CheckpointError(
                    f"{location}: expected table {table} with id {id_}, into which this deployment has "
                    f"archived, found another one with id {found[table]}; mount the right one, {forget}"
                )

    def open_file(self, table: str, file: DataFile, over_read: float = MAX_OVER_READ) -> SampleFile:
        """Open a file of a table. Raises as `SampleFile`."""
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
