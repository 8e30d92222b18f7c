"""`roostream up` and `roostream status` of a stack in which one program cannot run with its settings."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.options import demo, load_saved_options, save_options

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def roostream(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-m", "roostream.cli.main", *arguments)
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=600)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    yield tmp_path
    roostream(tmp_path, "down", "--home", "home")


def test_a_wrong_archive_is_reported_once_and_not_retried(folder: Path) -> None:
    (folder / "empty").mkdir()
    up = roostream(folder, "up", "--home", "home", "--from-warehouse", "empty")
    log = folder / "home/logs/controller.log"
    sentence = f"warehouse = '{folder / 'empty'}': "
    last = up.stderr.strip().splitlines()[-1]
    assert up.returncode == 2 and last.startswith(f"error: controller cannot run: {sentence}"), up.stderr
    assert "is no table" in last and f"its log: {log}" in last
    status = json.loads(roostream(folder, "status", "--home", "home", "--json").stdout)
    trouble = status["troubles"]["controller"]
    assert trouble.startswith(f"failed: {sentence}") and str(log) in trouble
    assert status["programs"]["controller"]["restarts"] == 0
    assert log.read_text().count(sentence) == 1
    status_output = roostream(folder, "status", "--home", "home")
    assert (
        status_output.returncode == 1
        and "NOT READY" in status_output.stdout
        and "is no table" in " ".join(status_output.stdout.replace("│", " ").split())
    )


def test_the_home_of_a_replay_continues_with_the_schema_that_was_given_last(folder: Path) -> None:
    home, schema = folder / "home", folder / "shop.toml"
    home.mkdir()
    save_options(home, demo())
    schema.write_bytes((ROOT / "examples/shop/shop.toml").read_bytes())
    up = roostream(folder, "up", "--home", "home", "--schema", "shop.toml", "--set", "worker.model=none.toml")
    assert up.returncode == 2 and "none.toml: no such file" in up.stderr, up.stderr
    later = load_saved_options(home)
    assert later is not None and later.schema == schema and later.overrides == demo().overrides


def test_an_unavailable_store_is_awaited_and_shown_by_status(folder: Path) -> None:
    arguments = ("--from-warehouse", "s3://bucket/prefix", "--wait", "45")
    up = roostream(folder, "up", "--home", "home", *arguments)
    assert up.returncode == 1 and "controller: " in up.stderr, up.stderr

    def troubles() -> dict[str, str]:
        status = json.loads(roostream(folder, "status", "--home", "home", "--json").stdout)
        return status["troubles"]

    end_s = time.monotonic() + 300  # the controller keeps retrying; on a busy machine, it also starts late
    while "s3://bucket/prefix" not in (reported := json.dumps(troubles())) and time.monotonic() < end_s:
        time.sleep(1)
    assert "s3://bucket/prefix" in reported
