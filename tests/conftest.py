"""What holds for every test."""

import os

import pytest
from xdist.scheduler import LoadGroupScheduling

os.environ.setdefault("OMP_NUM_THREADS", "1")  # as the command does: small matrices, and one order of their sums


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=0, help="which schedule of the simulator to replay")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those that start a stack come first and, side by side (`-n 2`), stay with one process: two stacks are too much for two
    cores."""
    for item in items:
        if item.get_closest_marker("e2e"):
            item.add_marker(pytest.mark.xdist_group("stack"))
    items.sort(key=lambda item: item.get_closest_marker("e2e") is None)


class _ByFile(LoadGroupScheduling):
    """The tests of a file stay together, since they share fixtures; those of a group, too."""

    def _split_scope(self, nodeid: str) -> str:
        scope: str = super()._split_scope(nodeid)
        return scope.split("::")[0]


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> _ByFile:
    return _ByFile(config, log)
