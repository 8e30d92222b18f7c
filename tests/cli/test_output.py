"""Progress bars and wide tables on a terminal and elsewhere."""

from __future__ import annotations

import pytest
from rich.table import Table

from roostream.cli.output import counted, progress_bar, wide_console


def test_without_a_terminal_no_progress_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(counted("abc", "letters", 3)) == ["a", "b", "c"]
    assert capsys.readouterr() == ("", "")


def test_a_terminal_shows_progress_as_done_of_total(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    assert list(counted("abc", "letters", 3)) == ["a", "b", "c"]
    with progress_bar("files") as tell:
        tell(2, 5)
        tell(4, None)
    told = capsys.readouterr()
    assert told.out == "" and "letters" in told.err and "3/3" in told.err and "4/5" in told.err


def test_a_pipe_gets_whole_names_and_a_terminal_its_width(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [f"a_feature_with_a_long_name_{n}" for n in range(6)]
    table = Table(*names)
    table.add_row(*("[b]1[/b]" for _ in names))
    monkeypatch.delenv("COLUMNS", raising=False)
    wide_console().print(table)
    piped = capsys.readouterr().out
    assert all(name in piped for name in names) and piped.count("[b]1[/b]") == 6
    monkeypatch.setenv("COLUMNS", "60")
    assert wide_console().width == 60
