"""Rival archivers and compactors are killed at any moment, and every record becomes one row."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from roostream.warehouse.warehouse import Warehouse
from tests.warehouse.archive_runs import PARTITIONS, count_rows, kill_competing_processes, make_compactor

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(2400)]
RECORDS = 2500


def test_a_hundred_kills_with_constant_rivals_lose_and_double_nothing(tmp_path: Path) -> None:
    killed = kill_competing_processes(tmp_path, kills=100, per_partition=RECORDS, seed=7)
    assert killed.archivers > 20 and killed.compactors > 20
    expected = Counter((p, n, PARTITIONS * n + p + 1) for p in range(PARTITIONS) for n in range(RECORDS))
    assert count_rows(tmp_path) == expected
    last = make_compactor(tmp_path)
    for seal in last.due():
        assert last.seal(seal)
    assert count_rows(tmp_path) == expected
    newest = max(file.day for file in Warehouse(tmp_path).samples.snapshot().files)
    assert all(file.sealed for file in Warehouse(tmp_path).samples.snapshot().files if file.day < newest)
