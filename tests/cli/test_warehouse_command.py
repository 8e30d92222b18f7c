"""What lies in a warehouse is told, to people and to machines."""

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
def place(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("warehouse")
    archiver, _, _ = make_archiver(folder, make_topic_records(rich_schema(), 20))
    archiver.open()
    archiver.turn(0.0)
    archiver.flush()
    pin_version(Warehouse(folder).store, "session-1", VersionPin("samples", 1, 5))
    return str(folder)


def told(*arguments: str) -> str:
    found = CliRunner().invoke(inspect, arguments, catch_exceptions=False)
    assert found.exit_code == 0
    return found.output


def test_a_table_s_days_are_reported(place: str) -> None:
    said = json.loads(told("table", place, "--json", "--files"))
    assert (said["requests"], said["files"], said["sealed_files"], said["schemas"]) == (40, 2, 0, 1)
    assert said["last_offsets"] == {"0": 19, "1": 19} and [day["day"] for day in said["days"]] == [
        "1970-01-01"
    ]
    assert len(said["paths"]) == 2 and said["pins"] == ["pins/samples.session-1"]
    assert json.loads(told("table", place, "--table", "corrections", "--json"))["bytes_a_candidate"] is None
    text = told("table", place, "--files")
    assert "1970-01-01" in text and said["paths"][0] in text


def test_columns_of_a_file_are_listed_in_storage_order(place: str) -> None:
    path = json.loads(told("table", place, "--json", "--files"))["paths"][0]
    said = json.loads(told("file", place, path, "--json"))
    columns = {its["column"]: its for its in said["columns"]}
    assert list(columns)[:2] == ["offset", "close_ms"] and said["requests"] == 20
    assert (
        "BYTE_STREAM_SPLIT" in columns["ro__hour"]["encodings"]
        and "DELTA_BINARY_PACKED" in columns["close_ms"]["encodings"]
    )
    assert abs(sum(its["share"] for its in columns.values()) - 1) < 0.01
    assert "ro__history" in told("file", place, path)


def test_a_missing_table_or_file_is_reported(place: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="samples has no file 'x'"):
        told("file", place, "x")
    with pytest.raises(CheckpointError, match="is no table"):
        told("table", str(tmp_path))
