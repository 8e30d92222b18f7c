"""Progress bars and wide tables, on a terminal and in a pipe."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.table import Table

from roostream.cli.main import cli
from roostream.cli.output import clock, counted, print_json, print_rows, progress_bar, wide_console


def test_numbers_that_json_does_not_have_are_null(capsys: pytest.CaptureFixture[str]) -> None:
    nan, infinity = float("nan"), float("inf")
    print_json({"a": nan, "b": [1.5, (infinity, -infinity)], "c": {"d": nan, "e": 2}})
    printed = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert printed == {"a": None, "b": [1.5, [None, None]], "c": {"d": None, "e": 2}}


def test_a_time_beyond_the_calendar_is_a_number() -> None:
    """A producer that sends microseconds writes such times; `inspect batch` must show them."""
    assert clock(1_700_000_000_000) == "2023-11-14 22:13:20"
    assert clock(253_402_300_799_000).startswith("9999-12-31") and clock(0) == "–"
    assert clock(1_700_000_000_000_000) == "1,700,000,000,000,000 ms since 1970"
    assert "since 1970" in clock(float(1 << 62))


def test_without_a_terminal_no_progress_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(counted("abc", "letters", 3)) == ["a", "b", "c"]
    assert capsys.readouterr() == ("", "")


def test_a_terminal_shows_progress_as_done_of_total(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    assert list(counted("abc", "letters", 3)) == ["a", "b", "c"]
    with progress_bar("files") as update:
        update(2, 5)
        update(4, None)
    output = capsys.readouterr()
    assert output.out == "" and "letters" in output.err and "3/3" in output.err and "4/5" in output.err


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


@pytest.mark.parametrize(
    "arguments",
    [("plan", "--requests-per-s", "100"), ("reset", "--home", "no-home", "--yes"), ("plan", "--help")],
    ids=("rich", "print", "click"),
)
def test_output_that_cannot_be_written_is_an_error(arguments: tuple[str, ...], tmp_path: Path) -> None:
    """Whatever writes it, and also if it is written only at the end. Who no longer reads a pipe knows it."""
    command = [sys.executable, "-m", "roostream.cli.main", *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}

    def run(stdout: int) -> tuple[int, str]:
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, stdout=stdout, stderr=subprocess.PIPE, text=True
        )
        return done.returncode, done.stderr

    with Path("/dev/full").open("wb") as full:
        code, error = run(full.fileno())
    assert code == 2 and error.startswith("error: ") and "No space left" in error
    assert "standard output" in error
    assert len(error.splitlines()) == 1

    reading, writing = os.pipe()
    os.close(reading)
    assert run(writing) == (1, "")
    os.close(writing)

    command = ["sh", "-c", '"$@" >&-', "sh", *command]
    code, error = run(subprocess.DEVNULL)
    assert code == 2 and error.startswith("error: standard output is closed")
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize("columns", [20, 40, 120])
def test_a_narrow_terminal_shows_names_and_values(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    print_rows([("closed by", "window 7"), ("dead letters", "none")], "check")
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("closed", "dead", "window", "none"))
    assert ("dead letters" in shown) == (columns > 20)


@pytest.mark.parametrize("closed", ["<&-", "2>&-", "<&- 2>&-"])
def test_commands_run_with_closed_standard_input_and_errors(closed: str, tmp_path: Path) -> None:
    """As services and jobs of cron are started."""
    command = f'"$0" -m roostream.cli.main init shop --requests 100 {closed} && echo $?'
    done = subprocess.run(["sh", "-c", command, sys.executable], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.endswith("\n0\n") and (tmp_path / "shop" / "log.jsonl").exists(), done.stderr
    inputs = "--schema shop/schema.toml --log shop/log.jsonl"
    command = f'"$0" -m roostream.cli.main check {inputs} {closed} && echo $?'
    done = subprocess.run(["sh", "-c", command, sys.executable], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.endswith("\n0\n") and "requests" in done.stdout, done.stderr


def run_on_terminal(*arguments: str) -> tuple[int, str]:
    """Run `roostream` with standard error on a pseudo-terminal. Return the exit code and the terminal's
    content."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "roostream.cli.main", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=slave,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120"},
    )
    os.close(slave)
    shown = b""
    with contextlib.suppress(OSError):  # EIO: the process has closed the terminal
        while data := os.read(master, 1 << 16):
            shown += data
    os.close(master)
    return process.wait(), shown.decode("utf-8", "replace")


def test_long_commands_show_their_progress_on_a_terminal_and_nothing_in_a_pipe(tmp_path: Path) -> None:
    shop = tmp_path / "shop"
    piped = CliRunner().invoke(cli, ["init", str(shop), "--requests", "300"])
    assert piped.exit_code == 0 and piped.stderr == "" and "\x1b" not in piped.stdout
    inputs = ("--schema", str(shop / "schema.toml"), "--log", str(shop / "log.jsonl"))
    for words, arguments in (
        (("reading times", "300/300"), ("check", *inputs)),
        (("sent", "joined", "trained"), ("replay", "jsonl", *inputs, "--engine", "local")),
    ):
        code, shown = run_on_terminal(*arguments)
        assert code == 0, shown
        assert [word for word in words if word not in shown] == [], shown
