"""TorchRec's own sharded collection, run from our plans in two processes: the peer of what a plan says.

Its outputs are ours, and rows and state move from plan to plan to the bit.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from param_server.placement.plan import PlannedTable, plan
from param_server.placement.sharding_file import sharding_of
from tests.trainer.sharded_collections import RANKS, TABLES, bags, first_rows

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

COUNTED = [
    PlannedTable(name=n, dim=d, row_wise_rule=False, rows=r, uniques=1.0, ids=2.0)
    for n, (r, d) in TABLES.items()
]
UNCOUNTED = [PlannedTable(name=n, dim=d, row_wise_rule=False, rows=r) for n, (r, d) in TABLES.items()]


def of_plan(tables: list[PlannedTable], columns: dict[str, int]) -> dict[str, Any]:
    return sharding_of(plan(tables, RANKS, columns=columns, whole_or_all=True), tables)


PLANS = {
    "table": of_plan(COUNTED, {}),
    "row": of_plan(UNCOUNTED, {}),
    "mixed": of_plan([COUNTED[0], UNCOUNTED[1], *COUNTED[2:]], {"c": 2}),
}


def run(folder: Path, first: str, second: str) -> list[dict[str, np.ndarray]]:
    """What each rank found."""
    (folder / "task.json").write_text(json.dumps({"plans": [PLANS[first], PLANS[second]]}))
    ranks = [
        subprocess.Popen([sys.executable, "-m", "tests.trainer.sharded_collections", str(rank), str(folder)])
        for rank in range(RANKS)
    ]
    try:
        assert [rank.wait(240) for rank in ranks] == [0] * RANKS
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return [dict(np.load(folder / f"out-{rank}.npz")) for rank in range(RANKS)]


def sums(rank: int) -> dict[str, np.ndarray]:
    """Our pooling of the same rows (roostream/models/embedding_ops.py), by feature."""
    import torch

    from roostream.models.embedding_ops import pool_bags

    names, lengths, values = bags(0, rank)
    rows, at = first_rows(), 0
    out = {}
    for name, length_B in zip(names, lengths.reshape(len(names), -1), strict=True):
        offset = torch.from_numpy(np.concatenate([[0], np.cumsum(length_B)]))
        index = torch.from_numpy(values[at : at + int(length_B.sum())])
        out[name] = pool_bags(torch.from_numpy(rows[name[0]]), index, offset, torch.ones(len(index))).numpy()
        at += int(length_B.sum())
    return out


def test_the_plans_differ_as_they_should() -> None:
    kinds = {name: [t["sharding_type"] for t in its["tables"].values()] for name, its in PLANS.items()}
    assert kinds == {
        "table": ["table_wise"] * 4,
        "row": ["row_wise"] * 4,
        "mixed": ["table_wise", "row_wise", "column_wise", "table_wise"],
    }


@pytest.mark.parametrize(("first", "second"), [("table", "row"), ("row", "mixed"), ("mixed", "table")])
def test_a_sharded_collection_equals_ours_and_moves_bit_equal(
    first: str, second: str, tmp_path: Path
) -> None:
    found = run(tmp_path, first, second)
    for rank, its in enumerate(found):
        for feature, ours_BD in sums(rank).items():
            np.testing.assert_allclose(its[f"pooled.{rank}.{feature}"], ours_BD, rtol=0, atol=1e-5)
    its = found[0]
    kept = [name.removeprefix("half.") for name in its if name.startswith("half.")]
    assert sorted(kept) == sorted([f"rows.{t}" for t in TABLES] + [f"state.{t}.{STATE}" for t in TABLES])
    for name in kept:
        assert its[f"half.{name}"].tobytes() == its[f"back.{name}"].tobytes(), "put, then taken"
        assert np.isfinite(its[f"stayed.{name}"]).all() and its[f"stayed.{name}"].any()
        assert its[f"stayed.{name}"].tobytes() == its[f"moved.{name}"].tobytes(), "five steps later"
    for table in TABLES:
        assert not np.allclose(its[f"stayed.rows.{table}"], its[f"lost.rows.{table}"], atol=1e-4), (
            "state that is left behind"
        )
    assert all(
        found[0][name].tobytes() == found[1][name].tobytes() for name in its if not name.startswith("pooled")
    )


STATE = "momentum1"
