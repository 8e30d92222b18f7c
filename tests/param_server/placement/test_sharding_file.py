"""Plans in TorchRec's terms. Every row and column of a table is in exactly one shard, and a plan that
TorchRec can't express is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from param_server.placement.plan import PlacementPlan, PlannedTable, TablePiece, plan
from param_server.placement.sharding_file import read_sharding, sharding_of
from roostream.errors import ConfigError


def table(name: str, rows: int, dim: int = 4, uniques: float | None = 10.0) -> PlannedTable:
    return PlannedTable(name=name, dim=dim, row_wise_rule=False, rows=rows, uniques=uniques, ids=uniques)


def test_plans_have_the_three_sharding_types_of_torchrec() -> None:
    tables = [table("whole", 9, uniques=1.0), table("rows", 10, uniques=None), table("columns", 6, dim=8)]
    found = sharding_of(plan(tables, 4, columns={"columns": 2}, whole_or_all=True), tables, "sparse.bags")
    assert (found["format"], found["owners"], found["module"]) == (1, 4, "sparse.bags")
    kinds = {name: sharding["sharding_type"] for name, sharding in found["tables"].items()}
    assert kinds == {"whole": "table_wise", "rows": "row_wise", "columns": "column_wise"}
    (shard,) = found["tables"]["whole"]["shards"]
    assert (shard["offsets"], shard["sizes"]) == ([0, 0], [9, 4])
    blocks = found["tables"]["rows"]["shards"]
    assert [s["rank"] for s in blocks] == [0, 1, 2, 3], "TorchRec expects blocks in the order of ranks"
    assert [s["sizes"] for s in blocks] == [[3, 4], [3, 4], [3, 4], [1, 4]]
    halves = found["tables"]["columns"]["shards"]
    assert [(s["offsets"], s["sizes"]) for s in halves] == [([0, 0], [6, 4]), ([0, 4], [6, 4])]
    assert read_sharding(json.dumps(found)) == found


@given(st.integers(1, 40), st.integers(1, 9))
def test_every_row_is_in_one_block(rows: int, owners: int) -> None:
    tables = [table("t", rows, uniques=None)]
    shards = sharding_of(plan(tables, owners, whole_or_all=True), tables)["tables"]["t"]["shards"]
    covered = [row for s in shards for row in range(s["offsets"][0], s["offsets"][0] + s["sizes"][0])]
    assert covered == list(range(rows))


def test_tables_are_cut_over_all_owners_or_not_at_all() -> None:
    tables = [table(f"t{n}", 100, uniques=50 * 1.5**n) for n in range(12)]
    unconstrained, whole_or_all = plan(tables, 8), plan(tables, 8, whole_or_all=True)
    assert any(1 < p.of < 8 for p in unconstrained.pieces), "the constraint must change something"
    assert {p.of for p in whole_or_all.pieces} <= {1, 8} and whole_or_all.predicted_s >= whole_or_all.bound_s
    with pytest.raises(ConfigError):
        sharding_of(unconstrained, tables)


def test_pieces_of_a_width_that_fbgemm_refuses_are_refused_here() -> None:
    for planned, columns in ((table("t", 9, dim=6), {}), (table("t", 9, dim=8), {"t": 4})):
        with pytest.raises(ConfigError):
            sharding_of(plan([planned], 4, columns=columns, whole_or_all=True), [planned])


def test_a_table_with_an_unknown_number_of_rows_is_refused() -> None:
    tables = [table("known", 9), table("new", 0), table("other", 0)]
    with pytest.raises(ConfigError):
        sharding_of(plan(tables, 2, whole_or_all=True), tables)


@pytest.mark.parametrize(
    "changed",
    [
        {"format": 2},
        {"owners": 1},
        {"tables": []},
        {"tables": {"t": {"sharding_type": "grid", "shards": []}}},
        {"module": None},
        {"owners": "2"},
        *(
            {"tables": {"t": {"sharding_type": "row_wise", "shards": shards}}}
            for shards in (
                [],
                [{"rank": -1, "offsets": [0, 0], "sizes": [9, 4]}],
                [{"rank": 2, "offsets": [0, 0], "sizes": [9, 4]}],
                [{"rank": 0, "offsets": [0], "sizes": [9, 4]}],
                [{"rank": 0, "offsets": [0, 0], "sizes": [9, 4, 1]}],
            )
        ),
    ],
    ids=str,
)
def test_an_invalid_sharding_file_is_refused_in_one_sentence(changed: dict[str, Any]) -> None:
    piece = TablePiece(table="t", kind="table", owner=1, number=0, of=1, columns=(0, 4))
    placement = PlacementPlan(
        owners=2,
        pieces=(piece,),
        predicted_s=1,
        bound_s=1,
        time_imbalance=1,
        bytes_imbalance=1,
        time_accuracy="",
    )
    valid = sharding_of(placement, [table("t", 9)])
    with pytest.raises(ConfigError):
        read_sharding(json.dumps({**valid, **changed}), "plan.json")
    with pytest.raises(ConfigError):
        read_sharding("no JSON")
