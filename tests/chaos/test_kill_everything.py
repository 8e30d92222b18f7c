"""kill -9 of every process of a running stack, one at a time. The loop resumes, and nothing is lost or
trained twice (guarantees G1 to G3, docs/architecture.md)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from infra.stack import Stack
from tests.e2e.loop_stack import (
    applied,
    check_nothing_lost_or_twice,
    kill_and_resume,
    quick_options,
    wait_until,
)

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(400)]

VICTIMS = (
    "shard-0",
    "shard-1",
    "worker",
    "controller",
    "serving",
    "features",
    "auditor",
    "redis",
    "flink-tm-0",
    "flink-jm",
    "kafka",
)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("chaos"), quick_options()) as running:
        running.start(["all", "simulate"])
        running.wait_ready("serving", timeout_s=120)
        wait_until("a commit with trained samples", lambda: applied(running) > 50, 180)
        yield running


@pytest.mark.parametrize("victim", VICTIMS)
def test_g3_the_loop_resumes_by_itself_after_a_kill(stack: Stack, victim: str) -> None:
    assert kill_and_resume(stack, victim, timeout_s=240) >= 50


def test_g1_g2_nothing_is_lost_and_nothing_is_trained_twice(stack: Stack) -> None:
    check_nothing_lost_or_twice(stack)
