"""`roostream demo`: the whole loop with simulated users, shown while it runs."""

from __future__ import annotations

import dataclasses
import logging
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.live import Live

from infra.stack import Stack
from roostream.cli import status_table as table
from roostream.cli.options import FiniteRange
from roostream.cli.output import plain, render_rows
from roostream.cli.stack_commands import (
    build_options,
    check_feature_logs,
    describe_endpoints,
    log_to,
    stack_options,
    stop_on_signals,
)
from roostream.cli.status import StackMonitor
from roostream.errors import mask_secrets
from roostream.runtime.clock import Clock, SystemClock

_SAMPLE_S = 2.0
_PLAIN_LINE_S = 10.0
_LAST_SAMPLE_S = 10.0


@click.command()
@stack_options
@click.option(
    "--seconds",
    type=FiniteRange(min=0, min_open=True),
    envvar="DEMO_SECONDS",
    help="stop after this many seconds; also the environment variable DEMO_SECONDS",
)
@click.option(
    "--rate",
    type=FiniteRange(min=0, min_open=True),
    default=25.0,
    show_default=True,
    help="simulated requests per second",
)
def demo(home: Path, seconds: float | None, rate: float, **given: Any) -> None:
    """Run the whole loop with simulated users and a live table, until Ctrl-C.

    Exit code 1: a program failed for good. With --seconds also: nothing was trained, or one is not ready.

    \b
    Example:
      roostream demo
      DEMO_SECONDS=120 roostream demo --home /tmp/demo
    """
    options = build_options(**given)
    overrides = {**options.overrides, "simulate": {"rate": rate, **options.overrides.get("simulate", {})}}
    options = dataclasses.replace(options, overrides=overrides)
    console = Console()
    stop = stop_on_signals()
    stack = Stack(home, options)
    log_to(stack.home, ConsoleHandler(console, stop.set))
    with stack:
        check_feature_logs(stack.home.root, options.serving_processes)
        stack.start(["all", "simulate"])
        console.print("starting; the first samples are trained in about a minute", highlight=False)
        display = DemoDisplay(stack, console, time.monotonic())
        try:
            display.run(stop, seconds)
            display.sample_last()
        finally:
            display.monitor.close()
        failed = bool(stack.failed()) or (seconds is not None and not display.succeeded)
        summary = display.summary()
        _print(console, str(stack.stop()))
    _print(
        console,
        summary,
        f"`make demo` continues from here; `roostream reset {stack.home.option}` deletes it",
    )
    sys.exit(1 if failed else 0)


def _print(console: Console, *texts: str) -> None:
    """Print without markup: the text may come from programs, paths and records."""
    for text in texts:
        console.print(plain(text), highlight=False, soft_wrap=True, markup=False, emoji=False)


class DemoDisplay:
    """Reads the status of the stack every two seconds, and prints it."""

    def __init__(self, stack: Stack, console: Console, started_s: float) -> None:
        self.stack, self.console, self.started_s = stack, console, started_s
        self.stack_file = stack.home.read_stack() or {}
        self.monitor = StackMonitor(self.stack_file)
        self.first_trained_s: float | None = None
        self._min_trained: float | None = None
        self.last: dict[str, Any] | None = None

    def run(self, stop: threading.Event, seconds: float | None) -> None:
        """Show a live table on a terminal, else one line every ten seconds, until `stop` or for `seconds`."""
        end_s = self.started_s + seconds if seconds else float("inf")
        if self.console.is_terminal:
            with Live(console=self.console, refresh_per_second=2) as live:
                while not self._wait(stop, end_s):
                    live.update(
                        render_rows(
                            table.rows(self.sample()), "Roostream", describe_endpoints(self.stack_file)
                        )
                    )
            return
        next_line_s, endpoints_shown = self.started_s + _PLAIN_LINE_S, False
        while not self._wait(stop, end_s):
            status = self.sample()
            if not endpoints_shown and status["programs"].get("serving", {}).get("state") == "ready":
                endpoints_shown = True
                _print(self.console, *describe_endpoints(self.stack_file))
            if time.monotonic() >= next_line_s:
                next_line_s += _PLAIN_LINE_S
                _print(self.console, table.line(status, time.monotonic() - self.started_s))

    def _wait(self, stop: threading.Event, end_s: float) -> bool:
        """Wait for the next sample; returns whether the demo is over."""
        stopped = stop.wait(max(min(_SAMPLE_S, end_s - time.monotonic()), 0.0))
        return stopped or time.monotonic() >= end_s

    def sample(self) -> dict[str, Any]:
        self.stack_file = self.stack.home.read_stack() or self.stack_file
        return self.record(self.monitor.sample(self.stack_file["programs"]))

    def sample_last(self, clock: Clock | None = None) -> None:
        """Read the status for the summary at the end. While a value is unknown, read it again, for at most
        10 s."""
        clock = clock or SystemClock()
        end_s = clock.monotonic_s() + _LAST_SAMPLE_S
        while _has_unknown(self.sample()) and clock.monotonic_s() < end_s:
            clock.sleep(1.0)

    def record(self, status: dict[str, Any]) -> dict[str, Any]:
        """Keep the status, and print when the first sample of this run was trained."""
        self.last = status
        trained = status["trainer"]["requests"]
        if self.first_trained_s is None and trained is not None:
            # An earlier run may have trained in this home: only growth counts.
            self._min_trained = trained if self._min_trained is None else min(self._min_trained, trained)
            if trained > self._min_trained:
                self.first_trained_s = time.monotonic() - self.started_s
                self.console.print(
                    f"first sample trained {self.first_trained_s:.0f} s after the start", highlight=False
                )
        return status

    @property
    def succeeded(self) -> bool:
        """Whether something was trained and every program is ready now."""
        return self.first_trained_s is not None and self.last is not None and not self.last["troubles"]

    def summary(self) -> str:
        """The last status as plain lines; problems come first."""
        if self.last is None:
            return "ended before the first status"
        ran = f"{time.monotonic() - self.started_s:.0f} s"
        if self.first_trained_s is None:
            ran = f"{ran}; NOTHING WAS TRAINED"
        else:
            ran = f"{ran}, first sample trained after {self.first_trained_s:.0f} s"
        rows = table.rows(self.last)
        rows.insert(len(self.last["troubles"]), ("ran", ran))
        lines = []
        for name, text in rows:
            first, *others = text.split("\n")
            lines += [f"{name:<11} {first}", *(f"{'':<11} {line}" for line in others)]
        return "\n".join(lines)


def _has_unknown(status: dict[str, Any]) -> bool:
    return "unknown" in (status["trainer"]["state"], status["guarantees"]["g1"]["state"])


class ConsoleHandler(logging.Handler):
    """Prints log records of the stack through rich, above a live table. Passwords never reach a log."""

    def __init__(self, console: Console, on_failure: Callable[[], None]) -> None:
        """`on_failure` is called when nothing can be printed any more. The thread that logs goes on: it
        watches or stops the programs."""
        super().__init__(logging.INFO)
        self.console, self.on_failure = console, on_failure

    def emit(self, record: logging.LogRecord) -> None:
        style = {"WARNING": "yellow", "ERROR": "red"}.get(record.levelname, "")
        text = plain(mask_secrets(record.getMessage()))
        try:
            self.console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)
        except (OSError, SystemExit):  # rich raises SystemExit at a broken pipe
            self.on_failure()
