"""A running stack with several auditors and feature updaters. Their parts add up to one sum, which is unknown
while a part is missing."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import pytest

from infra.stack import Stack
from roostream.cli.status import StackMonitor
from tests.chaos.readings import auc, bad_readings, monitor_of, status_of
from tests.e2e.loop_stack import applied, check_nothing_lost_or_twice, quick_options, wait_until

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    options = dataclasses.replace(quick_options(), num_auditors=2, num_updaters=2)
    with Stack(tmp_path_factory.mktemp("auditors"), options) as running:
        running.start(["all", "simulate"])
        running.wait_ready("serving", timeout_s=240)
        wait_until("a commit with trained samples", lambda: applied(running) > 50, 240)
        yield running


@pytest.fixture(scope="module")
def monitor(stack: Stack) -> Iterator[StackMonitor]:
    found = monitor_of(stack)
    yield found
    found.close()


def audited(stack: Stack, monitor: StackMonitor) -> dict[str, Any]:
    return dict(status_of(stack, monitor)["guarantees"]["g1"])


def wait_for_good_readings(stack: Stack, monitor: StackMonitor) -> None:
    def bad() -> list[str]:
        return bad_readings(stack, monitor)

    wait_until("good readings", lambda: not bad(), 60, bad)
    wait_until("the AUC over all requests", lambda: auc(stack, monitor) is not None, 60)


def test_the_sums_are_unknown_while_an_auditor_is_missing(stack: Stack, monitor: StackMonitor) -> None:
    wait_for_good_readings(stack, monitor)
    complete = audited(stack, monitor)
    stack.stop_program("auditor-1")
    wait_until("an unknown audit", lambda: audited(stack, monitor)["state"] == "unknown", 30)
    assert audited(stack, monitor)["samples"] is None, (
        "a partial count may not be shown as the number of samples"
    )
    stack.start(["auditor-1"])
    wait_for_good_readings(stack, monitor)
    assert audited(stack, monitor)["samples"] >= complete["samples"]


def test_every_reading_is_good_again_after_kills(stack: Stack, monitor: StackMonitor) -> None:
    for victim in ("auditor", "auditor-1", "features", "features-1"):
        stack.kill(victim)
        stack.wait_ready(victim, timeout_s=120)
    time.sleep(1.0)  # samples of one second, so that both auditors read something new
    wait_for_good_readings(stack, monitor)


def test_the_sums_are_those_of_the_topics(stack: Stack, monitor: StackMonitor) -> None:
    """Two auditors count the same as one, and every event had one outcome."""
    check_nothing_lost_or_twice(stack)
    trained = applied(stack)
    wait_until(
        "both auditors at the end of the topics",
        lambda: audited(stack, monitor)["samples"] == trained,
        60,
        lambda: (audited(stack, monitor), trained),
    )
    assert audited(stack, monitor)["state"] == "yes"
