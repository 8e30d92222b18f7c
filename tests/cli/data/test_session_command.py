"""`roostream inspect session` and `replay session`: what a reading session reads is described, captured, and
read again by two readers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from roostream.cli.main import cli
from roostream.errors import CheckpointError, ConfigError, UnavailableError
from roostream.runtime.checkpoint_store import open_store
from roostream.runtime.store_identity import init_store
from roostream.warehouse.readers.leases import Lease, LeaseLog
from tests.warehouse.small_warehouse import ROWS, small_warehouse
from trainer.control.reader_master import LEASES_FILE


@pytest.fixture(scope="module")
def warehouse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("w")
    small_warehouse(folder)
    return folder


def run_command(*arguments: str) -> str:
    result = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_a_session_is_described_before_it_is_read(warehouse: Path, tmp_path: Path) -> None:
    full_session = json.loads(run_command("inspect", "session", str(warehouse), "--json"))
    assert (
        full_session["requests"],
        full_session["files"],
        full_session["splits"],
        full_session["row_groups"],
    ) == (2 * ROWS, 2, 2, 2)
    assert 0 <= full_session["over_read"] <= 0.08 and full_session["rows"] == {"3": 2 * ROWS}
    narrowed = json.loads(
        run_command(
            "inspect", "session", str(warehouse), "--json", "--days", "2024-05-02", "--features", "age, gap"
        )
    )
    assert (
        narrowed["requests"] == ROWS
        and narrowed["bytes"] < full_session["bytes"] / 4
        and narrowed["digest"] != full_session["digest"]
    )
    text = run_command("inspect", "session", str(warehouse), "--capture", str(tmp_path / "s.json"))
    assert f"{2 * ROWS:,} requests in 2 files" in text and (tmp_path / "s.json").exists()


def test_two_readers_of_a_captured_session_read_the_same(warehouse: Path, tmp_path: Path) -> None:
    run_command(
        "inspect", "session", str(warehouse), "--features", "age", "--capture", str(tmp_path / "s.json")
    )
    replay = json.loads(
        run_command(
            "replay",
            "session",
            str(tmp_path / "s.json"),
            str(warehouse),
            "--over-read",
            "0",
            "--turns",
            "3",
            "--json",
        )
    )
    assert replay["requests"] == 2 * ROWS and replay["reads_the_same"] and replay["turns"] == 3
    assert replay["low"] <= replay["ratio"] <= replay["high"]
    text = run_command(
        "replay", "session", str(tmp_path / "s.json"), str(warehouse), "--slower", "5", "--turns", "3"
    )
    assert "second / first: " in text and "3 turns" in text


def test_a_missing_table_is_reported(warehouse: Path) -> None:
    run = CliRunner().invoke
    assert "expected features of schema" in str(
        run(cli, ["inspect", "session", str(warehouse), "--features", "agee"]).exception
    )
    assert isinstance(
        run(cli, ["inspect", "session", str(warehouse), "--features", "agee"]).exception, ConfigError
    )
    assert isinstance(
        run(cli, ["inspect", "session", str(warehouse), "--days", "2030-01-01"]).exception, CheckpointError
    )


def test_the_readers_of_a_run_are_listed(tmp_path: Path) -> None:
    log, store = LeaseLog(), open_store(str(tmp_path / "store"))
    log.note(1, "granted", Lease(3, 0, 1, "a:1/x"))
    log.note(2, "done", Lease(3, 0, 1, "a:1/x"))
    log.note(3, "granted", Lease(4, 8, 2, "a:1/x"))
    held = {"split": 4, "worker": 0, "position": 4096, "reader": "a:1/x", "for_s": 1.25}
    session = {"digest": "d", "table": "w", "version": 7}
    state = {
        "at_ms": 1_700_000_000_000,
        "incarnation": 2,
        "session": session,
        "trained": True,
        "held": [held],
    }
    store.put(LEASES_FILE, json.dumps(log.body(**state)).encode())
    assert run_command("inspect", "session", "--leases", str(tmp_path / "store")).splitlines() == [
        "as of 2023-11-14 22:13:20 UTC, incarnation 2",
        "session d of w, version 7: in training",
        "reader a:1/x: 2 splits: 1 done",
        "split 4 from 4,096, for worker 0: a:1/x, for 1.2 s",
    ]
    leases = json.loads(run_command("inspect", "session", "--leases", str(tmp_path / "store"), "--json"))
    assert leases["events"][1] == {"at_ms": 2, "what": "done", "split": 3, "position": 0, "reader": "a:1/x"}


def test_a_store_without_leases_and_a_missing_argument_are_reported(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="names another place"):
        run_command("inspect", "session", "--leases", str(tmp_path))
    init_store(tmp_path)
    with pytest.raises(CheckpointError, match="programs, found no leases"):
        run_command("inspect", "session", "--leases", str(tmp_path))
    with pytest.raises(ConfigError, match="expected a warehouse, or --leases with a checkpoint store"):
        run_command("inspect", "session")
