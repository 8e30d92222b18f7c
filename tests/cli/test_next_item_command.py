"""`roostream next-item` on the data of a few users: it prints each evaluation, writes a report and rejects
wrong settings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from roostream.cli.main import cli
from tests.trainer.next_item.test_next_item import write_dataset

ROWS = [f"{user}-1-2-3,{10 * (1 + (user + k) % 6)}-4" for user in range(1, 9) for k in range(5)]
MOVIES = "".join(f"{10 * (1 + k)}::Title {k}::Drama\n" for k in range(6))
FLAGS = ["--epochs", "2", "--evaluate-every", "1", "--width", "8", "--negatives", "4"]


def run_command(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["next-item", *arguments])


@pytest.mark.slow
def test_both_models_print_each_evaluation_and_write_the_result(tmp_path: Path) -> None:
    folder = str(write_dataset(tmp_path, ROWS, MOVIES))
    for model in ("hstu", "sasrec"):
        report = tmp_path / f"{model}.json"
        result = run_command("--data", folder, "--model", model, "--report", str(report), *FLAGS)
        assert result.exit_code == 0, result.output
        assert "8 users, 40 interactions, 6 items" in result.output and result.output.count("test  ") == 3
        report_content = json.loads(report.read_text())
        assert (
            report_content["settings"]["model"] == model
            and len(report_content["evaluations"]) == 2
            and report_content["items"] == 6
        )
        assert set(report_content["best"]["test"]) == {"HR@10", "NDCG@10", "HR@50", "NDCG@50", "MRR"}


def test_impossible_settings_are_refused_before_training(tmp_path: Path) -> None:
    folder = str(write_dataset(tmp_path, ROWS, MOVIES))
    assert "expected a file of MovieLens-1M" in str(run_command("--data", str(tmp_path / "absent")).exception)
    assert "expected a divisor of width = 50" in str(run_command("--data", folder, "--heads", "7").exception)
    assert "expected a file for the report, got a folder" in str(
        run_command("--data", folder, "--report", str(tmp_path)).exception
    )
