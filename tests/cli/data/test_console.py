"""What takes long has a bar on a terminal, and prints nothing elsewhere."""

from __future__ import annotations

import pytest

from roostream.cli.output import (counted, progress_bar)


def test_items_come_as_they_are_and_nothing_is_printed_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(counted("abc", "letters", 3)) == ["a", "b", "c"]
    assert capsys.readouterr() == ("", "")


def test_on_a_terminal_it_shows_how_many_of_how_many(
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
