"""Tables that nobody watches aren't cut to a terminal's width."""

from __future__ import annotations

import pytest
from rich.table import Table

from roostream.cli.output import wide_console


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
