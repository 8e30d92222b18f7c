"""The readings of a stack after kills of its broker: unknown while Kafka is away, and soon good again."""

from __future__ import annotations

import dataclasses
import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from infra.stack import Stack
from roostream.cli.status import StackMonitor
from tests.e2e.loop_stack import applied, quick_options, wait_until

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]

_GOOD_AGAIN_S = 30.0


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    options = dataclasses.replace(quick_options(), num_workers=2)
    with Stack(tmp_path_factory.mktemp("broker"), options) as running:
        running.start(["all", "simulate"])
        running.wait_ready("serving", timeout_s=240)
        wait_until("a commit with trained samples", lambda: applied(running) > 50, 240)
        yield running


def test_every_reading_is_good_again_within_30_s_of_every_restart_of_the_broker(stack: Stack) -> None:
    described = stack.home.read_stack()
    assert described is not None
    monitor, trained = StackMonitor(described), 0
    try:
        for _ in range(3):
            wait_until("good readings before the kill", lambda: not bad_readings(stack, monitor), 120)
            stack.kill("kafka")
            stack.wait_ready("kafka", timeout_s=180)
            wait_until("good readings", lambda: not bad_readings(stack, monitor), _GOOD_AGAIN_S)
            now = status_of(stack, monitor)["trainer"]["trained"]
            assert now >= trained, "a restart untrains nothing that was committed"
            trained = now
        wait_until("the AUC of both workers", lambda: quality(stack, monitor)["auc"] is not None, 60)
    finally:
        monitor.close()


def bad_readings(stack: Stack, monitor: StackMonitor) -> list[str]:
    """What page, `status` and `audit` do not know now."""
    status, page = status_of(stack, monitor), page_of(stack)
    readings = {
        "status: ends of the topics": status["topics"],
        "status: lag": status["trainer"]["lag_records"] is not None,
        "status: state of training": status["trainer"]["state"] not in (None, "unknown"),
        "page: lag": page["training"]["lag_records"] is not None,
        "page: state of training": page["training"]["state"] != "unknown",
        "audit": status["guarantees"]["g1"]["state"] in ("yes", "waiting"),
    }
    return [name for name, is_good in readings.items() if not is_good]


def status_of(stack: Stack, monitor: StackMonitor) -> dict[str, Any]:
    described = stack.home.read_stack()
    assert described is not None
    return monitor.sample(described["programs"])


def quality(stack: Stack, monitor: StackMonitor) -> dict[str, Any]:
    status, page = status_of(stack, monitor), page_of(stack)["training"]["metrics"]
    return status["metrics"] if page.get("auc") is not None else {"auc": None}


def page_of(stack: Stack) -> dict[str, Any]:
    described = stack.home.read_stack()
    assert described is not None
    url = str(described["programs"]["controller"]["metrics"]).removesuffix("/metrics")
    with urllib.request.urlopen(f"{url}/status.json", timeout=10) as answer:
        return dict(json.loads(answer.read())["page"])
