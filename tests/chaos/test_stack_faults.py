"""Lasting faults on one running stack with two workers: programs stopped for half a minute, a checkpoint
store that is unmounted or read-only, second processes of programs, and a random schedule of all of them.

STOPPED_S=120 sets how long a program is stopped. FAULTS=20 FAULTS_SEED=3 sets the random schedule.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import time
from collections.abc import Callable, Iterator

import pytest

from infra.stack import Stack
from roostream.errors import RoostreamError
from roostream.runtime.program import REFUSED_CODE
from tests.chaos.readings import bad_readings, monitor_of
from tests.chaos.stack_faults import (
    control_status,
    exit_of_second_process,
    read_only,
    stack_with_volume,
    stopped,
    unmounted,
)
from tests.chaos.test_kill_everything import VICTIMS
from tests.e2e.loop_stack import applied, check_nothing_lost_or_twice, newest, quick_options, wait_until

STOPPED_S = float(os.environ.get("STOPPED_S", "30"))
AWAY_S = 20.0
FAULTS = int(os.environ.get("FAULTS", "5"))
SEED = int(os.environ.get("FAULTS_SEED", "1"))
RESUME_S = 240.0

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600 + STOPPED_S + 150 * FAULTS)]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    options = dataclasses.replace(quick_options(), num_workers=2)
    with stack_with_volume(tmp_path_factory.mktemp("faults"), options) as running:
        running.start(["all", "simulate"])
        running.wait_ready("serving", timeout_s=240)
        wait_until("a commit with trained samples", lambda: applied(running) > 50, 240)
        yield running


def wait_until_training_resumes(stack: Stack, before: int) -> None:
    """Wait until training has continued by itself."""
    wait_until(
        f"more than {before} + 50 committed samples",
        lambda: applied(stack) >= before + 50,
        RESUME_S,
        lambda: (applied(stack), control_status(stack)),
    )


@pytest.mark.parametrize("name", ["shard-0", "worker", "flink-tm-0", "controller"])
def test_g3_the_loop_resumes_after_a_program_was_stopped_and_continued(stack: Stack, name: str) -> None:
    before = applied(stack)
    with stopped(stack, name):
        time.sleep(STOPPED_S)
    wait_until_training_resumes(stack, max(before, applied(stack)))


def test_an_unmounted_store_is_awaited_and_its_mount_point_stays_empty(stack: Stack) -> None:
    before = newest(stack)
    assert before is not None
    with unmounted(stack):
        wait_until(
            "the controller reports that the store is unavailable",
            lambda: control_status(stack).get("away"),
            60,
            lambda: control_status(stack),
        )
        time.sleep(AWAY_S)
        assert newest(stack) is None
    trained = applied(stack)
    assert trained >= sum(part.metrics["requests"] for part in before.workers.values())
    wait_until_training_resumes(stack, trained)
    assert not control_status(stack).get("away")


def test_programs_that_start_while_the_store_is_not_mounted_wait_for_it(stack: Stack) -> None:
    before = applied(stack)
    with unmounted(stack):
        for name in ("controller", "shard-0", "worker-1"):
            stack.kill(name)
        time.sleep(AWAY_S)
    assert applied(stack) >= before
    wait_until_training_resumes(stack, before)


def test_a_store_that_is_read_only_for_a_while_aborts_commits_with_the_reason(stack: Stack) -> None:
    with read_only(stack):
        before = applied(stack)
        wait_until(
            "a commit is aborted because the store is read-only",
            lambda: "Read-only" in control_status(stack).get("abort_reason", ""),
            60,
            lambda: control_status(stack),
        )
        time.sleep(AWAY_S)
        assert applied(stack) == before
    wait_until_training_resumes(stack, before)


@pytest.mark.parametrize("name", ["worker", "shard-0"])
def test_a_second_process_of_an_index_ends_with_a_message_and_training_continues(
    stack: Stack, name: str
) -> None:
    before, incarnation = applied(stack), control_status(stack)["incarnation"]
    pid = stack.pid(name)
    code, output = exit_of_second_process(stack, name, 120)
    assert code == REFUSED_CODE and "two processes run as" in output, (code, output)
    assert control_status(stack)["incarnation"] == incarnation and stack.pid(name) == pid
    wait_until_training_resumes(stack, before)


def schedule(seed: int, number: int) -> list[tuple[str, float, str]]:
    """(fault, duration in seconds, program) of each fault in order."""
    rng = random.Random(seed)
    kinds = ("kill", "stop", "unmount", "read-only", "second process")
    programs = (*VICTIMS, "worker-1")
    stateful_programs = ("worker", "worker-1", "shard-0", "shard-1")
    drawn = [(rng.choice(kinds), rng.uniform(3.0, 25.0)) for _ in range(number)]
    return [
        (kind, seconds, rng.choice(stateful_programs if kind == "second process" else programs))
        for kind, seconds in drawn
    ]


def test_a_random_schedule_of_faults_is_survived(stack: Stack) -> None:
    """Two faults overlap: during each fault, another program is killed."""
    print(f"FAULTS={FAULTS} FAULTS_SEED={SEED}")
    before, rng = applied(stack), random.Random(f"kills {SEED}")
    for kind, seconds, name in schedule(SEED, FAULTS):
        print(f"{kind} {name} for {seconds:.0f} s", flush=True)
        with contextlib.ExitStack() as fault:
            _begin(fault, stack, kind, name)
            time.sleep(seconds / 2)
            with contextlib.suppress(RoostreamError):  # it is already down
                stack.kill(rng.choice(VICTIMS))
            time.sleep(seconds / 2)
    wait_until_training_resumes(stack, before)
    assert stack.failed() == []
    monitor = monitor_of(stack)
    try:
        wait_until(
            "every reading is known",
            lambda: not bad_readings(stack, monitor),
            120,
            lambda: bad_readings(stack, monitor),
        )
    finally:
        monitor.close()


def _begin(fault: contextlib.ExitStack, stack: Stack, kind: str, name: str) -> None:
    wait_until(f"{name} is ready", lambda: stack.state(name) == "ready", 120, lambda: stack.state(name))
    begin: dict[str, Callable[[], object]] = {
        "kill": lambda: stack.kill(name),
        "stop": lambda: fault.enter_context(stopped(stack, name)),
        "unmount": lambda: fault.enter_context(unmounted(stack)),
        "read-only": lambda: fault.enter_context(read_only(stack)),
        "second process": lambda: exit_of_second_process(stack, name, 180),
    }
    with contextlib.suppress(RoostreamError):  # the program has just died
        begin[kind]()


def test_g1_g2_faults_that_last_lose_nothing_and_train_nothing_twice(stack: Stack) -> None:
    check_nothing_lost_or_twice(stack, within_s=300)
