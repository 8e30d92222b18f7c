"""Placement plans: deterministic, never cheaper than the lower bound, and invalid requests are refused."""

from __future__ import annotations

import dataclasses
import json
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from param_server.placement.plan import (
    CostModel,
    PlannedTable,
    TablePiece,
    bound,
    costs_of,
    imbalance,
    loads,
    piece_cost,
    plan,
)
from roostream.errors import ConfigError, SchemaError

COSTS = CostModel()


def table(
    name: str, uniques: float | None = 100.0, dim: int = 16, rows: int = 1000, *, row_wise: bool = False
) -> PlannedTable:
    ids = None if uniques is None else 2 * uniques
    return PlannedTable(name=name, dim=dim, row_wise_rule=row_wise, rows=rows, uniques=uniques, ids=ids)


def mix(seed: int, count: int) -> list[PlannedTable]:
    random = np.random.default_rng(seed)
    sizes = zip(random.pareto(1.0, count) * 50 + 1, random.integers(4, 200, count), strict=True)
    return [table(f"t{n}", float(uniques), int(dim)) for n, (uniques, dim) in enumerate(sizes)]


def test_the_example_of_the_paper_improves_from_two_to_one() -> None:
    assert imbalance(np.array([0.6, 0.6, 0.0, 0.0])) == pytest.approx(2.0)
    tables = [table("a", dim=8), table("b", dim=8)]
    placement = plan(tables, 4, CostModel(piece_s=0), columns={"a": 2, "b": 2})
    assert placement.bytes_imbalance == pytest.approx(1.0) and sorted(p.owner for p in placement.pieces) == [
        0,
        1,
        2,
        3,
    ]
    assert {p.kind for p in placement.pieces} == {"column"} and {p.columns for p in placement.pieces} == {
        (0, 4),
        (4, 8),
    }


def test_column_pieces_of_a_rule_with_one_state_a_row_are_refused() -> None:
    with pytest.raises(SchemaError, match="table 'a'"):
        plan([table("a", row_wise=True)], 4, columns={"a": 2})
    with pytest.raises(SchemaError, match="16"):
        plan([table("a")], 4, columns={"a": 3})


def test_equal_inputs_give_equal_bytes() -> None:
    first, second = (json.dumps(plan(mix(1, 60), 8).plain()) for _ in range(2))
    assert first == second


@settings(max_examples=15)
@given(st.integers(0, 1000), st.integers(1, 40), st.integers(1, 12), st.booleans())
def test_no_plan_is_below_the_bound_and_every_row_is_somewhere_once(
    seed: int, count: int, owners: int, unknown: bool
) -> None:
    tables = mix(seed, count) + ([table("unknown", None)] if unknown else [])
    placement = plan(tables, owners)
    assert placement.predicted_s >= placement.bound_s * (1 - 1e-9)
    for table_ in tables:
        pieces = [p for p in placement.pieces if p.table == table_.name]
        assert sorted(p.number for p in pieces) == list(range(pieces[0].of)) == list(range(len(pieces)))
        assert len({p.owner for p in pieces}) == len(pieces), "an owner may not hold two pieces of one table"


def test_random_placements_are_not_below_the_bound_either() -> None:
    tables, owners, random = mix(3, 20), 5, np.random.default_rng(0)
    lower_bound = bound(tables, owners, COSTS)
    for _ in range(50):
        owner_of_table = random.integers(0, owners, len(tables)).tolist()
        pieces = [
            TablePiece(table=t.name, kind="table", owner=owner, number=0, of=1, columns=(0, t.dim))
            for t, owner in zip(tables, owner_of_table, strict=True)
        ]
        assert loads(pieces, tables, owners, COSTS)[0].max() >= lower_bound


def test_an_uncounted_table_has_a_fixed_cost_in_the_bound() -> None:
    unknown = [table("u", None), table("v", None)]
    assert bound(unknown, 4, COSTS) == pytest.approx(2 * COSTS.piece_s) == plan(unknown, 4).predicted_s


