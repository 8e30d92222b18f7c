"""A process pool keeps the requested number of copies of a program running."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from infra.child import Program, StopRank
from infra.process_pool import ProcessPool

WAIT_S = 20.0
SLOW_TO_END = (
    "import signal, sys, time; "
    "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.5), sys.exit(0))); time.sleep(600)"
)


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[ProcessPool]:
    def copy(number: int) -> Program:
        name = f"copy-{number}"
        command = (sys.executable, "-I", "-S", "-c", SLOW_TO_END)
        return Program(
            name=name, command=command, log=tmp_path / name, env=dict(os.environ), stop_rank=StopRank.FEATURES
        )

    created = ProcessPool(copy)
    yield created
    created.close()


def wait_until(condition: Callable[[], bool]) -> None:
    ends_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < ends_s
        time.sleep(0.02)


def test_a_pool_grows_shrinks_without_waiting_and_ends(pool: ProcessPool) -> None:
    pool.resize(3)
    wait_until(lambda: len(pool.pids()) == 3)
    time.sleep(0.2)  # until the copies have installed their signal handlers
    began_s = time.monotonic()
    pool.resize(1)
    assert time.monotonic() - began_s < 0.5 and len(pool.members()) == 3, "two copies are still ending"
    wait_until(lambda: pool.members() == ["copy-0"])
    pool.close()
    pool.close()
    assert pool.pids() == []


def test_a_removed_copy_can_be_started_again(pool: ProcessPool) -> None:
    pool.resize(2)
    wait_until(lambda: len(pool.pids()) == 2)
    before = pool.pids()[1]
    time.sleep(0.2)
    pool.resize(1)

    def is_back() -> bool:
        time.sleep(0.3)
        pool.resize(2)
        return len(pool.pids()) == 2 and pool.pids()[1] != before

    wait_until(is_back)


def test_a_copy_that_dies_is_started_again(pool: ProcessPool) -> None:
    pool.resize(1)
    wait_until(lambda: len(pool.pids()) == 1)
    (before,) = pool.pids()
    os.kill(before, signal.SIGKILL)
    wait_until(lambda: pool.pids() not in ([], [before]))
