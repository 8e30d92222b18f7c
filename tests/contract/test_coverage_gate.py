"""What the coverage gate refuses. The measurement itself is `make coverage`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.coverage_gate import REASONS, main, refusals

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("percent", "total", "reasons", "said"),
    [
        ({"a.py": 95.0}, 95.0, {}, []),
        ({"a.py": 89.0}, 89.0, {}, ["expected 90 % of all lines"]),
        ({"a.py": 69.0}, 92.0, {}, ["a.py: expected 70 %"]),
        ({"a.py": 10.0}, 92.0, {"a.py": "why"}, []),
        ({"a.py": 95.0}, 92.0, {"a.py": "why"}, ["a.py: 95 % of its lines are run; take its reason out"]),
        ({"a.py": 80.0}, 92.0, {"b.py": "why"}, ["b.py: a reason for a file that isn't there"]),
    ],
)
def test_too_little_and_reasons_that_are_over_are_refused(
    percent: dict[str, float], total: float, reasons: dict[str, str], said: list[str]
) -> None:
    found = refusals(percent, total, reasons)
    assert len(found) == len(said) and all(text in one for text, one in zip(said, found, strict=True))


def test_a_report_is_read_and_its_verdict_is_the_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {name: {"summary": {"percent_covered": 20.0}} for name in REASONS} | {"x.py": {"summary": {"percent_covered": 10.0}}}
    report = tmp_path / "coverage.json"
    report.write_text(json.dumps({"files": files, "totals": {"percent_covered": 95.0}}))
    assert main(report) == 1
    assert "x.py: expected 70 %" in capsys.readouterr().out


def test_every_reason_is_of_a_file_and_says_what_runs_it() -> None:
    assert [name for name, reason in REASONS.items() if not (ROOT / name).is_file() or len(reason) < 20] == []