def test_the_cost_of_an_owner_equals_a_manual_count() -> None:
    planned, costs = table("a"), CostModel()
    memory, network, ids = 400 * (128 + 2 * 192), 400 * 136, 800
    expected_s = memory / 720e9 + network / 100e9 + ids * 0.15e-9 + 0.4e-6
    assert piece_cost(planned, 4, costs) == pytest.approx(expected_s)
    piece = TablePiece(table="a", kind="table", owner=1, number=0, of=1, columns=(0, 16))
    time_N, bytes_N = loads([piece], [planned], 4, costs)
    assert time_N.tolist() == pytest.approx([0, expected_s, 0, 0]) and bytes_N.tolist() == [
        0,
        memory + network,
        0,
        0,
    ]
    assert plan([planned], 1).kind_of("a") == "whole at 0"


def test_equal_pieces_are_within_5_percent_of_the_bound() -> None:
    placement = plan(mix(5, 200), 32)
    assert placement.predicted_s <= 1.05 * placement.bound_s


def test_uncounted_tables_are_spread_over_all_owners_and_named() -> None:
    placement = plan([table("known"), table("new", None)], 4)
    assert placement.kind_of("new") == "4 row pieces" and placement.kind_of("nothing") == "not in it"
    assert placement.warnings == ("no profile of new: spread over all owners",)
    assert "assumed constants" in placement.time_accuracy


def test_rows_that_do_not_fit_are_refused_with_advice() -> None:
    big = [table("a", rows=1 << 24), table("b", rows=1 << 20)]
    with pytest.raises(
        ConfigError,
        match=r"2\.1 GiB together, got 2 of 0\.5; the largest table is 'a' with 2\.0 GiB; 5 owners",
    ):
        plan(big, 2, memory_bytes=1 << 29)
    placement = plan(big, 8, memory_bytes=1 << 29)
    assert np.bincount([p.owner for p in placement.pieces if p.table == "a"], minlength=8).max() == 1


def test_pieces_of_columns_that_fit_into_no_owner_are_refused() -> None:
    """Four owners have room for all rows, but not one of them for half of the table."""
    big = [table("a", rows=1 << 20)]  # 128 MiB with state
    with pytest.raises(ConfigError, match=r"column pieces that fit into 0.0 GiB .* none for a;"):
        plan(big, 4, memory_bytes=40 << 20, columns={"a": 2})
    assert len(plan(big, 4, memory_bytes=40 << 20, columns={"a": 4}).pieces) == 4


def test_tables_that_cost_nothing_can_be_planned() -> None:
    assert plan([table("a", 0.0)], 2, CostModel(piece_s=0.0)).predicted_s == 0.0


def test_constants_of_a_benchmark_state_their_accuracy() -> None:
    measured = CostModel(memory_bytes_s=1e9, error=0.18)
    assert costs_of(json.dumps(dataclasses.asdict(measured))) == measured and "18%" in measured.time_accuracy
    with pytest.raises(ConfigError, match="memory_bytes_s"):
        costs_of('{"speed": 1}', "costs.json")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"memory_bytes_s": 0}, "memory_bytes_s: expected a number above 0, got 0"),
        ({"piece_s": -1}, "piece_s: expected a number of 0 or more, got -1"),
        ({"id_s": True}, "id_s: expected a number of 0 or more, got True"),
        ({"error": "small"}, "error: expected a number of 0 or more, got 'small'"),
        ({"memory_bytes_s": float("nan")}, "memory_bytes_s: expected a number above 0, got nan"),
        ({"id_s": 10**400}, "id_s: expected a number of 0 or more"),
        ([720e9], "something else"),
    ],
    ids=str,
)
def test_invalid_constants_are_refused_in_one_sentence(given: object, message: str) -> None:
    with pytest.raises(ConfigError, match=f"costs.json: .*{re.escape(message)}"):
        costs_of(json.dumps(given), "costs.json")
    assert costs_of(json.dumps({"id_s": 0, "error": None})).id_s == 0
