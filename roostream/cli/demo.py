"""`roostream demo`: the whole loop with simulated users, shown while it runs."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live

from infra.options import StackOptions
from infra.stack import Stack
from roostream.cli import control
from roostream.cli import status_table as table
from roostream.cli.status import Watcher
from roostream.errors import shown

_LOOK_S = 2.0
_PLAIN_LINE_S = 10.0


def run(home: Path, options: StackOptions, seconds: float | None, rate: float) -> int:
    """Until a signal, or for `seconds` after the start; 0, or 1 if a program had to be given up. With `seconds` also 1 if
    nothing was trained, or a program is not ready at the end."""
    overrides = {**options.overrides, "simulate": {"rate": rate, **options.overrides.get("simulate", {})}}
    options = dataclasses.replace(options, overrides=overrides)
    console = Console()
    stop = control.stop_on_signals()
    stack = Stack(home, options)
    control.log_to(stack.home, ConsoleHandler(console))
    with stack:
        stack.start(["all", "simulate"])
        console.print("starting; the first samples are trained about a minute from now", highlight=False)
        show = Show(stack, console, time.monotonic())
        try:
            show.until(stop, seconds)
            show.look()
        finally:
            show.close()
        failed = bool(stack.failed()) or (seconds is not None and not show.is_good())
        summary = show.summary()
        _say(console, str(stack.stop()))
    _say(
        console,
        summary,
        f"`make demo` goes on from here; `roostream reset --home {stack.home.root}` wipes it",
    )
    return 1 if failed else 0


def _say(console: Console, *texts: str) -> None:
    """Text as it is: it may hold what programs, paths and records say."""
    for text in texts:
        console.print(table.plain(text), highlight=False, soft_wrap=True, markup=False, emoji=False)


class Show:
    """Looks at the stack every two seconds, and prints what it sees."""

    def __init__(self, stack: Stack, console: Console, started_s: float) -> None:
        self.stack, self.console, self.started_s = stack, console, started_s
        self.file = stack.home.read_stack() or {}
        self.watcher = Watcher(self.file)
        self.first_trained_s: float | None = None
        self._trained_before: float | None = None
        self.last: dict[str, Any] | None = None

    def until(self, stop: threading.Event, seconds: float | None) -> None:
        end_s = self.started_s + seconds if seconds else float("inf")
        if self.console.is_terminal:
            with Live(console=self.console, refresh_per_second=2) as live:
                while not self._wait(stop, end_s, _LOOK_S):
                    live.update(table.render(self.look(), "Roostream", control.about(self.file)))
        else:
            self._plain(stop, end_s)

    def _plain(self, stop: threading.Event, end_s: float) -> None:
        say_s, told = self.started_s + _PLAIN_LINE_S, False
        while not self._wait(stop, end_s, _LOOK_S):
            status = self.look()
            if not told and status["programs"].get("serving", {}).get("state") == "ready":
                told = True
                _say(self.console, *control.about(self.file))
            if time.monotonic() >= say_s:
                say_s += _PLAIN_LINE_S
                _say(self.console, table.line(status, time.monotonic() - self.started_s))

    def _wait(self, stop: threading.Event, end_s: float, seconds: float) -> bool:
        """Whether to end."""
        return stop.wait(max(min(seconds, end_s - time.monotonic()), 0.0)) or time.monotonic() >= end_s

    def look(self) -> dict[str, Any]:
        self.file = self.stack.home.read_stack() or self.file
        return self.note(self.watcher.look(self.file["programs"]))

    def note(self, status: dict[str, Any]) -> dict[str, Any]:
        """Keep what was seen."""
        self.last = status
        if self.first_trained_s is None and self._trains(self.last["trainer"]["requests"]):
            self.first_trained_s = time.monotonic() - self.started_s
            self.console.print(
                f"first sample trained {self.first_trained_s:.0f} s after the start", highlight=False
            )
        return self.last

    def _trains(self, requests: float | None) -> bool:
        """Whether there are more than the first that were seen: what a home had learned before is no work of this run."""
        if requests is None:
            return False
        before = self._trained_before
        self._trained_before = requests if before is None else min(before, requests)
        return requests > self._trained_before

    def is_good(self) -> bool:
        """Something was trained, and every program is ready now."""
        return self.first_trained_s is not None and self.last is not None and not self.last["troubles"]

    def summary(self) -> str:
        """The last look, as plain lines; what is wrong stands first."""
        if self.last is None:
            return "ended before anything could be seen"
        ran = f"{time.monotonic() - self.started_s:.0f} s"
        if self.first_trained_s is None:
            ran = f"{ran}; NOTHING WAS TRAINED"
        else:
            ran = f"{ran}, first sample trained after {self.first_trained_s:.0f} s"
        bad = len(self.last["troubles"])
        rows = table.rows(self.last)
        rows.insert(bad, ("ran", ran))
        return "\n".join(f"{name:<11} {line}" for name, text in rows for name, line in _lines(name, text))

    def close(self) -> None:
        self.watcher.close()


def _lines(name: str, text: str) -> list[tuple[str, str]]:
    first, *others = text.split("\n")
    return [(name, first), *(("", line) for line in others)]


class ConsoleHandler(logging.Handler):
    """Log lines of the stack through rich, so that they appear above a live table. Passwords never reach a log."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.INFO)
        self.console = console

    def emit(self, record: logging.LogRecord) -> None:
        style = {"WARNING": "yellow", "ERROR": "red"}.get(record.levelname, "")
        text = table.plain(shown(record.getMessage()))
        self.console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)
