"""`roostream import log` writes a log's samples to a warehouse exactly once, as the joiner would make
them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from roostream.cli.main import cli
from roostream.errors import ConfigError
from roostream.warehouse.latest_labels import read_latest
from roostream.warehouse.scan import TableScan
from roostream.warehouse.warehouse import Warehouse
from tests.cli.data.test_dedupe_command import SCHEMA

T0 = 1_700_000_000_000


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Write a log of thirty requests of three users. Every other request has a click."""
    (tmp_path / "site.toml").write_text(SCHEMA)
    lines = []
    for n in range(30):
        request = {"request_id": f"r{n}", "user_id": 1 + n % 3}
        basket = {"item": [n, n - 1]}
        candidates = {"item_id": [1, 2, 3], "item": [1, 2, 3]}
        lines.append(
            {
                "type": "impression",
                **request,
                "time": T0 + 1000 * n,
                "ro": {"basket": basket},
                "candidates": candidates,
            }
        )
        if n % 2:
            lines.append(
                {"type": "engagement", **request, "time": T0 + 1000 * n + 5, "item_id": 2, "action": "click"}
            )
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def run(folder: Path, *more: str) -> Result:
    arguments = [
        "import",
        "log",
        str(folder / "log.jsonl"),
        "--schema",
        str(folder / "site.toml"),
        "--warehouse",
        str(folder / "w"),
    ]
    return CliRunner().invoke(cli, [*arguments, *more])


