"""`roostream import log`: a log's samples in a warehouse, as the joiner makes them, once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from roostream.cli.main import cli
from roostream.warehouse.scan import TableScan
from roostream.warehouse.warehouse import Warehouse
from tests.cli.data.test_dedupe_command import SCHEMA

T0 = 1_700_000_000_000


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Thirty requests of three users, of which every other has a click."""
    (tmp_path / "site.toml").write_text(SCHEMA)
    lines = []
    for n in range(30):
        who = {"request_id": f"r{n}", "user_id": 1 + n % 3}
        basket = {"item": [n, n - 1]}
        shown = {"item_id": [1, 2, 3], "item": [1, 2, 3]}
        lines.append(
            {
                "type": "impression",
                **who,
                "time": T0 + 1000 * n,
                "ro": {"basket": basket},
                "candidates": shown,
            }
        )
        if n % 2:
            lines.append(
                {"type": "engagement", **who, "time": T0 + 1000 * n + 5, "item_id": 2, "action": "click"}
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
    done = run(log)
    assert done.exit_code == 0 and "30 samples in " in done.stdout
    scan = TableScan(log / "w")
    batches = [batch for _, batch in scan.batches(scan.schema())]
    assert sum(batch.num_requests for batch in batches) == 30
    assert sum(batch.label_BT.sum() for batch in batches) == 15
    times = sorted(ms for batch in batches for ms in batch.time_ms_R.tolist())
    assert times == [T0 + 1000 * n for n in range(30)]
    for batch in batches:
        users = [(ms - T0) // 1000 % 3 for ms in batch.time_ms_R.tolist()]
        assert len([n for n in range(1, len(users)) if users[n] != users[n - 1]]) == len(set(users)) - 1


def test_the_same_log_lands_once(log: Path) -> None:
    assert run(log).exit_code == 0
    again = run(log)
    assert again.exit_code != 0 and "was imported before; nothing was changed" in str(again.exception)
    snapshot = Warehouse(log / "w").samples.snapshot()
    assert sum(file.rows for file in snapshot.files) == 30


def test_another_log_is_added(log: Path) -> None:
    assert run(log).exit_code == 0
    lines = (log / "log.jsonl").read_text().replace(': "r', ': "s')
    (log / "log.jsonl").write_text(lines)
    assert run(log).exit_code == 0
    assert TableScan(log / "w").num_requests == 60


def test_engagements_behind_the_window_are_reported(log: Path) -> None:
    late = {
        "type": "engagement",
        "request_id": "r0",
        "user_id": 1,
        "time": T0 + 90_000,
        "item_id": 1,
        "action": "click",
    }
    with (log / "log.jsonl").open("a") as file:
        file.write(json.dumps(late) + "\n")
    assert "1 engagements after the join window" in run(log, "--window", "60s").stderr


def test_a_bad_line_ends_the_import_unless_bad_lines_are_skipped(log: Path) -> None:
    with (log / "log.jsonl").open("a") as file:
        file.write('{"type": "impression", "request_id": 5}\n')
    refused = run(log)
    assert refused.exit_code != 0 and "log.jsonl:46" in str(refused.exception)
    assert not Warehouse(log / "w").samples.snapshot().files
    done = run(log, "--skip-bad")
    assert done.exit_code == 0 and "1 lines were skipped; the first: " in done.stderr and ":46" in done.stderr
    assert TableScan(log / "w").num_requests == 30
