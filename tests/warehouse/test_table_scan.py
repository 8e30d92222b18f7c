"""A table read from one end to the other."""

from __future__ import annotations

from pathlib import Path

import pytest

from roostream.errors import CheckpointError
from roostream.warehouse.scan import TableScan, is_warehouse
from roostream.wire.columnar import column_types, project_schema
from tests.warehouse.small_warehouse import DAYS, ROWS, small_warehouse


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("warehouse")
    small_warehouse(folder)
    return folder


def test_each_sample_is_scanned_once_day_by_day(place: Path) -> None:
    scan = TableScan(place)
    found = [(file.day, batch.num_requests) for file, batch in scan.batches(scan.schema())]
    assert found == [(day, ROWS) for day in DAYS] and scan.num_requests == 2 * ROWS
    assert is_warehouse(place) and not is_warehouse(place / "samples")


def test_days_and_features_are_chosen(place: Path) -> None:
    scan = TableScan(place, first=DAYS[1], last=DAYS[1])
    ((file, batch),) = scan.batches(project_schema(scan.schema(), frozenset({"age"})))
    assert file.day == DAYS[1] and batch.nro_float_BF.shape[1] == 1 and not batch.ro_lists.keys


def test_bytes_by_column_cover_all_files(place: Path) -> None:
    scan = TableScan(place)
    sizes = scan.bytes_by_column()
    assert set(sizes) == set(column_types(scan.schema()))
    stored = [its.stored for its in sizes.values()]
    assert stored == sorted(stored, reverse=True) and 0 < sum(stored) < sum(file.bytes for file in scan.files)


def test_days_without_files_and_missing_tables_are_errors(place: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        TableScan(place, last=DAYS[0].replace(year=2000))
    with pytest.raises(CheckpointError):
        TableScan(tmp_path)
