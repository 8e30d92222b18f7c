"""Progressive metrics by window of event time and by slice, beside predictors that know less.

A cell is (partition, what, value, bucket): a window of time is its last buckets. It belongs to its partition and goes into
commits with it, so a rollback takes back what it counted, and what comes again is left out before it is counted (dedupe):
nothing is counted twice. Time is the sample's close time; the window ends at the worker's watermark, and what lies beyond a
bucket ahead of it (a clock was wrong) is in no window.

Letters: R requests, B candidates, E entries, T tasks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from roostream.wire.batch import Batch
from trainer.monitoring.cells import LIVE, SHADOW, Cells, Key, Losses
from trainer.monitoring.slices import OTHER, Slicer

WINDOWS_MS = {"1h": 3_600_000, "1d": 86_400_000}
ALL = "all"
PARTS = 4  # of a window; it is between one and 1 + 1 / PARTS long
SLICE_WINDOW = "1h"
MAX_VALUES = 12  # of a slice, by name; the first that come; the rest as "other"
_FROZEN = "(frozen)"


class Windowed:
    """All partitions of one worker."""

    def __init__(self, tasks: Sequence[str], slicers: Sequence[Slicer] = ()) -> None:
        self.tasks, self.slicers = tuple(tasks), tuple(slicers)
        self.cells = Cells(self.tasks)
        self._values: dict[str, set[str]] = {slicer.name: set() for slicer in self.slicers}
        self._dropped_at = 0

    def count(
        self,
        batch: Batch,
        at_B: np.ndarray,
        score_BT: np.ndarray,
        watermark_ms: int,
        shadow_BT: np.ndarray | None = None,
    ) -> None:
        """Scores of before the labels were used. `at_B`: int64, the partition's number in `place` of each candidate; -1 = not
        counted. `shadow_BT`: those of the frozen copy, for the same candidates."""
        kept_B = np.flatnonzero(at_B >= 0)
        if not len(kept_B):
            return
        self._drop_old(watermark_ms)
        places, place_B = np.unique(at_B[kept_B], return_inverse=True)
        base_BT = np.stack([self.cells.rates_T((place, f"/{ALL}", "", 0)) for place in places.tolist()])[
            place_B
        ]
        score, label, weight = (x[kept_B] for x in (score_BT, batch.label_BT, batch.weight_BT))
        rows = _Counted(
            places.tolist(), place_B, batch.close_ms_R[batch.request_index_B[kept_B]], watermark_ms
        )
        families = [rows.of(what) for what in (*WINDOWS_MS, ALL)]
        for slicer in self.slicers:
            number_B, names = slicer.values(batch)
            told = self._named(slicer.name, number_B[kept_B], names)
            families += [rows.of(what, slicer.name, number_B[kept_B], told) for what in (SLICE_WINDOW, ALL)]
        self._add(families, Losses(score, label, weight, base_BT))
        if shadow_BT is not None:
            for name, scores in ((SHADOW, shadow_BT[kept_B]), (LIVE, score)):
                zero_B, only = np.zeros(len(kept_B), dtype=np.int64), [name]
                pair = [rows.of(what, _FROZEN, zero_B, only) for what in (SLICE_WINDOW, ALL)]
                self._add(pair, Losses(scores, label, weight, base_BT))

    def report(self, watermark_ms: int) -> dict[str, Any]:
        """`windows` {window: {task: numbers}}, `slices` {slice: {value: {window: {task: numbers}}}}, and where a frozen copy is
        scored `shadow` {"shadow" | "live": {window: {task: numbers}}}. Numbers: see `cells`."""
        of: dict[tuple[str, str], dict[str, list[Key]]] = {}
        for key in self.cells.keys:
            _, what, value, bucket = key
            slice_, _, window = str(what).rpartition("/")
            if window == ALL or _is_in(window, int(bucket), watermark_ms):
                of.setdefault((slice_, str(value)), {}).setdefault(window, []).append(key)
        reports = {at: {w: self.cells.report(keys) for w, keys in found.items()} for at, found in of.items()}
        out: dict[str, Any] = {"windows": reports.get(("", ""), {}), "slices": {}}
        for (slice_, value), found in sorted(reports.items()):
            if slice_ == _FROZEN:
                out.setdefault("shadow", {})[value] = found
            elif slice_ in self._values:
                out["slices"].setdefault(slice_, {})[value] = found
        return out

    def state(self, place: int) -> dict[str, np.ndarray]:
        """Of one partition."""
        return self.cells.state(lambda key: key[0] == place)

    def load(self, place: int, state: Mapping[str, np.ndarray]) -> None:
        """Replace one partition by what `state` gave."""
        self.cells.drop(lambda key: key[0] == place)
        self.cells.load(state)
        for _, what, value, _ in self.cells.keys:
            if (slice_ := str(what).rpartition("/")[0]) in self._values and value != OTHER:
                self._values[slice_].add(str(value))

    def _add(self, families: Sequence[_CellEntries], losses: Losses) -> None:
        cells = [
            np.array([self.cells.number_of(key) for key in entries.keys], dtype=np.int64)
            for entries in families
        ]
        cell_E = np.concatenate(
            [numbers[entries.key_E] for numbers, entries in zip(cells, families, strict=True)]
        )
        self.cells.add(cell_E, losses, np.concatenate([entries.candidate_E for entries in families]))

    def _named(self, slice_: str, number_B: np.ndarray, names: Sequence[str]) -> list[str]:
        """Each name, or "other" where MAX_VALUES came before it, however the stream was cut into batches."""
        known = self._values[slice_]
        if len(known) < MAX_VALUES:
            numbers, first_at = np.unique(number_B, return_index=True)
            for number in numbers[np.argsort(first_at)].tolist():
                if len(known) < MAX_VALUES:
                    known.add(names[number])
        return [name if name in known else OTHER for name in names]

    def _drop_old(self, watermark_ms: int) -> None:
        """Once a part of the shortest window."""
        now = watermark_ms // (min(WINDOWS_MS.values()) // PARTS)
        if now != self._dropped_at:
            self._dropped_at = now
            self.cells.drop(
                lambda key: not _is_kept(str(key[1]).rpartition("/")[2], int(key[3]), watermark_ms)
            )


class _CellEntries:
    """Candidates in the cells of one family."""

    def __init__(self, keys: list[Key], key_E: np.ndarray, candidate_E: np.ndarray) -> None:
        self.keys, self.key_E, self.candidate_E = keys, key_E, candidate_E


class _Counted:
    """The candidates of a batch: of which partition, and when."""

    def __init__(
        self, places: list[int], place_B: np.ndarray, time_ms_B: np.ndarray, watermark_ms: int
    ) -> None:
        self.places, self.place_B, self.time_ms_B, self.watermark_ms = (
            places,
            place_B,
            time_ms_B,
            watermark_ms,
        )

    def of(
        self, window: str, slice_: str = "", value_B: np.ndarray | None = None, names: Sequence[str] = ("",)
    ) -> _CellEntries:
        """In the cells of a window and a slice."""
        what = f"{slice_}/{window}"
        bucket_B, candidate_E = np.zeros(len(self.place_B), dtype=np.int64), np.arange(len(self.place_B))
        if window != ALL:
            bucket_B = self.time_ms_B // (WINDOWS_MS[window] // PARTS)
            now = self.watermark_ms // (WINDOWS_MS[window] // PARTS)
            candidate_E = np.flatnonzero((bucket_B <= now + 1) & (bucket_B >= now - PARTS))
            bucket_B = bucket_B - (now - PARTS)
        value_E = np.zeros(len(candidate_E), dtype=np.int64) if value_B is None else value_B[candidate_E]
        code_E = (self.place_B[candidate_E] * len(names) + value_E) * (PARTS + 2) + bucket_B[candidate_E]
        codes, key_E = np.unique(code_E, return_inverse=True)
        first = 0 if window == ALL else now - PARTS
        keys: list[Key] = []
        for code in codes.tolist():
            rest, bucket = divmod(code, PARTS + 2)
            place, value = divmod(rest, len(names))
            keys.append((self.places[place], what, names[value], bucket + first))
        return _CellEntries(keys, key_E, candidate_E)


def _is_in(window: str, bucket: int, watermark_ms: int) -> bool:
    now = watermark_ms // (WINDOWS_MS[window] // PARTS)
    return now - PARTS <= bucket <= now + 1


def _is_kept(window: str, bucket: int, watermark_ms: int) -> bool:
    return window == ALL or _is_in(window, bucket, watermark_ms)
