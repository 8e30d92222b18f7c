"""Our sharding plans, run by TorchRec's sharded collection in two processes.

Its outputs must equal those of our pooling. Rows and optimizer state must move from plan to plan bit for bit.
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
from tests.trainer.sharded_collections import RANKS, TABLES, bags, initial_rows

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

COUNTED = [
    PlannedTable(name=n, dim=d, row_wise_rule=False, rows=r, uniques=1.0, ids=2.0)
    for n, (r, d) in TABLES.items()
]
UNCOUNTED = [PlannedTable(name=n, dim=d, row_wise_rule=False, rows=r) for n, (r, d) in TABLES.items()]


def make_plan(tables: list[PlannedTable], columns: dict[str, int]) -> dict[str, Any]:
    return sharding_of(plan(tables, RANKS, columns=columns, whole_or_all=True), tables)


PLANS = {
    "table": make_plan(COUNTED, {}),
    "row": make_plan(UNCOUNTED, {}),
    "mixed": make_plan([COUNTED[0], UNCOUNTED[1], *COUNTED[2:]], {"c": 2}),
}


def run(folder: Path, first: str, second: str) -> list[dict[str, np.ndarray]]:
    """Run both plans, and return the output of each rank."""
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


def pooled_by_us(rank: int) -> dict[str, np.ndarray]:
    """The same rows pooled by roostream/models/embedding_ops.py, by feature."""
    import torch

    from roostream.models.embedding_ops import pool_bags

    names, lengths, values = bags(0, rank)
    rows, at = initial_rows(), 0
    out = {}
    for name, length_B in zip(names, lengths.reshape(len(names), -1), strict=True):
        offset = torch.from_numpy(np.concatenate([[0], np.cumsum(length_B)]))
        index = torch.from_numpy(values[at : at + int(length_B.sum())])
        out[name] = pool_bags(torch.from_numpy(rows[name[0]]), index, offset, torch.ones(len(index))).numpy()
        at += int(length_B.sum())
    return out


def test_the_plans_use_different_sharding_types() -> None:
    kinds = {name: [t["sharding_type"] for t in plan["tables"].values()] for name, plan in PLANS.items()}
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
    for rank, output in enumerate(found):
        for feature, ours_BD in pooled_by_us(rank).items():
            np.testing.assert_allclose(output[f"pooled.{rank}.{feature}"], ours_BD, rtol=0, atol=1e-5)
    output = found[0]
    tensors = [name.removeprefix("half.") for name in output if name.startswith("half.")]
    assert sorted(tensors) == sorted([f"rows.{t}" for t in TABLES] + [f"state.{t}.{STATE}" for t in TABLES])
    for name in tensors:
        assert output[f"half.{name}"].tobytes() == output[f"back.{name}"].tobytes(), "loaded and read back"
        assert np.isfinite(output[f"stayed.{name}"]).all() and output[f"stayed.{name}"].any()
        assert output[f"stayed.{name}"].tobytes() == output[f"moved.{name}"].tobytes(), (
            "after five more steps"
        )
    for table in TABLES:
        assert not np.allclose(output[f"stayed.rows.{table}"], output[f"lost.rows.{table}"], atol=1e-4), (
            "a move without optimizer state must make a difference"
        )
    assert all(
        found[0][name].tobytes() == found[1][name].tobytes()
        for name in output
        if not name.startswith("pooled")
    )


STATE = "momentum1"
