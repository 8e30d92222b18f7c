"""What holds for every test."""

import functools
import gc
import logging
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # as the command does: small matrices, and one order of their sums


@pytest.fixture(autouse=True)
def logging_stays_as_it_was() -> Generator[None]:
    """A program that runs in a test's process logs to this test's stderr, which is closed afterwards."""
    root = logging.getLogger()
    level = root.level
    yield
    root.setLevel(level)
    for handler in [h for h in root.handlers if type(h) is logging.StreamHandler]:
        root.removeHandler(handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=0, help="which schedule of the simulator to replay")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Modules and tests live as long as the process, so the garbage collector leaves them alone. Searching
    them took a sixth of the time of collecting the tests, and more in every full collection later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those that start a stack come first."""
    items.sort(key=lambda item: item.get_closest_marker("e2e") is None)


class _ByFile(LoadScopeScheduling):
    """Side by side (`-n 2`) the tests of a file stay with one process, since they share fixtures; all files
    in which a stack is started are one piece of work, since two stacks are too much for two cores. The
    process that hands out the work collects nothing and knows names only, so it looks for the mark in the
    file."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::")[0]
        return "stack" if _starts_a_stack(self.config.rootpath / file) else file


@functools.cache
def _starts_a_stack(file: Path) -> bool:
    return "mark.e2e" in file.read_text(encoding="utf-8")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One more than cores (`-n auto`): a part of the tests' time is waiting for programs, brokers and time
    limits."""
    return len(os.sched_getaffinity(0)) + 1


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _ByFile:
    return _ByFile(config, log)
