"""`roostream inspect table` and `inspect file` describe a warehouse, as text and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from roostream.cli.main import inspect
from roostream.errors import CheckpointError
from roostream.warehouse.version_pins import VersionPin, pin_version
from roostream.warehouse.warehouse import Warehouse
from tests.warehouse.archive_runs import make_archiver, make_topic_records
from tests.warehouse.sample_cases import rich_schema


@pytest.fixture(scope="module")
def warehouse(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("warehouse")
    archiver, _, _ = make_archiver(folder, make_topic_records(rich_schema(), 20))
    archiver.open()
    archiver.turn(0.0)
    archiver.flush()
    pin_version(Warehouse(folder).store, "session-1", VersionPin("samples", 1, 5))
    return str(folder)


def run_command(*arguments: str) -> str:
    result = CliRunner().invoke(inspect, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_the_days_of_a_table_are_reported(warehouse: str) -> None:
    report = json.loads(run_command("table", warehouse, "--json", "--files"))
    assert (report["requests"], report["files"], report["sealed_files"], report["schemas"]) == (40, 2, 0, 1)
    assert report["last_offsets"] == {"0": 19, "1": 19} and [day["day"] for day in report["days"]] == [
        "1970-01-01"
    ]
    assert len(report["paths"]) == 2 and report["pins"] == ["pins/samples.session-1"]
    assert (
        json.loads(run_command("table", warehouse, "--table", "corrections", "--json"))["bytes_a_candidate"]
        is None
    )
    text = run_command("table", warehouse, "--files")
    assert "1970-01-01" in text and report["paths"][0] in text


def test_columns_of_a_file_are_listed_in_storage_order(warehouse: str) -> None:
    path = json.loads(run_command("table", warehouse, "--json", "--files"))["paths"][0]
    report = json.loads(run_command("file", warehouse, path, "--json"))
    columns = {column["column"]: column for column in report["columns"]}
    assert list(columns)[:2] == ["offset", "close_ms"] and report["requests"] == 20
    assert (
        "BYTE_STREAM_SPLIT" in columns["ro__hour"]["encodings"]
        and "DELTA_BINARY_PACKED" in columns["close_ms"]["encodings"]
    )
    assert abs(sum(column["share"] for column in columns.values()) - 1) < 0.01
    assert "ro__history" in run_command("file", warehouse, path)


def test_a_missing_table_or_file_is_reported(warehouse: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="samples has no file 'x'"):
        run_command("file", warehouse, "x")
    with pytest.raises(CheckpointError, match="is no table"):
        run_command("table", str(tmp_path))
