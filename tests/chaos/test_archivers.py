"""Archivers that rival each other and are killed at any moment: every record is a row once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.warehouse.archive_runs import kill_rivals, places

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1200)]


def test_sixty_kills_with_a_rival_all_the_time_lose_and_double_nothing(tmp_path: Path) -> None:
    assert kill_rivals(tmp_path, kills=60, per_partition=2500, seed=7) == 60
    assert places(tmp_path) == Counter((p, n) for p in (0, 1) for n in range(2500))
