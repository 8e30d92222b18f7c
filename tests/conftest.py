"""What holds for every test."""

import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # as the command does: small matrices, and one order of their sums


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=0, help="which schedule of the simulator to replay")
