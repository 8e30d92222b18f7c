"""The placement simulator: its formula for unique rows agrees with random draws, and it orders placement
strategies as expected."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.main import find_benchmark
from benchmarks.placement import (
    VALIDITY,
    DrawnTable,
    Strategy,
    draw_mix,
    row_loads,
    simulate,
    uniques,
)


@pytest.mark.parametrize(("rows", "exponent"), [(500, 1.1), (50_000, 0.7)])
def test_expected_rows_are_those_of_draws(rows: int, exponent: float) -> None:
    table, rng = (
        DrawnTable(name="t", rows=rows, dim=8, valency=1.0, exponent=exponent),
        np.random.default_rng(1),
    )
    weight = np.arange(1, rows + 1) ** -exponent
    cumulated = np.cumsum(weight / weight.sum())
    drawn = [len(np.unique(np.searchsorted(cumulated, rng.random(4096)))) for _ in range(30)]
    assert uniques(table, 4096) == pytest.approx(np.mean(drawn), rel=0.02)


@pytest.mark.parametrize("strategy", ["row cyclic", "row hash"])
def test_requests_to_owners_add_up_to_all_requests(strategy: Strategy) -> None:
    table = DrawnTable(name="t", rows=100_000, dim=8, valency=3.0, exponent=1.0)
    assert row_loads(table, 768, 16, strategy, 5).sum() == pytest.approx(uniques(table, 768))


def test_an_offset_per_table_evens_out_hot_first_rows() -> None:
    mix = draw_mix(60, 0)
    cyclic = simulate(mix, 32, 256, "row cyclic")
    offset, tables = (
        simulate(mix, 32, 256, "row cyclic with offset"),
        simulate(mix, 32, 256, "table round robin"),
    )
    assert offset["imbalance"] < cyclic["imbalance"] < tables["imbalance"] and offset["imbalance"] < 1.1
    assert "not measured" in VALIDITY and VALIDITY in find_benchmark("placement-load").interpretation, (
        "the statement is shown beside the figures"
    )


def test_the_plan_is_no_slower_than_rows_everywhere() -> None:
    mix = draw_mix(60, 1)
    hybrid, rows = simulate(mix, 32, 64, "hybrid"), simulate(mix, 32, 64, "row cyclic with offset")
    assert hybrid["step_s"] <= rows["step_s"] * 1.02
