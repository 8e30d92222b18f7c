"""Shared by the serving tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def built(tmp_path: Path) -> Iterator[Any]:
    """A `serving_cases.Built` with fake rows and without online features."""
    import torch

    from tests.serving.serving_cases import SCHEMA, build
    from tests.serving.serving_fakes import FakeRows

    torch.set_num_threads(1)
    made = build(tmp_path, FakeRows(SCHEMA))
    yield made
    made.close()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """As `built`, one for all tests of a module; they must not change its settings."""
    import torch

    from tests.serving.serving_cases import SCHEMA, build
    from tests.serving.serving_fakes import FakeRows

    torch.set_num_threads(1)
    made = build(tmp_path_factory.mktemp("shared"), FakeRows(SCHEMA))
    yield made
    made.close()


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Builds a process with these rows and settings, and returns (client, what was built)."""
    from tests.serving.serving_cases import SCHEMA, build, client_of
    from tests.serving.serving_fakes import FakeRows

    opened: list[Any] = []

    def open_client(rows: Any = None, **settings: Any) -> Any:
        opened.append(build(tmp_path, rows or FakeRows(SCHEMA), **settings))
        return client_of(opened[-1]), opened[-1]

    yield open_client
    for made in opened:
        made.close()
