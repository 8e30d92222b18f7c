"""Fixtures and hooks for all tests."""

import functools
import gc
import logging
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from xdist.scheduler import LoadScopeScheduling

os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # as the command sets it: matrices are small, and one thread gives one order of summation

# No test may depend on the speed of the machine.
hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")


@pytest.fixture(autouse=True)
def restore_logging() -> Generator[None]:
    """Remove the handlers that a program in the test's process adds, because pytest closes their stream after
    the test."""
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
    """Run collection without the garbage collector, and freeze what was collected. Modules and tests live as
    long as the process, so searching them in every collection is wasted time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests that start a stack first."""
    items.sort(key=lambda item: item.get_closest_marker("e2e") is None)


class _FileScheduling(LoadScopeScheduling):
    """With several processes (`-n 2`), the tests of a file stay in one process because they share fixtures.
    All files that start a stack form one unit, because two cores are too few for two stacks. The scheduling
    process collects no tests, so it finds the marker in the file's text."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::")[0]
        return "stack" if _starts_a_stack(self.config.rootpath / file) else file


@functools.cache
def _starts_a_stack(file: Path) -> bool:
    return "mark.e2e" in file.read_text(encoding="utf-8")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """With `-n auto`, use one process more than cores: tests wait for programs, brokers and time limits."""
    return len(os.sched_getaffinity(0)) + 1


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _FileScheduling:
    return _FileScheduling(config, log)
