"""Feature statistics by day: coverage, list lengths, and drift of values since the day before; and alerts
about them.

Computed from batches, in sketches of a fixed size a feature and day. Letters: N rows of a side, F features.
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
"""Alert if coverage is this much lower than the day before."""
MIN_ROWS = 500
"""Days with fewer rows raise no alerts, and no day is compared with them."""
SIDES: tuple[Side, ...] = ("ro", "nro")


class FeatureDays:
    """Call `add` with batches of any days, in any order. A feature that a batch's writer lacks counts as
    missing."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self._days: dict[date, _Day] = {}

    def add(self, day: date, batch: Batch) -> None:
        """Add a batch of this schema, of samples that closed on that day."""
        self._days.setdefault(day, _Day(self.schema)).add(batch)

    def report(self) -> dict[str, dict[str, dict[str, float | None]]]:
        """Day → feature → `rows`, `coverage`, `moved` (PSI against the day before); for lists also `length`
        (mean where present), `longest` and `lengths_moved`. None where there is no value, as on the first
        day."""
        days = sorted(self._days)
        out, before = {}, None
        for day in days:
            current = self._days[day]
            out[day.isoformat()] = dict(current.report(before))
            before = current
        return out


class _Day:
    """Sums of one day; the lists of a side come after its floats."""

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
            moved_F = lengths_F = None
            if before is not None and rows and before.rows[side]:
                moved_F = self.values[side].psi_F(before.values[side])
                lengths_F = self.lengths[side].psi_F(before.lengths[side])
            for i, name in enumerate(self._names[side]):
                figures: dict[str, float | None] = {
                    "rows": rows,
                    "coverage": float(self._present[side][i] / rows) if rows else None,
                    "moved": None if moved_F is None else float(moved_F[i]),
                }
                if (k := i - num_floats) >= 0:
                    there = self._present[side][i]
                    figures["length"] = float(self._entries[side][k] / there) if there else None
                    figures["longest"] = float(self._longest[side][k])
                    figures["lengths_moved"] = None if lengths_F is None else float(lengths_F[k])
                yield name, figures


def alerts(report: Mapping[str, Mapping[str, Mapping[str, float | None]]]) -> list[str]:
    """Sentences about figures of `FeatureDays.report` that need attention, day by day."""
    found: list[str] = []
    before: Mapping[str, Mapping[str, float | None]] = {}
    for day, features in report.items():
        for name, figures in features.items():
            if (figures["rows"] or 0) < MIN_ROWS:
                continue
            was = before.get(name, {})
            found += [
                f"{day}: {name} {what}"
                for what in _wrong(figures, was if (was.get("rows") or 0) >= MIN_ROWS else {})
            ]
        before = features
    return found


def _wrong(figures: Mapping[str, float | None], before: Mapping[str, float | None]) -> Iterator[str]:
    coverage, was = figures["coverage"] or 0.0, before.get("coverage")
    if not coverage:
        yield "is in no row" + (f"; it was in {was:.0%} of rows the day before" if was else "")
    elif was is not None and was - coverage > FELL:
        yield f"is in {coverage:.0%} of rows, after {was:.0%} the day before"
    for key, what in (("moved", "has different values"), ("lengths_moved", "has lists of different lengths")):
        if before and coverage and (moved := figures.get(key) or 0.0) > PSI_SHIFTED:
            yield f"{what} than the day before: PSI {moved:.2f}, above {PSI_SHIFTED:.2f}"
