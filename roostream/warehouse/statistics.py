"""Features by day: how many rows have them, how long their lists are, how far their values moved since the day before; and what
of it somebody should look at. Of batches, in sketches of a fixed size a feature and day.

Letters: N rows of a side, F features.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import date

import numpy as np

from roostream.schema.schema import Schema
from roostream.wire.batch import Batch
from roostream.wire.block import Side
from roostream.wire.feature_histograms import PSI_SHIFTED, Histograms, float_bins, list_bins

FELL = 0.1
"""Coverage that is lower than the day before by so much is told."""
MIN_ROWS = 500
"""Rows of a day below which nothing is told of it: a few say little."""
SIDES: tuple[Side, ...] = ("ro", "nro")


class FeatureDays:
    """`add` batches of any days, in any order; a feature of the schema that a batch's writer lacked is missing there."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self._days: dict[date, _Day] = {}

    def add(self, day: date, batch: Batch) -> None:
        """A batch of this schema, of samples that closed on that day."""
        self._days.setdefault(day, _Day(self.schema)).add(batch)

    def report(self) -> dict[str, dict[str, dict[str, float | None]]]:
        """Day → feature → `rows`, `coverage`; of lists `length` (mean of those that are there), `longest`, `lengths_moved`; and
        `moved`, the psi against the day before. None where there is nothing to say, as on the first day."""
        days = sorted(self._days)
        out, before = {}, None
        for day in days:
            its = self._days[day]
            out[day.isoformat()] = dict(its.report(before))
            before = its
        return out


class _Day:
    """Sums of one day; lists of a side stand behind its floats."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self.rows: dict[Side, int] = dict.fromkeys(SIDES, 0)
        self._names = {side: [f.name for f in (*schema.floats(side), *schema.lists(side))] for side in SIDES}
        self._present = {side: np.zeros(len(names)) for side, names in self._names.items()}
        self.values = {side: Histograms(len(names)) for side, names in self._names.items()}
        lists = {side: len(schema.lists(side)) for side in SIDES}
        self.lengths = {side: Histograms(n) for side, n in lists.items()}
        self._entries, self._longest = ({side: np.zeros(n) for side, n in lists.items()} for _ in range(2))

    def add(self, batch: Batch) -> None:
        sides = {
            "ro": (batch.ro_float_RF, batch.ro_present_RF, batch.ro_lists),
            "nro": (batch.nro_float_BF, batch.nro_present_BF, batch.nro_lists),
        }
        for side in SIDES:
            value_NF, present_NF, lists = sides[side]
            if not len(value_NF):
                continue
            first_NF, length_NF = list_bins(lists)
            self.rows[side] += len(value_NF)
            self._present[side] += np.concatenate([present_NF.sum(axis=0), lists.present_KN.sum(axis=1)])
            self.values[side].add(np.concatenate([float_bins(value_NF, present_NF), first_NF], axis=1))
            self.lengths[side].add(length_NF)
            self._entries[side] += lists.lengths_KN.sum(axis=1)
            self._longest[side] = np.maximum(self._longest[side], lists.lengths_KN.max(axis=1))

    def report(self, before: _Day | None) -> Iterator[tuple[str, dict[str, float | None]]]:
        for side in SIDES:
            rows, num_floats = self.rows[side], len(self.schema.floats(side))
            compared = before is not None and bool(rows and before.rows[side])
            moved_F = (
                self.values[side].psi_F(before.values[side]) if before is not None and compared else None
            )
            lengths_F = (
                self.lengths[side].psi_F(before.lengths[side]) if before is not None and compared else None
            )
            for i, name in enumerate(self._names[side]):
                told: dict[str, float | None] = {
                    "rows": rows,
                    "coverage": float(self._present[side][i] / rows) if rows else None,
                    "moved": None if moved_F is None else float(moved_F[i]),
                }
                if (k := i - num_floats) >= 0:
                    there = self._present[side][i]
                    told["length"] = float(self._entries[side][k] / there) if there else None
                    told["longest"] = float(self._longest[side][k])
                    told["lengths_moved"] = None if lengths_F is None else float(lengths_F[k])
                yield name, told


def alerts(report: Mapping[str, Mapping[str, Mapping[str, float | None]]]) -> list[str]:
    """What of `FeatureDays.report` somebody should look at, in sentences, day after day."""
    found: list[str] = []
    before: Mapping[str, Mapping[str, float | None]] = {}
    for day, features in report.items():
        for name, its in features.items():
            if (its["rows"] or 0) < MIN_ROWS:
                continue
            found += [f"{day}: {name} {what}" for what in _wrong(its, before.get(name, {}))]
        before = features
    return found


def _wrong(its: Mapping[str, float | None], before: Mapping[str, float | None]) -> Iterator[str]:
    coverage, was = its["coverage"] or 0.0, before.get("coverage")
    if not coverage:
        yield "is in no row" + (f"; it was in {was:.0%} of them the day before" if was else "")
    elif was is not None and was - coverage > FELL:
        yield f"is in {coverage:.0%} of rows, after {was:.0%} the day before"
    for key, what in (("moved", "has other values"), ("lengths_moved", "has lists of other lengths")):
        if coverage and (moved := its.get(key) or 0.0) > PSI_SHIFTED:
            yield f"{what} than the day before: psi {moved:.2f}, above {PSI_SHIFTED:.2f}"
