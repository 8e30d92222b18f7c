"""Fixtures of the serving tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Any]:
    """An in-process serving with fake rows and without online features."""
    import torch

    from tests.serving.serving_cases import SCHEMA, build_serving
    from tests.serving.serving_fakes import FakeRows

    torch.set_num_threads(1)
    serving = build_serving(tmp_path, FakeRows(SCHEMA))
    yield serving
    serving.close()


@pytest.fixture(scope="module")
def shared_serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """An in-process serving that all tests of a module share. Tests must not change its settings."""
    import torch

    from tests.serving.serving_cases import SCHEMA, build_serving
    from tests.serving.serving_fakes import FakeRows

    torch.set_num_threads(1)
    serving = build_serving(tmp_path_factory.mktemp("shared"), FakeRows(SCHEMA))
    yield serving
    serving.close()


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """A function that builds a serving with given rows and settings, and returns (HTTP client, serving)."""
    from tests.serving.serving_cases import SCHEMA, build_serving, make_http_client
    from tests.serving.serving_fakes import FakeRows

    opened: list[Any] = []

    def open_client(rows: Any = None, **settings: Any) -> Any:
        opened.append(build_serving(tmp_path, rows or FakeRows(SCHEMA), **settings))
        return make_http_client(opened[-1]), opened[-1]

    yield open_client
    for serving in opened:
        serving.close()
