"""Feature drift: compares sampled batches with earlier ones, in sketches of fixed size.

A window is WINDOW_CANDIDATES sampled candidates. Each full window is compared with the reference and then
added to it; older windows fade by a tenth each. The first window is the first reference.

    psi        population stability index of a feature's values (roostream/wire/feature_histograms.py)
    lengths    the same of a list's length
    coverage   share of rows in which a feature is present
    base_rate  share of positives of a task
    new_ids    share of a table's distinct ids of a batch that no earlier batch had, by two bitmaps

Letters: R requests, B candidates, N rows of a side, F features, U distinct ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from roostream.schema.schema import Schema
from roostream.wire.batch import Batch
from roostream.wire.feature_histograms import REFERENCE_DECAY, Histograms, float_bins, list_bins, mix_ids
from roostream.wire.jagged import Jagged
from roostream.wire.lookup import Lookup

SAMPLED = 8  # one batch in SAMPLED is examined
WINDOW_CANDIDATES = 4096
MAX_FEATURES = 64  # the first ones of the schema; the others are not watched
MAX_TABLES = 16
_BITS = 19
_FULL = 1 << (_BITS - 4)  # ids in a bitmap at which a new one begins


class SeenIds:
    """Ids of one table in two bitmaps (1 MiB). The older bitmap is dropped when the newer one is full."""

    def __init__(self) -> None:
        self._now, self._before = (np.zeros(1 << _BITS, dtype=np.bool_) for _ in range(2))
        self._count = 0

    def add(self, id_U: np.ndarray) -> int:
        """Number of new ids among distinct ones; slightly too low, since ids share bits."""
        at_U = (mix_ids(id_U) >> np.uint64(64 - _BITS)).astype(np.int64)
        new = int((~(self._now[at_U] | self._before[at_U])).sum())
        self._now[at_U] = True
        self._count += new
        if self._count > _FULL:
            self._now, self._before, self._count = np.zeros_like(self._now), self._now, 0
        return new


class DriftDetector:
    """Call `observe` with every batch; `report` is of the last full window, {} before there are two. One
    thread, except `report`."""

    def __init__(
        self, schema: Schema, sampled: int = SAMPLED, window_candidates: int = WINDOW_CANDIDATES
    ) -> None:
        self.schema, self.sampled, self.window_candidates = schema, sampled, window_candidates
        self.num_looked = self._num_offered = 0
        self._names = {
            "ro": [f.name for f in schema.floats("ro")][:MAX_FEATURES],
            "nro": [f.name for f in schema.floats("nro")][:MAX_FEATURES],
            "ro lists": [f.name for f in schema.lists("ro")][:MAX_FEATURES],
            "nro lists": [f.name for f in schema.lists("nro")][:MAX_FEATURES],
        }
        self._tables = {table.id: table.name for table in schema.tables[:MAX_TABLES]}
        self._seen = {name: SeenIds() for name in self._tables.values()}
        self._reference: _Window | None = None
        self._window = _Window(self._names, len(schema.tasks))
        self._report: dict[str, Any] = {}

    def observe(self, batch: Batch, lookup: Lookup) -> None:
        """Examine the batch if it is sampled."""
        self._num_offered += 1
        if (self._num_offered - 1) % self.sampled or not batch.num_candidates:
            return
        self.num_looked += 1
        window = self._window
        window.floats("ro", batch.ro_float_RF, batch.ro_present_RF)
        window.floats("nro", batch.nro_float_BF, batch.nro_present_BF)
        window.lists("ro lists", batch.ro_lists)
        window.lists("nro lists", batch.nro_lists)
        window.weight_T += batch.weight_BT.sum(axis=0)
        window.positive_T += (batch.weight_BT * (batch.label_BT > 0)).sum(axis=0)
        window.candidates += batch.num_candidates
        for part in lookup.stacks.values():
            for id_, name in self._tables.items():
                id_U = part.id_U[part.table_U == id_]
                window.ids[name] = window.ids.get(name, 0) + len(id_U)
                window.new[name] = window.new.get(name, 0) + self._seen[name].add(id_U)
        if window.candidates >= self.window_candidates:
            self._close(window)

    def report(self) -> dict[str, Any]:
        """`coverage`, `psi`, `lengths` {feature: number}, `coverage_before`, `base_rate`, `base_rate_before`
        {task: number}, `new_ids` {table: share}."""
        return self._report

    def _close(self, window: _Window) -> None:
        if self._reference is None:
            self._reference = window
        else:
            before = self._reference
            self._report = {
                "coverage": self._by_feature(window.coverage()),
                "coverage_before": self._by_feature(before.coverage()),
                "psi": self._by_feature(window.psi(before.values)),
                "lengths": self._by_feature(window.lengths_psi(before)),
                "base_rate": self._by_task(window),
                "base_rate_before": self._by_task(before),
                "new_ids": {name: window.new[name] / count for name, count in window.ids.items() if count},
            }
            before.fold(window)
        self._window = _Window(self._names, len(self.schema.tasks))

    def _by_feature(self, numbers: Mapping[str, np.ndarray]) -> dict[str, float]:
        named = [
            pair
            for kind, values in numbers.items()
            for pair in zip(self._names[kind], values.tolist(), strict=True)
        ]
        return dict(named[:MAX_FEATURES])

    def _by_task(self, window: _Window) -> dict[str, float | None]:
        pairs = zip(self.schema.tasks, window.positive_T.tolist(), window.weight_T.tolist(), strict=True)
        return {task: positive / weight if weight else None for task, positive, weight in pairs}


class _Window:
    """Sketches of one window, by kind of feature."""

    def __init__(self, names: Mapping[str, list[str]], num_tasks: int) -> None:
        self.values = {kind: Histograms(len(found)) for kind, found in names.items()}
        self.lengths = {
            kind: Histograms(len(found)) for kind, found in names.items() if kind.endswith("lists")
        }
        self.present = {kind: np.zeros(len(found)) for kind, found in names.items()}
        self.rows = dict.fromkeys(names, 0.0)
        self.weight_T, self.positive_T = np.zeros(num_tasks), np.zeros(num_tasks)
        self.candidates = 0
        self.ids: dict[str, int] = {}
        self.new: dict[str, int] = {}

    def floats(self, kind: str, value_NF: np.ndarray, present_NF: np.ndarray) -> None:
        num_present = len(self.present[kind])
        value_NF, present_NF = value_NF[:, :num_present], present_NF[:, :num_present]
        self._add(kind, float_bins(value_NF, present_NF), present_NF.sum(axis=0), len(value_NF))

    def lists(self, kind: str, lists: Jagged) -> None:
        if num_present := len(self.present[kind]):
            first_NF, length_NF = list_bins(lists, num_present)
            self._add(kind, first_NF, lists.present_KN[:num_present].sum(axis=1), lists.num_rows)
            self.lengths[kind].add(length_NF)

    def coverage(self) -> dict[str, np.ndarray]:
        return {kind: present / max(self.rows[kind], 1) for kind, present in self.present.items()}

    def psi(self, reference: Mapping[str, Histograms]) -> dict[str, np.ndarray]:
        return {kind: histograms.psi_F(reference[kind]) for kind, histograms in self.values.items()}

    def lengths_psi(self, reference: _Window) -> dict[str, np.ndarray]:
        return {kind: histograms.psi_F(reference.lengths[kind]) for kind, histograms in self.lengths.items()}

    def fold(self, window: _Window) -> None:
        """Add a window to this reference."""
        for sketches, other in ((self.values, window.values), (self.lengths, window.lengths)):
            for kind, histograms in sketches.items():
                histograms.fold(other[kind])
        for kind in self.present:
            self.present[kind] = self.present[kind] * REFERENCE_DECAY + window.present[kind]
            self.rows[kind] = self.rows[kind] * REFERENCE_DECAY + window.rows[kind]
        self.weight_T = self.weight_T * REFERENCE_DECAY + window.weight_T
        self.positive_T = self.positive_T * REFERENCE_DECAY + window.positive_T

    def _add(self, kind: str, bin_NF: np.ndarray, present_F: np.ndarray, rows: int) -> None:
        self.values[kind].add(bin_NF)
        self.present[kind] += present_F
        self.rows[kind] += rows
