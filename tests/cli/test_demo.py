"""What a demo has seen, and whether it was a good one."""

from __future__ import annotations

import io
import logging
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


def seen(requests: float | None, **unhealthy_programs: str) -> dict[str, Any]:
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


def show_of(tmp_path: Path, out: io.StringIO) -> DemoDisplay:
    class Fake:
        home = Home(tmp_path)

    home = Fake.home
    home.make()
    home.write_stack(
        {"kafka": "127.0.0.1:1", "prefix": "", "flink": "http://127.0.0.1:1", "controller": "127.0.0.1:1"}
    )
    return DemoDisplay(cast(Stack, Fake()), Console(file=out, width=200), time.monotonic())


@pytest.mark.parametrize(
    ("looks", "good"),
    [
        ([seen(None), seen(0), seen(64)], True),
        ([seen(None), seen(0), seen(0)], False),
        ([seen(5000), seen(5000)], False),  # learned by the run before
        ([seen(5000), seen(4900), seen(4964)], True),  # went back to its commit first
        ([seen(0), seen(64, joiner="failed")], False),
        ([], False),
    ],
)
def test_a_demo_that_trained_nothing_or_lacks_a_program_is_not_good(
    looks: list[dict[str, Any]], good: bool, tmp_path: Path
) -> None:
    show = show_of(tmp_path, io.StringIO())
    for look in looks:
        show.record(look)
    assert show.succeeded == good


def test_problems_are_the_first_lines_of_the_summary(tmp_path: Path) -> None:
    show = show_of(tmp_path, io.StringIO())
    assert "ended before" in show.summary()
    show.record(seen(0, joiner="failed: [/b] no such jar"))
    first, second, *_ = show.summary().split("\n")
    assert first == "NOT READY   joiner: failed: [/b] no such jar"
    assert second.startswith("ran ") and second.endswith("NOTHING WAS TRAINED")


@pytest.mark.parametrize(("unknown_s", "known"), [(0, True), (4, True), (60, False)])
def test_the_summary_waits_a_moment_for_a_reading_that_could_not_be_taken(
    unknown_s: int, known: bool, tmp_path: Path
) -> None:
    clock, show = FakeClock(), show_of(tmp_path, io.StringIO())

    class Monitor:
        def sample(self, programs: object) -> dict[str, Any]:
            look = seen(64)
            look["trainer"]["state"] = "caught_up"
            look["guarantees"]["g1"]["state"] = "unknown" if clock.monotonic_s() < unknown_s else "yes"
            return look

    show.monitor = cast(Any, Monitor())
    show.stack_file = {"programs": {}}
    show.stack.home.write_stack(show.stack_file)
    show.sample_last(clock)
    assert show.last is not None and (show.last["guarantees"]["g1"]["state"] == "yes") == known
    assert clock.monotonic_s() == min(unknown_s, 10)


def test_log_lines_are_no_markup_and_move_no_cursor() -> None:
    out = io.StringIO()
    record = logging.LogRecord("x", logging.ERROR, "", 0, "joiner died: [/b] \x1b[31m", None, None)
    ConsoleHandler(Console(file=out, width=200)).emit(record)
    assert out.getvalue() == "joiner died: [/b] [31m\n"
