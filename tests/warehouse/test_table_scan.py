"""`TableScan` reads all samples of a table, day by day."""

from __future__ import annotations

from pathlib import Path

import pytest

from roostream.errors import CheckpointError
from roostream.warehouse.scan import TableScan, is_warehouse
from roostream.wire.columnar import column_types, project_schema
from tests.warehouse.small_warehouse import DAYS, ROWS, small_warehouse


@pytest.fixture(scope="module")
def location(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("warehouse")
    small_warehouse(folder)
    return folder


def test_each_sample_is_scanned_once_day_by_day(location: Path) -> None:
    scan = TableScan(location)
    found = [(file.day, batch.num_requests) for file, batch in scan.batches(scan.schema())]
    assert found == [(day, ROWS) for day in DAYS] and scan.num_requests == 2 * ROWS
    assert is_warehouse(location) and not is_warehouse(location / "samples")


def test_a_scan_may_be_limited_to_days_and_features(location: Path) -> None:
    scan = TableScan(location, first=DAYS[1], last=DAYS[1])
    ((file, batch),) = scan.batches(project_schema(scan.schema(), frozenset({"age"})))
    assert file.day == DAYS[1] and batch.nro_float_BF.shape[1] == 1 and not batch.ro_lists.keys


def test_bytes_by_column_cover_all_files(location: Path) -> None:
    scan = TableScan(location)
    sizes = scan.bytes_by_column()
    assert set(sizes) == set(column_types(scan.schema()))
    stored = [column.stored for column in sizes.values()]
    assert stored == sorted(stored, reverse=True) and 0 < sum(stored) < sum(file.bytes for file in scan.files)


def test_days_without_files_and_missing_tables_are_errors(location: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        TableScan(location, last=DAYS[0].replace(year=2000))
    with pytest.raises(CheckpointError):
        TableScan(tmp_path)
