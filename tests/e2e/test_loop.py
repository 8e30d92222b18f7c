"""The whole loop on real Kafka, Flink, Redis and processes: serve → log → join → train → publish → serve.

All tests share one stack and run in order, each on what the previous tests left.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.stack import Stack
from tests.e2e.loop_stack import (
    applied,
    check_nothing_lost_or_twice,
    kill_and_resume,
    newest,
    produce_garbage,
    quick_options,
    rank,
    unreadable,
    wait_until,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

ITEMS = list(range(1, 9))


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("loop"), quick_options()) as running:
        running.start(["all", "simulate"])
        running.wait_ready("serving", timeout_s=120)
        yield running


def test_a_request_is_answered_before_anything_is_trained(stack: Stack) -> None:
    answer = rank(stack, ITEMS)
    assert len(answer["scores"]) == len(ITEMS)
    assert sorted(answer["order"]) == list(range(len(ITEMS)))


def test_samples_are_trained_and_change_a_served_score(stack: Stack) -> None:
    before = rank(stack, ITEMS)
    wait_until("a commit with trained samples", lambda: applied(stack) > 50, 120)
    wait_until(
        "another served version", lambda: rank(stack, ITEMS)["model_version"] != before["model_version"], 30
    )
    assert rank(stack, ITEMS)["scores"] != before["scores"]


def test_g6_invalid_bytes_stop_no_program(stack: Stack) -> None:
    before = applied(stack)
    count = produce_garbage(stack)
    wait_until("50 more committed samples after the garbage", lambda: applied(stack) >= before + 50, 60)
    wait_until("a dead letter for each invalid record", lambda: unreadable(stack) >= count, 30)
    assert unreadable(stack) == count


@pytest.mark.parametrize("victim", ["shard-0", "worker", "flink-tm-0"])
def test_g3_the_loop_resumes_by_itself_after_a_kill(stack: Stack, victim: str) -> None:
    manifest = newest(stack)
    assert manifest is not None
    assert kill_and_resume(stack, victim) >= 50
    after = newest(stack)
    assert after is not None and (victim.startswith("flink") or after.incarnation > manifest.incarnation)


def test_g1_g2_nothing_is_lost_and_nothing_is_trained_twice(stack: Stack) -> None:
    check_nothing_lost_or_twice(stack)


def test_a_stop_cuts_nothing_off_and_leaves_nothing_running(stack: Stack) -> None:
    pids = [pid for name in stack.supervisor.slots if (pid := stack.pid(name))]
    stopped = stack.stop()
    assert stopped.num_cut_off == 0, stopped
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
