"""`roostream inspect dedupe` on a log of JSON lines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from roostream.cli.main import cli

SCHEMA = """
[tables.item]
dim = 4
[[ro]]
name = "basket"
kind = "sequence"
table = "item"
[[nro]]
name = "item"
kind = "ids"
table = "item"
[[label]]
name = "click"
action = "click"
"""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Write a log of four users who visit in turn. Each visit adds an item at the front of the user's
    basket."""
    (tmp_path / "site.toml").write_text(SCHEMA)
    lines = [
        {
            "type": "impression",
            "request_id": f"r{user}-{visit}",
            "user_id": user,
            "time": 1_700_000_000_000 + visit * 10 + user,
            "ro": {"basket": {"item": [100 * user + entry for entry in range(visit, max(visit - 5, 0), -1)]}},
            "candidates": {"item_id": [1, 2], "item": [1, 2]},
        }
        for visit in range(5, 9)
        for user in range(1, 5)
    ]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def run(folder: Path, *arguments: str) -> Result:
    return CliRunner().invoke(
        cli,
        ["inspect", "dedupe", str(folder / "log.jsonl"), "--schema", str(folder / "site.toml"), *arguments],
    )


def test_factors_as_logged_and_clustered_are_reported_as_json(log: Path) -> None:
    report = json.loads(run(log, "--batch", "4", "--json").stdout)
    assert (report["requests"], report["candidates"], report["by"]) == (16, 32, "user")
    logged, clustered = (
        report["arrangements"][name]["features"]["basket"] for name in ("logged", "clustered")
    )
    assert (
        logged["partial"] == 1.0
        and clustered["partial"] == pytest.approx(20 / 8)
        and clustered["exact"] == 1.0
    )


def test_the_command_prints_tables_and_advice(log: Path) -> None:
    result = run(log, "--batch", "4")
    assert result.exit_code == 0 and "as logged: 16 requests in batches of 4, S = 1.00" in result.stdout
    assert (
        "basket: deduplicate partially, since its rows overlap, 2.5 times fewer entries; only if"
        in result.stdout
    )


def test_the_number_of_requests_read_can_be_limited(log: Path) -> None:
    assert json.loads(run(log, "--requests", "5", "--json").stdout)["requests"] == 5


def test_a_schema_without_request_only_features_has_nothing_to_share(log: Path) -> None:
    (log / "site.toml").write_text(SCHEMA.replace("[[ro]]", "[[nro]]", 1))
    failed = run(log)
    assert failed.exit_code != 0 and "expected at least one [[ro]] feature" in str(failed.exception)


def test_a_bad_line_ends_the_command_unless_bad_lines_are_skipped(log: Path) -> None:
    with (log / "log.jsonl").open("a") as file:
        file.write("no JSON\n")
    failed = run(log)
    assert failed.exit_code != 0 and "log.jsonl:17" in str(failed.exception)
    skipped = run(log, "--skip-bad")
    assert (
        skipped.exit_code == 0
        and "1 lines were skipped" in skipped.stderr
        and "log.jsonl:17" in skipped.stderr
    )