def test_an_imported_log_has_every_request_as_a_sample_clustered_by_user(log: Path) -> None:
    result = run(log)
    assert result.exit_code == 0 and "30 samples in " in result.stdout
    scan = TableScan(log / "w")
    batches = [batch for _, batch in scan.batches(scan.schema())]
    assert sum(batch.num_requests for batch in batches) == 30
    assert sum(batch.label_BT.sum() for batch in batches) == 15
    times = sorted(ms for batch in batches for ms in batch.time_ms_R.tolist())
    assert times == [T0 + 1000 * n for n in range(30)]
    for batch in batches:
        users = [(ms - T0) // 1000 % 3 for ms in batch.time_ms_R.tolist()]
        assert len([n for n in range(1, len(users)) if users[n] != users[n - 1]]) == len(set(users)) - 1


def test_tables_are_imported_with_their_engagements(log: Path) -> None:
    (log / "shown.csv").write_text(f"request_id,time,user_id,item_id,item\nr,{T0},5,1,1\nr,{T0},5,2,2\n")
    (log / "done.csv").write_text(f"request_id,time,user_id,item_id,action\nr,{T0 + 1},5,2,click\n")
    files = ["--engagements", str(log / "done.csv")]
    arguments = ["--schema", str(log / "site.toml"), "--warehouse", str(log / "w"), *files]
    result = CliRunner().invoke(cli, ["import", "log", str(log / "shown.csv"), *arguments])
    assert result.exit_code == 0 and "1 samples in " in result.stdout
    scan = TableScan(log / "w")
    (batch,) = (batch for _, batch in scan.batches(scan.schema()))
    assert batch.label_BT.tolist() == [[0.0], [1.0]]


def test_lines_of_json_have_no_tables_of_engagements(log: Path) -> None:
    failed = run(log, "--engagements", str(log / "log.jsonl"))
    assert failed.exit_code != 0 and "--engagements" in str(failed.exception)


def test_the_same_log_lands_once(log: Path) -> None:
    assert run(log).exit_code == 0
    again = run(log)
    assert again.exit_code != 0 and "was imported before; nothing was changed" in str(again.exception)
    snapshot = Warehouse(log / "w").samples.snapshot()
    assert sum(file.rows for file in snapshot.files) == 30


def test_another_log_is_added_and_a_note_says_that_its_counters_began_empty(log: Path) -> None:
    first = run(log)
    assert first.exit_code == 0 and "had" not in first.stderr
    lines = (log / "log.jsonl").read_text().replace(': "r', ': "s')
    (log / "log.jsonl").write_text(lines)
    second = run(log)
    assert second.exit_code == 0 and "had 30 samples before; counters" in second.stderr
    assert TableScan(log / "w").num_requests == 60


def engagement(**changes: object) -> str:
    fields = {"request_id": "r0", "user_id": 1, "time": T0 + 90_000, "item_id": 1, "action": "click"}
    return json.dumps({"type": "engagement", **fields, **changes}) + "\n"


def test_engagements_after_the_window_become_corrections(log: Path) -> None:
    (log / "site.toml").write_text(SCHEMA + "window_ms = 120_000\n")
    with (log / "log.jsonl").open("a") as file:
        file.write(engagement())
    result = run(log, "--window", "60s")
    assert result.exit_code == 0 and "1 engagements after the join window are stored" in result.stderr
    warehouse = Warehouse(log / "w")
    (corrections,) = warehouse.corrections.snapshot().files
    assert corrections.rows == 1 and TableScan(log / "w").num_requests == 30
    latest = read_latest(warehouse, [corrections], ["click"])
    assert latest.item_M.tolist() == [1] and latest.label_MT.tolist() == [[1.0]]


def test_an_import_that_ended_between_its_two_commits_can_be_repeated(log: Path) -> None:
    with (log / "log.jsonl").open("a") as file:
        file.write(engagement())
    assert run(log, "--window", "60s").exit_code == 0
    shutil.rmtree(log / "w" / "samples")
    assert run(log, "--window", "60s").exit_code == 0
    assert TableScan(log / "w").num_requests == 30
    assert sum(file.rows for file in Warehouse(log / "w").corrections.snapshot().files) == 1


def test_an_import_that_ended_between_its_two_commits_is_not_repeated_with_another_window(log: Path) -> None:
    with (log / "log.jsonl").open("a") as file:
        file.write(engagement())
        file.write(engagement(request_id="r3", time=T0 + 40_000))
    assert run(log, "--window", "60s").exit_code == 0
    shutil.rmtree(log / "w" / "samples")
    shorter = run(log, "--window", "20s")  # has one more correction, which was lost
    assert isinstance(shorter.exception, ConfigError) and "with another --window" in str(shorter.exception)
    assert not Warehouse(log / "w").samples.snapshot().files


def test_events_that_cannot_be_joined_end_the_import_unless_they_are_skipped(log: Path) -> None:
    with (log / "log.jsonl").open("a") as file:
        file.writelines(engagement(request_id=f"x{n}") for n in range(11))
    failed = run(log)
    assert failed.exit_code != 0 and "11 events cannot be joined" in str(failed.exception)
    assert "log.jsonl:46: no_request" in str(failed.exception)
    assert not (log / "w").exists()
    result = run(log, "--skip-bad")
    assert result.exit_code == 0 and "11 events that cannot be joined were skipped" in result.stderr
    assert result.stderr.count("no_request") == 10 and TableScan(log / "w").num_requests == 30


def test_a_large_log_that_cannot_be_joined_makes_no_table(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty table would look like a warehouse whose samples are lost."""
    monkeypatch.setattr("roostream.cli.data.log_archive.FILE_BYTES", 1)
    with (log / "log.jsonl").open("a") as file:
        file.write(engagement(request_id="x"))
    assert "nothing was imported" in str(run(log).exception)
    assert not Warehouse(log / "w").samples.exists() and not Warehouse(log / "w").corrections.exists()
    assert run(log, "--skip-bad").exit_code == 0 and TableScan(log / "w").num_requests == 30


def test_a_bad_line_ends_the_import_unless_bad_lines_are_skipped(log: Path) -> None:
    with (log / "log.jsonl").open("a") as file:
        file.write('{"type": "impression", "request_id": 5}\n')
    failed = run(log)
    assert failed.exit_code != 0 and "log.jsonl:46" in str(failed.exception)
    assert not (log / "w").exists()
    result = run(log, "--skip-bad")
    assert (
        result.exit_code == 0
        and "1 lines were skipped; the first:" in result.stderr
        and ":46" in result.stderr
    )
    assert TableScan(log / "w").num_requests == 30


def test_duplicates_of_a_warehouse_are_clustered_by_session_on_request(log: Path) -> None:
    lines = [json.loads(line) for line in (log / "log.jsonl").read_text().splitlines()]
    (log / "log.jsonl").write_text("".join(json.dumps({**line, "session_id": 7}) + "\n" for line in lines))
    assert run(log).exit_code == 0
    rows = {}
    for by in ("user", "session"):
        arguments = ["inspect", "dedupe", str(log / "w"), "--by", by, "--batch", "30", "--json"]
        report = json.loads(CliRunner().invoke(cli, arguments).stdout)
        assert (report["by"], report["requests"]) == (by, 30)
        rows[by] = report["arrangements"]["clustered"]["session_rows"]
    assert rows["session"] > 1 and rows["session"] > rows["user"]
