"""Expected loads of placement strategies over many devices, for sampled sets of tables; needs no devices.

A requester's batch asks a table for b · v ids of Zipf frequencies f; the rows that it expects are Σ 1 - (1 -
f)^(b·v): the head row by row, the tail in bins of equal ratio. An owner's load is the sum over requesters.
Against drawn batches the formula was within 2 % (placement-load); of a log it says something with that log's
frequencies. Times follow from assumed constants.

Mixes lie in the ranges of Kurian et al., §VII: 64 to 300 M rows, dim 1 to 380, valency 1 to 230; their
distribution is ours.

Letters: T tables, N owners, H head rows.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np

from param_server.placement.plan import CostModel, PlannedTable, imbalance, piece_cost, plan

VALIDITY = "loads: expected under Zipf, formula within 1 % of draws; times: assumed constants, not measured"
HEAD, BINS = 20_000, 40

Strategy = Literal["row cyclic", "row hash", "row cyclic with offset", "table round robin", "hybrid"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrawnTable:
    """A table of a mix."""

    name: str
    rows: int
    dim: int
    valency: float
    exponent: float


def draw_mix(num_tables: int, seed: int) -> list[DrawnTable]:
    """Log-uniform within the ranges."""
    random = np.random.default_rng(seed)

    def drawn(low: float, high: float) -> np.ndarray:
        return np.exp(random.uniform(np.log(low), np.log(high), num_tables))

    rows, dim = drawn(64, 300e6).astype(np.int64), drawn(8, 380).astype(np.int64)
    valency = np.where(random.random(num_tables) < 0.6, 1.0, drawn(1, 230))
    exponent = random.uniform(0.6, 1.2, num_tables)
    return [
        DrawnTable(
            name=f"t{n}",
            rows=int(rows[n]),
            dim=int(dim[n]),
            valency=float(valency[n]),
            exponent=float(exponent[n]),
        )
        for n in range(num_tables)
    ]


def expected_rows(table: DrawnTable, ids: float) -> tuple[np.ndarray, float]:
    """(float64 [H], number): of one requester's `ids` ids, how often each head row is asked for, and how many
    of the tail."""
    head = min(HEAD, table.rows)
    weight_H = np.arange(1, head + 1, dtype=np.float64) ** -table.exponent
    edges = np.unique(np.geomspace(head + 1, max(table.rows + 1, head + 1), BINS + 1).astype(np.int64))
    size, middle = np.diff(edges).astype(np.float64), (edges[1:] + edges[:-1]) / 2
    weight_tail = middle**-table.exponent
    total = weight_H.sum() + (size * weight_tail).sum()
    asked_H = -np.expm1(ids * np.log1p(-np.minimum(weight_H / total, 1 - 1e-12)))
    asked_tail = -np.expm1(ids * np.log1p(-np.minimum(weight_tail / total, 1 - 1e-12)))
    return asked_H, float((size * asked_tail).sum())


def uniques(table: DrawnTable, ids: float) -> float:
    """Rows that one requester's `ids` ids are expected to ask for."""
    head_H, tail = expected_rows(table, ids)
    return float(head_H.sum()) + tail


def row_loads(table: DrawnTable, ids: float, owners: int, way: Strategy, first: int = 0) -> np.ndarray:
    """float64 [N]: unique rows that one requester asks of each owner when rows are dealt out; the tail is
    even."""
    head_H, tail = expected_rows(table, ids)
    at_H = np.arange(len(head_H))
    if way == "row hash":
        owner_H = np.random.default_rng(first).integers(0, owners, len(head_H))
    else:
        owner_H = (at_H + (first if way == "row cyclic with offset" else 0)) % owners
    return np.bincount(owner_H, head_H, owners) + tail / owners


def simulate(
    mix: list[DrawnTable], owners: int, batch: int, way: Strategy, costs: CostModel | None = None
) -> dict[str, float]:
    """`imbalance` of bytes, `step_s` (predicted) of one way to place all tables; hybrid: the planner's, from
    true statistics."""
    costs = costs or CostModel()
    tables = [_placed(table, batch) for table in mix]
    time_N, bytes_N = np.zeros(owners), np.zeros(owners)
    hybrid = plan(tables, owners, costs) if way == "hybrid" else None
    pieces: dict[str, list[int]] = {}
    for piece in hybrid.pieces if hybrid else ():
        pieces.setdefault(piece.table, []).append(piece.owner)
    for number, (drawn, table) in enumerate(zip(mix, tables, strict=True)):
        asked_N = np.zeros(owners)
        its = pieces.get(drawn.name, [number % owners] if way == "table round robin" else [])
        if len(its) == 1:
            asked_N[its[0]] = table.uniques or 0.0
        elif its and len(its) < owners:
            asked_N[its] = row_loads(drawn, drawn.valency * batch, len(its), "row cyclic with offset", number)
        else:
            dealt: Strategy = "row cyclic with offset" if way == "hybrid" else way
            asked_N = row_loads(drawn, drawn.valency * batch, owners, dealt, number)
        _add(time_N, bytes_N, table, asked_N, costs)
    return {
        "imbalance": imbalance(bytes_N),
        "time imbalance": imbalance(time_N),
        "step_s": float(time_N.max()),
    }


def _placed(table: DrawnTable, batch: int) -> PlannedTable:
    ids = table.valency * batch
    return PlannedTable(
        name=table.name,
        dim=table.dim,
        row_wise_rule=True,
        rows=table.rows,
        uniques=uniques(table, ids),
        ids=float(ids),
    )


def _add(
    time_N: np.ndarray, bytes_N: np.ndarray, table: PlannedTable, asked_N: np.ndarray, costs: CostModel
) -> None:
    """What one table's share at each owner costs; `asked_N`: uniques of one requester, and all owners
    request."""
    total = float(asked_N.sum())
    used = np.flatnonzero(asked_N)
    for owner in used.tolist():
        time_N[owner] += piece_cost(table, len(time_N), costs, rows=asked_N[owner] / total)
    bytes_N += asked_N * len(bytes_N) * (4 * table.dim * 5 + 200)
