"""A small warehouse, as an archiver writes it."""

from __future__ import annotations

import dataclasses
from datetime import date
from pathlib import Path

from roostream.runtime.checkpoint_store import FileStore
from roostream.schema.registry import register
from roostream.schema.schema import Schema
from roostream.warehouse.delta_table import ProgressStep, WarehouseTable
from roostream.warehouse.parquet_file import write_rows
from roostream.warehouse.warehouse import Warehouse
from tests.warehouse.sample_cases import file_key, file_rows, rich_records, rich_schema

DAYS = (date(2024, 5, 1), date(2024, 5, 2))
ROWS = 600


def small_warehouse(location: Path) -> Schema:
    """Write a warehouse with `ROWS` samples on each of two days; return their schema, which has every kind of
    feature."""
    schema, store, table = rich_schema(), FileStore(location), WarehouseTable(location, "samples")
    register(store, schema)
    Warehouse(location).create()
    for n, day in enumerate(DAYS):
        rows = file_rows(schema, rich_records(schema, ROWS))
        file = write_rows(store, rows, dataclasses.replace(file_key(schema), day=day))
        table.widen(rows.column_types)
        table.commit(
            [file], progress={"samples/topic/3": ProgressStep(n * ROWS if n else None, (n + 1) * ROWS)}
        )
    return schema
