"""`roostream inspect feature`, `inspect dedupe` and `report table` on a small warehouse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from roostream.cli.main import cli
from roostream.runtime.checkpoint_store import FileStore
from roostream.warehouse.column_popularity import record_session_features
from tests.warehouse.small_warehouse import ROWS, small_warehouse


@pytest.fixture(scope="module")
def warehouse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("warehouse")
    schema = small_warehouse(folder)
    record_session_features(FileStore(folder), schema, 1, "one", ["age", "history"])
    record_session_features(FileStore(folder), schema, 2, "two", ["age"])
    return folder


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


def test_a_feature_is_reported_by_day_with_its_use_in_sessions(warehouse: Path) -> None:
    report = json.loads(run("inspect", "feature", warehouse, "age", "history", "--json").stdout)
    assert list(report["days"]) == ["2024-05-01", "2024-05-02"] and set(report["days"]["2024-05-01"]) == {
        "age",
        "history",
    }
    assert (
        report["days"]["2024-05-02"]["history"]["rows"] == ROWS
        and report["days"]["2024-05-02"]["history"]["moved"] == 0
    )
    assert report["asked"] == {"age": 1.0, "history": 0.5}


def test_the_command_prints_a_table_of_the_named_days(warehouse: Path) -> None:
    result = run("inspect", "feature", warehouse, "--from", "2024-05-02")
    assert result.exit_code == 0 and "2024-05-02" in result.stdout and "2024-05-01" not in result.stdout


def test_an_unknown_feature_is_refused(warehouse: Path) -> None:
    failed = run("inspect", "feature", warehouse, "agee")
    assert failed.exit_code != 0 and "did you mean 'age'" in str(failed.exception)


def test_duplicates_of_a_warehouse_equal_those_of_its_log(warehouse: Path) -> None:
    report = json.loads(run("inspect", "dedupe", warehouse, "--json").stdout)
    assert report["requests"] == 2 * ROWS and "history" in report["arrangements"]["clustered"]["features"]
    assert (
        json.loads(run("inspect", "dedupe", warehouse, "--requests", 10, "--json").stdout)["requests"] == ROWS
    )


def test_a_page_contains_its_plots(warehouse: Path, tmp_path: Path) -> None:
    result = run("report", "table", warehouse, "--out", tmp_path / "page", "--batch", 32)
    assert result.exit_code == 0 and f"{2 * ROWS:,} requests in 2 files" in result.stdout
    page = (tmp_path / "page" / "index.html").read_text()
    for heading in ("Bytes a candidate, by column", "Coverage by day", "List lengths by day", "Duplicates"):
        assert heading in page
    assert page.count("<svg") == 5 and "src=" not in page
    report = json.loads((tmp_path / "page" / "report.json").read_text())
    assert report["requests"] == 2 * ROWS and report["columns"]["item"]["stored"] > 0


def test_a_folder_that_cannot_be_created_is_reported(warehouse: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    failed = run("report", "table", warehouse, "--out", tmp_path / "file" / "page")
    assert failed.exit_code != 0 and "cannot be created" in str(failed.exception)
