"""Progressive metrics by window of event time and by slice, compared with the base rate known before.

A cell is (partition, slice/window, value, bucket); a window is the sum of its last buckets. Cells belong to
their partition and are saved in its commits, so a rollback also takes back the counts and nothing is counted
twice. Time is the sample's close time. A window ends at the worker's watermark; samples more than a bucket
ahead of it are in no window.

A cell has a fixed size (1.1 kB a task). Its AUC is that of scores rounded to 64 steps of log odds; `ne` and
`calibration` are exact, and None for labels of an objective other than "event".

Letters: R requests, B candidates, C cells, E entries (candidate × cell), T tasks, H histogram steps.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from roostream.wire.batch import Batch
from trainer.monitoring.ranking_metrics import auc_of_counts, normalized_entropy, ratio
from trainer.monitoring.slices import OTHER, Slicer

WINDOWS_MS = {"1h": 3_600_000, "1d": 86_400_000}
ALL = "all"
PARTS = 4  # buckets of a window; the window covers between 1 and 1 + 1 / PARTS of its length
SLICE_WINDOW = "1h"
MAX_VALUES = 12  # of a slice, by name: the first ones that appear; all others are "other"
_FROZEN = "(frozen)"


class WindowedMetrics:
    """Windowed metrics of all partitions of one worker."""

    def __init__(self, tasks: Sequence[str], build_slicers: Sequence[Slicer] = ()) -> None:
        self.tasks, self.build_slicers = tuple(tasks), tuple(build_slicers)
        self.cells = MetricCells(self.tasks)
        self._values: dict[str, set[str]] = {slicer.name: set() for slicer in self.build_slicers}
        self._dropped_at = 0

    def count(
        self,
        batch: Batch,
        at_B: np.ndarray,
        score_BT: np.ndarray,
        watermark_ms: int,
        shadow_BT: np.ndarray | None = None,
    ) -> None:
        """Count scores made before the labels were used.

        `at_B`: int64, number of each candidate's partition; -1 = not counted. `shadow_BT`: scores of the
        shadow model for the same candidates.
        """
        kept_B = np.flatnonzero(at_B >= 0)
        if not len(kept_B):
            return
        self._drop_old(watermark_ms)
        partitions, partition_B = _distinct(at_B[kept_B])
        rates = [self.cells.rates_T((partition, f"/{ALL}", "", 0)) for partition in partitions.tolist()]
        base_BT = np.stack(rates)[partition_B]
        score, label, weight = (x[kept_B] for x in (score_BT, batch.label_BT, batch.weight_BT))
        time_ms_B = batch.close_ms_R[batch.request_index_B[kept_B]]
        counted = _CountedCandidates(partitions.tolist(), partition_B, time_ms_B, watermark_ms)
        is_event_T = np.array([label.is_probability for label in batch.schema.labels])
        families = [counted.of(what) for what in (*WINDOWS_MS, ALL)]
        for slicer in self.build_slicers:
            number_B, names = slicer.values(batch)
            reports = self._named(slicer.name, number_B[kept_B], names)
            families += [
                counted.of(what, slicer.name, number_B[kept_B], reports) for what in (SLICE_WINDOW, ALL)
            ]
        self._add(families, CandidateLosses(score, label, weight, base_BT, is_event_T))
        if shadow_BT is not None:
            for name, scores in ((SHADOW, shadow_BT[kept_B]), (LIVE, score)):
                zero_B, only = np.zeros(len(kept_B), dtype=np.int64), [name]
                pair = [counted.of(what, _FROZEN, zero_B, only) for what in (SLICE_WINDOW, ALL)]
                self._add(pair, CandidateLosses(scores, label, weight, base_BT, is_event_T))

    def report(self, watermark_ms: int) -> dict[str, Any]:
        """`windows` {window: {task: numbers}}, `slices` {slice: {value: {window: {task: numbers}}}}, and with
        a shadow model `shadow` {"shadow" | "live": {window: {task: numbers}}}."""
        keys_by_slice: dict[tuple[str, str], dict[str, list[Key]]] = {}
        for key in self.cells.keys:
            _, what, value, bucket = key
            slice_, _, window = str(what).rpartition("/")
            if _is_in(window, int(bucket), watermark_ms):
                keys_by_slice.setdefault((slice_, str(value)), {}).setdefault(window, []).append(key)
        reports = {
            at: {w: self.cells.report(keys) for w, keys in found.items()}
            for at, found in keys_by_slice.items()
        }
        out: dict[str, Any] = {"windows": reports.get(("", ""), {}), "slices": {}}
        for (slice_, value), found in sorted(reports.items()):
            if slice_ == _FROZEN:
                out.setdefault("shadow", {})[value] = found
            elif slice_ in self._values:
                out["slices"].setdefault(slice_, {})[value] = found
        return out

    def state(self, partition: int) -> dict[str, np.ndarray]:
        """Arrays of one partition."""
        return self.cells.state(lambda key: key[0] == partition)

    def load(self, partition: int, state: Mapping[str, np.ndarray]) -> None:
        """Replace one partition by a `state`."""
        self.cells.drop(lambda key: key[0] == partition)
        self.cells.load(state)
        for _, what, value, _ in self.cells.keys:
            if (slice_ := str(what).rpartition("/")[0]) in self._values and value != OTHER:
                self._values[slice_].add(str(value))

    def _add(self, families: Sequence[_CellEntries], losses: CandidateLosses) -> None:
        cells = [
            np.array([self.cells.number_of(key) for key in entries.keys], dtype=np.int64)
            for entries in families
        ]
        cell_E = np.concatenate(
            [numbers[entries.key_E] for numbers, entries in zip(cells, families, strict=True)]
        )
        self.cells.add(cell_E, losses, np.concatenate([entries.candidate_E for entries in families]))

    def _named(self, slice_: str, number_B: np.ndarray, names: Sequence[str]) -> list[str]:
        """Each name, or "other" beyond the first MAX_VALUES names, however the stream is cut into batches."""
        known = self._values[slice_]
        if len(known) < MAX_VALUES:
            numbers, first_at = np.unique(number_B, return_index=True)
            for number in numbers[np.argsort(first_at)].tolist():
                if len(known) < MAX_VALUES:
                    known.add(names[number])
        return [name if name in known else OTHER for name in names]

    def _drop_old(self, watermark_ms: int) -> None:
        """Once per bucket of the shortest window."""
        now = watermark_ms // (min(WINDOWS_MS.values()) // PARTS)
        if now != self._dropped_at:
            self._dropped_at = now
            self.cells.drop(lambda key: not _is_in(_window_of(key), int(key[3]), watermark_ms))


class _CellEntries(NamedTuple):
    """The candidates of a batch in the cells of one window and slice."""

    keys: list[Key]
    key_E: np.ndarray
    candidate_E: np.ndarray


class _CountedCandidates(NamedTuple):
    """The counted candidates of a batch, with partition and time."""

    partitions: list[int]
    partition_B: np.ndarray  # int64, into `partitions`
    time_ms_B: np.ndarray
    watermark_ms: int

    def of(
        self, window: str, slice_: str = "", value_B: np.ndarray | None = None, names: Sequence[str] = ("",)
    ) -> _CellEntries:
        """The candidates in the cells of a window and a slice."""
        what = f"{slice_}/{window}"
        bucket_B = np.zeros(len(self.partition_B), dtype=np.int64)
        candidate_E = np.arange(len(self.partition_B))
        if window != ALL:
            bucket_B = self.time_ms_B // (WINDOWS_MS[window] // PARTS)
            now = self.watermark_ms // (WINDOWS_MS[window] // PARTS)
            candidate_E = np.flatnonzero((bucket_B <= now + 1) & (bucket_B >= now - PARTS))
            bucket_B = bucket_B - (now - PARTS)
        value_E = np.zeros(len(candidate_E), dtype=np.int64) if value_B is None else value_B[candidate_E]
        code_E = (self.partition_B[candidate_E] * len(names) + value_E) * (PARTS + 2) + bucket_B[candidate_E]
        codes, key_E = _distinct(code_E)
        first = 0 if window == ALL else now - PARTS
        keys: list[Key] = []
        for code in codes.tolist():
            rest, bucket = divmod(code, PARTS + 2)
            partition, value = divmod(rest, len(names))
            keys.append((self.partitions[partition], what, names[value], bucket + first))
        return _CellEntries(keys, key_E, candidate_E)


def _distinct(code_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """np.unique of small numbers from 0 with its inverse, without a sort."""
    is_used = np.bincount(code_N) > 0
    return np.flatnonzero(is_used), (np.cumsum(is_used) - 1)[code_N]


def _window_of(key: Key) -> str:
    return str(key[1]).rpartition("/")[2]


def _is_in(window: str, bucket: int, watermark_ms: int) -> bool:
    if window == ALL:
        return True
    now = watermark_ms // (WINDOWS_MS[window] // PARTS)
    return now - PARTS <= bucket <= now + 1


STEPS = 64
SUMS = ("candidates", "weight", "positive", "predicted", "log_loss", "base_log_loss")
# Reported for the shadow model, and for the model in training on the same candidates.
SHADOW, LIVE = "shadow", "live"
_WIDEST = 8.0  # scores beyond these log odds share a step
_EPSILON = 1e-12

Key = tuple[str | int, ...]


class MetricCells:
    """Named cells with sums and a score histogram each. `add` counts; `report` sums several cells."""

    def __init__(self, tasks: Sequence[str]) -> None:
        self.tasks, num_tasks = tuple(tasks), len(tasks)
        self.keys: list[Key] = []
        self._number: dict[Key, int] = {}
        self._sums_CTS = np.zeros((0, num_tasks, len(SUMS)))
        self._scores_CTH = np.zeros((0, num_tasks, 2 * STEPS))  # positives, then negatives

    def number_of(self, key: Key) -> int:
        """Number of this cell; a new one is empty. Valid until `drop` or `load`."""
        number = self._number.setdefault(key, len(self.keys))
        if number == len(self.keys):
            self.keys.append(key)
            if number == len(self._sums_CTS):
                self._sums_CTS, self._scores_CTH = (
                    np.concatenate([x, np.zeros((max(16, number), *x.shape[1:]))])
                    for x in (self._sums_CTS, self._scores_CTH)
                )
        return number

    def add(self, cell_E: np.ndarray, losses: CandidateLosses, candidate_E: np.ndarray) -> None:
        """Entry e counts candidate `candidate_E[e]` in cell `cell_E[e]`."""
        num_cells = len(self.keys)
        for t in range(len(self.tasks)):
            for s, values_B in enumerate(losses.sums_TSB[t]):
                self._sums_CTS[:num_cells, t, s] += np.bincount(cell_E, values_B[candidate_E], num_cells)
            histogram_E = cell_E * (2 * STEPS) + losses.step_TB[t][candidate_E]
            weight_E = losses.sums_TSB[t][1][candidate_E]
            self._scores_CTH[:num_cells, t] += np.bincount(
                histogram_E, weight_E, num_cells * 2 * STEPS
            ).reshape(num_cells, 2 * STEPS)

    def rates_T(self, key: Key) -> np.ndarray:
        """Base rate so far with one more positive and one more negative: 0.5 at first."""
        number = self._number.get(key)
        if number is None:
            return np.full(len(self.tasks), 0.5)
        sums_TS = self._sums_CTS[number]
        return (sums_TS[:, 2] + 1) / (sums_TS[:, 1] + 2)

    def report(self, keys: Iterable[Key]) -> dict[str, dict[str, Any]]:
        """Task → metrics of these cells together; unknown cells are ignored."""
        numbers = [self._number[key] for key in keys if key in self._number]
        sums_TS, scores_TH = self._sums_CTS[numbers].sum(axis=0), self._scores_CTH[numbers].sum(axis=0)
        return {task: _numbers(sums_TS[t], scores_TH[t]) for t, task in enumerate(self.tasks)}

    def drop(self, is_over: Callable[[Key], bool]) -> None:
        """Remove cells."""
        kept = [n for n, key in enumerate(self.keys) if not is_over(key)]
        if len(kept) < len(self.keys):
            self._put([self.keys[n] for n in kept], self._sums_CTS[kept], self._scores_CTH[kept])

    def state(self, is_wanted: Callable[[Key], bool]) -> dict[str, np.ndarray]:
        """Copies of some cells, as arrays for `load`."""
        kept = [n for n, key in enumerate(self.keys) if is_wanted(key)]
        keys = json.dumps({"tasks": self.tasks, "keys": [self.keys[n] for n in kept]}).encode()
        return {
            "keys": np.frombuffer(keys, dtype=np.uint8),
            "sums": self._sums_CTS[kept],
            "scores": self._scores_CTH[kept],
        }

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """Add the cells of a `state` and replace those of the same key. A state of other tasks is ignored."""
        named = json.loads(state["keys"].tobytes())
        if tuple(named["tasks"]) != self.tasks or state["sums"].shape[2:] != (len(SUMS),):
            return
        keys = [tuple(key) for key in named["keys"]]
        known = set(keys)
        old = [n for n, key in enumerate(self.keys) if key not in known]
        self._put(
            [*(self.keys[n] for n in old), *keys],
            np.concatenate([self._sums_CTS[old], state["sums"]]),
            np.concatenate([self._scores_CTH[old], state["scores"]]),
        )

    def _put(self, keys: list[Key], sums_CTS: np.ndarray, scores_CTH: np.ndarray) -> None:
        self.keys, self._number = keys, {key: n for n, key in enumerate(keys)}
        self._sums_CTS, self._scores_CTH = sums_CTS, scores_CTH


class CandidateLosses:
    """What each candidate adds to a cell; computed once a batch, whatever the number of its cells."""

    def __init__(
        self,
        score_BT: np.ndarray,
        label_BT: np.ndarray,
        weight_BT: np.ndarray,
        base_BT: np.ndarray,
        is_event_T: np.ndarray | None = None,
    ) -> None:
        """`base_BT`: prediction of a predictor that knows only base rates. `is_event_T`: False for tasks
        whose scores are no probabilities; None = all are."""
        weight_TB = weight_BT.T.astype(np.float64)
        loss_weight_TB = weight_TB if is_event_T is None else weight_TB * is_event_T[:, None]
        clipped_TB = np.clip(score_BT.T.astype(np.float64), _EPSILON, 1 - _EPSILON)
        is_positive_TB = label_BT.T > 0
        odds_TB = np.log(clipped_TB / (1 - clipped_TB))
        step_TB = np.clip(((odds_TB + _WIDEST) * (STEPS / (2 * _WIDEST))).astype(np.int64), 0, STEPS - 1)
        self.step_TB = step_TB + STEPS * ~is_positive_TB
        columns = (
            (weight_TB > 0).astype(np.float64),
            weight_TB,
            np.where(is_positive_TB, weight_TB, 0.0),
            loss_weight_TB * clipped_TB,
            -loss_weight_TB * np.log(np.where(is_positive_TB, clipped_TB, 1 - clipped_TB)),
            -loss_weight_TB * np.log(np.where(is_positive_TB, base_BT.T, 1 - base_BT.T)),
        )
        self.sums_TSB = np.stack(columns, axis=1)


def merge_cell_reports(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the reports of the same cells at several workers. Exact; `auc` is None if one that counted
    anything does not report its `scores`."""
    counted = [numbers for numbers in reports if numbers["candidates"]] or reports[:1]
    if len(counted) == 1:
        return without_scores(counted[0])
    nothing = [0.0] * 2 * STEPS
    sums_S = np.sum([numbers["sums"] for numbers in counted], axis=0)
    scores_H = np.sum([numbers.get("scores", nothing) for numbers in counted], axis=0)
    if not all("scores" in numbers for numbers in counted):
        scores_H[:] = 0.0
    return without_scores(_numbers(sums_S, scores_H))


def without_scores(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of a cell without what only `merge_cell_reports` needs."""
    return {name: value for name, value in numbers.items() if name != "scores"}


def _numbers(sums_S: np.ndarray, scores_H: np.ndarray) -> dict[str, Any]:
    auc = auc_of_counts(scores_H[:STEPS], scores_H[STEPS:])
    return {**_from_sums(sums_S.tolist()), "auc": auc, "scores": scores_H.tolist()}


def _from_sums(sums: list[float]) -> dict[str, Any]:
    """`ne` is relative to the base rate of the same candidates, `ne_online` to the rate known before each of
    them. Log loss and predictions are 0 only for scores that are no probabilities."""
    candidates, weight, positive, predicted, log_loss, base_log_loss = sums
    base_rate = ratio(positive, weight)
    return {
        "candidates": int(candidates),
        "base_rate": base_rate,
        "ne": normalized_entropy(log_loss, weight, base_rate) if log_loss else None,
        "ne_online": ratio(log_loss, base_log_loss),
        "calibration": ratio(predicted, positive) if predicted else None,
        "sums": sums,
    }
