"""A shard process, and the controller that leads it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.param_server.test_shard_process import Lead, Shard


@pytest.fixture
def lead() -> Iterator[Lead]:
    lead = Lead()
    yield lead
    lead.server.stop(0.1)


@pytest.fixture
def shard(tmp_path: Path, lead: Lead) -> Iterator[Shard]:
    shard = Shard(tmp_path, lead)
    yield shard
    if shard.process and shard.process.poll() is None:
        shard.process.kill()
        shard.process.wait(10)
