"""`roostream demo`: its summary, and whether a run of the demo counts as successful."""

from __future__ import annotations

import errno
import io
import logging
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any, cast

import pytest
from rich.console import Console

from infra.auditor import sums
from infra.home import Home
from infra.stack import Stack
from roostream.cli import status
from roostream.cli.demo import ConsoleHandler, DemoDisplay
from roostream.runtime.clock import FakeClock
from roostream.runtime.scrape import ScrapedMetrics
from trainer.control import scrape_targets


def make_status(requests: float | None, **unhealthy_programs: str) -> dict[str, Any]:
    control = {"workers": 1, "reports": {"worker 0": {"requests": requests}}}
    return {
        "programs": {"worker": {"state": "ready", "pid": 1, "restarts": 0}},
        "troubles": unhealthy_programs,
        "rates": {"impressions": None, "samples": None},
        "joiner": status.joiner_state(None, ScrapedMetrics()),
        "trainer": status.trainer_state(control),
        "workers": status.workers_state(control),
        "rows": {},
        "commit": status.commit_state(control),
        "freshness": status.freshness_state({}),
        "metrics": status.quality(control),
        "click_rate": scrape_targets.click_rate(ScrapedMetrics()),
        "lost_records": {},
        "guarantees": {"g1": sums.of_programs({})},
    }


def make_display(tmp_path: Path, out: io.StringIO) -> DemoDisplay:
    class FakeStack:
        home = Home(tmp_path)

    home = FakeStack.home
    home.make()
    home.write_stack(
        {"kafka": "127.0.0.1:1", "prefix": "", "flink": "http://127.0.0.1:1", "controller": "127.0.0.1:1"}
    )
    return DemoDisplay(cast(Stack, FakeStack()), Console(file=out, width=200), time.monotonic())


@pytest.mark.parametrize(
    ("statuses", "succeeded"),
    [
        ([make_status(None), make_status(0), make_status(64)], True),
        ([make_status(None), make_status(0), make_status(0)], False),
        ([make_status(5000), make_status(5000)], False),  # these requests were trained by the run before
        (
            [make_status(5000), make_status(4900), make_status(4964)],
            True,
        ),  # the worker was restored to its commit first
        ([make_status(0), make_status(64, joiner="failed")], False),
        ([], False),
    ],
)
def test_a_demo_that_trained_nothing_or_lacks_a_program_has_not_succeeded(
    statuses: list[dict[str, Any]], succeeded: bool, tmp_path: Path
) -> None:
    display = make_display(tmp_path, io.StringIO())
    for status_reading in statuses:
        display.record(status_reading)
    assert display.succeeded == succeeded


def test_problems_are_the_first_lines_of_the_summary(tmp_path: Path) -> None:
    display = make_display(tmp_path, io.StringIO())
    assert "ended before" in display.summary()
    display.record(make_status(0, joiner="failed: [/b] no such jar"))
    first, second, *_ = display.summary().split("\n")
    assert first == "NOT READY   joiner: failed: [/b] no such jar"
    assert second.startswith("ran ") and second.endswith("NOTHING WAS TRAINED")


@pytest.mark.parametrize(("unknown_s", "known"), [(0, True), (4, True), (60, False)])
def test_the_summary_waits_a_moment_for_a_reading_that_could_not_be_taken(
    unknown_s: int, known: bool, tmp_path: Path
) -> None:
    clock, display = FakeClock(), make_display(tmp_path, io.StringIO())

    class Monitor:
        def sample(self, programs: object) -> dict[str, Any]:
            status_reading = make_status(64)
            status_reading["trainer"]["state"] = "caught_up"
            status_reading["guarantees"]["g1"]["state"] = (
                "unknown" if clock.monotonic_s() < unknown_s else "yes"
            )
            return status_reading

    display.monitor = cast(Any, Monitor())
    display.stack_file = {"programs": {}}
    display.stack.home.write_stack(display.stack_file)
    display.sample_last(clock)
    assert display.last is not None and (display.last["guarantees"]["g1"]["state"] == "yes") == known
    assert clock.monotonic_s() == min(unknown_s, 10)


def test_markup_and_control_characters_of_log_lines_are_printed_as_text() -> None:
    out = io.StringIO()
    record = logging.LogRecord("x", logging.ERROR, "", 0, "joiner died: [/b] \x1b[31m", None, None)
    ConsoleHandler(Console(file=out, width=200), lambda: None).emit(record)
    assert out.getvalue() == "joiner died: [/b] [31m\n"


class UnwritableFile(io.StringIO):
    """A terminal that was closed, or a file on a full disk."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def write(self, text: str, /) -> int:
        raise OSError(self.number, os.strerror(self.number))


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_log_line_that_cannot_be_shown_ends_the_demo_in_order(number: int) -> None:
    unshown: list[bool] = []
    record = logging.LogRecord("x", logging.INFO, "", 0, "stopping worker", None, None)
    console = Console(file=UnwritableFile(number), width=200)
    ConsoleHandler(console, lambda: unshown.append(True)).emit(record)
    assert unshown


def test_programs_are_watched_after_the_reader_of_the_output_has_ended(tmp_path: Path) -> None:
    script = """
        import logging, pathlib, sys, threading
        from rich.console import Console
        from infra.child import Program
        from infra.supervisor import Supervisor
        from roostream.cli.demo import ConsoleHandler

        stop = threading.Event()
        logging.basicConfig(level="INFO", handlers=[ConsoleHandler(Console(), stop.set)])
        command = (sys.executable, "-I", "-S", "-c", "raise SystemExit(1)")
        with Supervisor() as supervisor:
            supervisor.start([Program(name="dies", command=command, log=pathlib.Path(sys.argv[1]), env={})])
            supervisor.wait(lambda: supervisor.slots["dies"].num_restarts > 1, 20.0)
            supervisor.stop(["dies"])
            print(supervisor.slots["dies"].num_restarts > 1, stop.is_set(), file=sys.stderr)
    """
    reading, writing = os.pipe()
    os.close(reading)
    command = (sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "log"))
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    os.close(writing)
    assert done.stderr.strip() == "True True"
