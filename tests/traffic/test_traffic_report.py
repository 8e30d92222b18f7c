from __future__ import annotations

import json
from pathlib import Path

import pytest

from roo.errors import ConfigError
from traffic.report import check_report, write_report


def test_a_report_replaces_the_one_before_and_leaves_nothing_else(tmp_path: Path) -> None:
    write_report(tmp_path / "out.json", {"a": 1})
    write_report(tmp_path / "out.json", {"a": 2})
    assert json.loads((tmp_path / "out.json").read_text()) == {"a": 2}
    assert [p.name for p in tmp_path.iterdir()] == ["out.json"]


def test_a_report_that_cannot_be_written_is_told_and_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected a report file in an existing folder"):
        check_report(str(tmp_path / "no" / "out.json"))
    with pytest.raises(ConfigError, match="the report can't be written"):
        write_report(tmp_path / "no" / "out.json", {})
    check_report("")
