"""The planner at size, the simulator against draws, and what a profile costs beside a step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np

from benchmarks.question import Work
from benchmarks.workloads import data
from placement.cost import OwnerCosts, PlacedTable
from placement.plan import plan
from placement.profile import Profiler
from placement.simulated_load import DrawnTable, Strategy, draw_mix, simulate, uniques
from roo.decode import Decoder
from roo.lookup import build_lookup

_DRAWS, _IDS = 20, 4096


@contextlib.contextmanager
def planned(num_tables: int, owners: int, seed: int) -> Iterator[Work]:
    """A plan from true statistics, candidates given. Figures: its step and imbalance against the bound."""
    mix = draw_mix(num_tables, seed)
    tables = [
        PlacedTable(
            name=t.name, dim=t.dim, row_wise_rule=True, rows=t.rows, uniques=uniques(t, 256 * t.valency), ids=256 * t.valency
        )
        for t in mix
    ]
    figures: dict[str, float] = {}

    def step() -> None:
        found = plan(tables, owners, OwnerCosts())
        figures["step / bound"] = found.predicted_s / found.bound_s
        figures["imbalance of bytes"] = found.bytes_imbalance

    yield Work(step, 1.0, lambda: dict(figures))


@contextlib.contextmanager
def sorted_alone(num_tables: int, owners: int, seed: int) -> Iterator[Work]:
    """What any longest-first plan does at least: sort as many pieces as there are tables and owners."""
    cost = np.random.default_rng(seed).random(num_tables * owners)
    yield Work(lambda: np.argsort(-cost, kind="stable"), 1.0)


@contextlib.contextmanager
def loaded(num_tables: int, owners: int, way: Strategy, seed: int) -> Iterator[Work]:
    """The simulator's loads of one way to place a mix; times in it are of assumed constants."""
    mix = draw_mix(num_tables, seed)
    figures: dict[str, float] = {}

    def step() -> None:
        figures.update(simulate(mix, owners, 256, way))

    yield Work(step, 1.0, lambda: dict(figures))


@contextlib.contextmanager
def foretold(seed: int) -> Iterator[Work]:
    """Expected unique rows, over tables within the ranges that can be drawn. Figures: beside draws of them."""
    tables = _tables(seed)
    expected: list[float] = []

    def step() -> None:
        expected[:] = [uniques(t, _IDS) for t in tables]

    def figures() -> dict[str, float]:
        random = np.random.default_rng(seed)
        ratios = [rows / _drawn(t, _IDS, random) for rows, t in zip(expected, tables, strict=True)]
        return {"least predicted / drawn": min(ratios), "most predicted / drawn": max(ratios)}

    yield Work(step, 1.0, figures)


@contextlib.contextmanager
def drawn(seed: int) -> Iterator[Work]:
    """The same by drawing ids, as often as what is expected is held against."""
    tables, random = _tables(seed), np.random.default_rng(seed)
    yield Work(lambda: [_drawn(t, _IDS, random) for t in tables], 1.0)


def _tables(seed: int) -> list[DrawnTable]:
    random = np.random.default_rng(seed)
    return [
        DrawnTable(name=f"t{n}", rows=int(rows), dim=8, valency=1.0, exponent=float(exponent))
        for n, (rows, exponent) in enumerate(zip(10 ** random.uniform(2, 6, 14), random.uniform(0.6, 1.2, 14), strict=True))
    ]


def _drawn(table: DrawnTable, ids: int, random: np.random.Generator) -> float:
    cumulated = np.cumsum(np.arange(1, table.rows + 1) ** -table.exponent)
    at = [np.searchsorted(cumulated, random.random(ids) * cumulated[-1]) for _ in range(_DRAWS)]
    return float(np.mean([len(np.unique(rows)) for rows in at]))


@contextlib.contextmanager
def profiled(requests: int) -> Iterator[Work]:
    """A look at one batch of the demo's schema: 3 % of the batches have one."""
    schema = data.demo_schema()
    batch, _ = Decoder(schema, lambda fingerprint: None).decode(data.sample_records(schema, requests, candidates=5))
    lookup, profiler = build_lookup(batch), Profiler(1.0)
    yield Work(lambda: profiler.see(batch, lookup), 1.0)
