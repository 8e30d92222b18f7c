"""Subjects of the placement benchmarks: the planner at large sizes, the simulator against sampled batches,
the cost of a profile."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np

from benchmarks.common import samples as data
from benchmarks.common.criteo_log import has_criteo, part
from benchmarks.common.criteo_log import schema as criteo_schema
from benchmarks.common.simulated_load import DrawnTable, Strategy, draw_mix, simulate, uniques
from benchmarks.harness.benchmark import Work
from param_server.placement.plan import CostModel, PlannedTable, plan
from param_server.placement.profiles import MIN_BATCHES, Profiler
from roostream.wire.batch import Batch
from roostream.wire.decode import Decoder
from roostream.wire.lookup import Lookup, build_lookup
from roostream.wire.records import Record

_DRAWS, _IDS = 20, 4096


@contextlib.contextmanager
def planned(num_tables: int, owners: int, seed: int) -> Iterator[Work]:
    """A plan from true statistics, candidates given. Figures: its step and imbalance against the bound, where
    pieces of a table are even and where rows are as often asked for as Zipf says."""
    mix = draw_mix(num_tables, seed)
    tables = [
        PlannedTable(
            name=t.name,
            dim=t.dim,
            row_wise_rule=True,
            rows=t.rows,
            uniques=uniques(t, 256 * t.valency),
            ids=256 * t.valency,
        )
        for t in mix
    ]
    figures: dict[str, float] = {}

    def step() -> None:
        found = plan(tables, owners, CostModel())
        figures["step / bound"] = found.predicted_s / found.bound_s
        figures["imbalance of bytes"] = found.bytes_imbalance
        figures["bound_s"] = found.bound_s

    def beside() -> dict[str, float]:
        bound_s = figures["bound_s"]
        uneven = simulate(mix, owners, 256, "hybrid")["step_s"] / bound_s
        return {name: x for name, x in figures.items() if name != "bound_s"} | {
            "step / bound, uneven rows": uneven
        }

    yield Work(step, 1.0, beside)


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
    """Expected unique rows, over tables within the ranges that can be drawn. Figures: beside draws of
    them."""
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
        for n, (rows, exponent) in enumerate(
            zip(10 ** random.uniform(2, 6, 14), random.uniform(0.6, 1.2, 14), strict=True)
        )
    ]


def _drawn(table: DrawnTable, ids: int, random: np.random.Generator) -> float:
    cumulated = np.cumsum(np.arange(1, table.rows + 1) ** -table.exponent)
    at = [np.searchsorted(cumulated, random.random(ids) * cumulated[-1]) for _ in range(_DRAWS)]
    return float(np.mean([len(np.unique(rows)) for rows in at]))


@contextlib.contextmanager
def foreseen(batch: int, most: int) -> Iterator[Work]:
    """Unique rows a batch of Criteo's second three parts, from a profile of four batches of its first three;
    `most`: impressions of a part. Figures: beside what all batches of the second three ask for, over
    tables."""
    first, second = (
        [_looked_up(records) for records in _batches(parts, batch, most)] for parts in ((0, 1, 2), (3, 4, 5))
    )
    seen = Profiler(1.0)
    for n in range(MIN_BATCHES):
        seen.count(*first[n * len(first) // MIN_BATCHES])
    expected: dict[str, float] = {}

    def step() -> None:
        expected.update({feature: its.uniques_of(batch) for feature, its in seen.profiles.items()})

    def figures() -> dict[str, float]:
        later = _counted(second)
        ratios = [expected[feature] / rows for feature, rows in later.items()]
        return {"least foreseen / counted": min(ratios), "most foreseen / counted": max(ratios)}

    yield Work(step, 1.0, figures)


@contextlib.contextmanager
def counted_all(batch: int, most: int) -> Iterator[Work]:
    """The same by looking at every batch."""
    looked_up = [_looked_up(records) for records in _batches((3, 4, 5), batch, most)]
    yield Work(lambda: _counted(looked_up), 1.0)


def _batches(parts: tuple[int, ...], batch: int, most: int) -> list[list[Record]]:
    """Whole ones."""
    records = [record for number in parts for record in part(number, criteo=has_criteo(), most=most)]
    return [records[at : at + batch] for at in range(0, len(records) - batch + 1, batch)]


def _looked_up(records: list[Record]) -> tuple[Batch, Lookup]:
    batch, _ = Decoder(criteo_schema(), lambda fingerprint: None).decode(records)
    return batch, build_lookup(batch)


def _counted(looked_up: list[tuple[Batch, Lookup]]) -> dict[str, float]:
    """Feature → unique rows a batch."""
    all_of_them = Profiler(1.0)
    for batch, lookup in looked_up:
        all_of_them.count(batch, lookup)
    return {feature: its.uniques / its.batches for feature, its in all_of_them.profiles.items()}


@contextlib.contextmanager
def profiled(requests: int) -> Iterator[Work]:
    """A look at one batch of the demo's schema: 3 % of the batches have one."""
    schema = data.demo_schema()
    batch, _ = Decoder(schema, lambda fingerprint: None).decode(
        data.sample_records(schema, requests, candidates=5)
    )
    lookup, profiler = build_lookup(batch), Profiler(1.0)
    yield Work(lambda: profiler.count(batch, lookup), 1.0)
