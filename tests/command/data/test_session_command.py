"""What a session reads is told and captured, and read again by two readers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from command.main import cli
from roo.errors import CheckpointError, ConfigError
from tests.warehouse.small_warehouse import ROWS, small_warehouse


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("w")
    small_warehouse(folder)
    return folder


def told(*arguments: str) -> str:
    found = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert found.exit_code == 0, found.output
    return found.output


def test_a_session_is_told_before_it_is_read(place: Path, tmp_path: Path) -> None:
    whole = json.loads(told("inspect", "session", str(place), "--json"))
    assert (whole["requests"], whole["files"], whole["splits"], whole["row_groups"]) == (2 * ROWS, 2, 2, 2)
    assert 0 <= whole["over_read"] <= 0.08 and whole["rows"] == {"3": 2 * ROWS}
    few = json.loads(told("inspect", "session", str(place), "--json", "--days", "2024-05-02", "--features", "age, gap"))
    assert few["requests"] == ROWS and few["bytes"] < whole["bytes"] / 4 and few["digest"] != whole["digest"]
    text = told("inspect", "session", str(place), "--capture", str(tmp_path / "s.json"))
    assert f"{2 * ROWS:,} requests in 2 files" in text and (tmp_path / "s.json").exists()


def test_two_readers_of_a_captured_session_read_the_same(place: Path, tmp_path: Path) -> None:
    told("inspect", "session", str(place), "--features", "age", "--capture", str(tmp_path / "s.json"))
    its = json.loads(
        told("replay", "session", str(tmp_path / "s.json"), str(place), "--over-read", "0", "--turns", "3", "--json")
    )
    assert its["requests"] == 2 * ROWS and its["reads_the_same"] and its["turns"] == 3
    assert its["low"] <= its["ratio"] <= its["high"]
    text = told("replay", "session", str(tmp_path / "s.json"), str(place), "--slower", "5", "--turns", "3")
    assert "second / first: " in text and "3 turns" in text


def test_what_is_not_there_is_told(place: Path) -> None:
    run = CliRunner().invoke
    assert "expected features of schema" in str(run(cli, ["inspect", "session", str(place), "--features", "agee"]).exception)
    assert isinstance(run(cli, ["inspect", "session", str(place), "--features", "agee"]).exception, ConfigError)
    assert isinstance(run(cli, ["inspect", "session", str(place), "--days", "2030-01-01"]).exception, CheckpointError)
