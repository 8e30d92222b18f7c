"""Figures of a table and of a file, with stable keys: for `roostream inspect` and its JSON output."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from roostream.errors import CheckpointError
from roostream.warehouse.data_file import DataFile
from roostream.warehouse.delta_table import TableSnapshot
from roostream.warehouse.file_reader import SampleFile
from roostream.warehouse.warehouse import Warehouse


def describe_table(warehouse: Warehouse, name: str) -> dict[str, Any]:
    """A table's totals and days.

    Raises:
        UnavailableError: the table cannot be read now.
        CheckpointError: there is no such table, or its log is damaged.
    """
    found: TableSnapshot = warehouse.tables[name].snapshot()
    # Expired pins that the compactor has not deleted yet are listed too.
    pins = [pin for pin in warehouse.store.list("pins") if pin.startswith(f"pins/{name}.")]
    days = [
        {"day": day.isoformat(), **_sum(file for file in found.files if file.day == day)}
        for day in sorted({file.day for file in found.files})
    ]
    partitions = sorted({file.partition for file in found.files})
    ends = {str(p): max(file.last_offset for file in found.files if file.partition == p) for p in partitions}
    return {
        "table": name,
        "id": found.table_id,
        "version": found.version,
        **_sum(found.files),
        "last_offsets": ends,
        "pins": pins,
        "days": days,
    }


def _sum(files: Iterable[DataFile]) -> dict[str, Any]:
    files = list(files)
    candidates, size = sum(file.candidates for file in files), sum(file.bytes for file in files)
    return {
        "files": len(files),
        "sealed_files": sum(file.sealed for file in files),
        "schemas": len({file.fingerprint for file in files}),
        "requests": sum(file.rows for file in files),
        "candidates": candidates,
        "bytes": size,
        "bytes_a_candidate": round(size / candidates, 1) if candidates else None,
    }


def describe_file(warehouse: Warehouse, name: str, path: str) -> dict[str, Any]:
    """What a file's footer says, and the bytes of each column, in storage order.

    Raises:
        UnavailableError, CheckpointError: as `describe_table`; or the table has no such file.
    """
    file = next((one for one in warehouse.tables[name].snapshot().files if one.path == path), None)
    if file is None:
        raise CheckpointError(
            f"{name} has no file {path!r}; `roostream inspect table --files` lists the files"
        )
    opened = warehouse.open_file(name, file)
    columns = _columns(opened)
    total = sum(column["bytes"] for column in columns) or 1
    for column in columns:
        column["share"] = round(column["bytes"] / total, 4)
    return {
        **opened.footer_info,
        "path": path,
        "requests": file.rows,
        "bytes": file.bytes,
        "row_groups": opened.rows_of_groups,
    } | {"columns": columns}


def _columns(opened: SampleFile) -> list[dict[str, Any]]:
    out: dict[str, dict[str, Any]] = {}
    for name, chunk in opened.column_chunks():
        figures = out.setdefault(name, {"values": 0, "bytes": 0, "plain_bytes": 0, "encodings": set()})
        figures["values"] += chunk.num_values
        figures["bytes"] += chunk.total_compressed_size
        figures["plain_bytes"] += chunk.total_uncompressed_size
        figures["encodings"] |= set(chunk.encodings) - {"RLE", "BIT_PACKED"}
    return [
        {"column": name, **figures, "encodings": sorted(figures["encodings"])}
        for name, figures in out.items()
    ]
