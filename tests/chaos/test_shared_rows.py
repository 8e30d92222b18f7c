"""Several serving processes that share the rows of one program: kill -9 of that program and of one of them while they answer."""

from __future__ import annotations

import dataclasses
import json
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from infra.stack import Stack
from tests.e2e.loop_stack import (
    applied,
    check_nothing_lost_or_twice,
    kill_and_resume,
    quick_options,
    rank,
    wait_until,
)

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]

ITEMS = [1, 2, 3, 4]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    options = dataclasses.replace(quick_options(), serving_processes=2)
    with Stack(tmp_path_factory.mktemp("shared"), options) as running:
        running.start(["all", "simulate"])
        running.wait_ready("serving", timeout_s=180)
        running.wait_ready("serving-1", timeout_s=180)
        wait_until("a commit with trained samples", lambda: applied(running) > 50, 240)
        yield running


def readiness(stack: Stack) -> dict[str, Any]:
    with urllib.request.urlopen(f"{stack.endpoints.serving}/readyz", timeout=5) as answer:
        return json.loads(answer.read())


def test_without_the_program_of_the_rows_requests_are_answered_and_its_return_makes_rows_young_again(
    stack: Stack,
) -> None:
    stack.kill("serving-rows")
    until_s = time.monotonic() + 3
    while time.monotonic() < until_s:
        assert len(rank(stack, ITEMS)["order"]) == len(ITEMS)
    wait_until("serving-rows is back", lambda: stack.state("serving-rows") == "ready", 120)

    def is_young() -> bool:
        return all((readiness(stack)["rows_age_s"] or 1e9) < 5 for _ in range(6))

    wait_until("young rows in both processes", is_young, 120)
    assert not rank(stack, ITEMS)["degraded"]


@pytest.mark.parametrize("victim", ["serving-rows", "serving-1"])
def test_g3_the_loop_resumes_by_itself_after_a_kill(stack: Stack, victim: str) -> None:
    assert kill_and_resume(stack, victim, timeout_s=240) >= 50


def test_g1_g2_nothing_is_lost_and_nothing_is_trained_twice(stack: Stack) -> None:
    check_nothing_lost_or_twice(stack)
