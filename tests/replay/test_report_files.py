"""Writing report files: atomic replacement, pipes and links, and errors before the work starts."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from roostream.errors import ConfigError
from roostream.replay.report_files import check_report, report_files, write_report


def test_a_report_replaces_the_previous_one_and_leaves_no_other_file(tmp_path: Path) -> None:
    write_report(tmp_path / "out.json", {"a": 1})
    write_report(tmp_path / "out.json", {"a": 2})
    assert json.loads((tmp_path / "out.json").read_text()) == {"a": 2}
    assert [p.name for p in tmp_path.iterdir()] == ["out.json"]


def test_a_report_that_cannot_be_written_is_an_error_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected a report file in an existing"):
        check_report(str(tmp_path / "no" / "out.json"))
    with pytest.raises(ConfigError, match="the report"):
        write_report(tmp_path / "no" / "out.json", {})
    check_report("")


def test_a_folder_or_a_name_without_a_suffix_gets_json_and_a_page(tmp_path: Path) -> None:
    assert report_files("") == (None, None)
    assert report_files(str(tmp_path)) == (tmp_path / "report.json", tmp_path / "report.html")
    assert report_files(".") == (Path("report.json"), Path("report.html"))
    assert report_files(str(tmp_path / "out.json")) == (tmp_path / "out.json", None)
    files = report_files(str(tmp_path / "out"))
    files.check()
    assert files.page == tmp_path / "out" / "report.html" and (tmp_path / "out").is_dir()


def test_a_pipe_or_a_link_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe, link, file = tmp_path / "pipe", tmp_path / "link", tmp_path / "file"
    os.mkfifo(pipe)
    link.symlink_to(file)
    descriptor = os.open(pipe, os.O_RDWR)
    try:
        for path in (pipe, link):
            check_report(str(path))
            write_report(path, {"a": 1})
        assert json.loads(os.read(descriptor, 100)) == json.loads(file.read_text()) == {"a": 1}
        assert pipe.is_fifo() and link.is_symlink()
    finally:
        os.close(descriptor)


def test_a_folder_is_rejected_as_report_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected a file for the report, got a folder"):
        check_report(str(tmp_path))
    with pytest.raises(ConfigError, match="the report"):
        report_files(str(tmp_path / "no" / "out")).check()
