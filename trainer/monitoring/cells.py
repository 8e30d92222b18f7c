"""Many small progressive metrics side by side: named cells, each with sums and a histogram of scores.

One pass over a batch counts it in every cell it belongs to. A cell is bounded (1.1 kB a task), so its AUC is that of scores
rounded to 64 steps of log odds; `ne`, `calibration` are exact.

Letters: C cells, E entries (candidate × cell), T tasks, H histogram steps.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

STEPS = 64
SUMS = ("candidates", "weight", "positive", "predicted", "log_loss", "base_log_loss")
SHADOW, LIVE = (
    "shadow",
    "live",
)  # what is told of: the frozen copy, and the model in training on the same candidates
_WIDEST = 8.0  # log odds beyond which all scores share a step
_EPSILON = 1e-12

Key = tuple[str | int, ...]


class Cells:
    """`add` counts; `report` is of several cells together."""

    def __init__(self, tasks: Sequence[str]) -> None:
        self.tasks, num_tasks = tuple(tasks), len(tasks)
        self.keys: list[Key] = []
        self._number: dict[Key, int] = {}
        self._sums_CTS = np.zeros((0, num_tasks, len(SUMS)))
        self._scores_CTH = np.zeros((0, num_tasks, 2 * STEPS))  # positives, then negatives

    def number_of(self, key: Key) -> int:
        """Of this cell; a new one is empty. Valid until `drop` or `load`."""
        number = self._number.setdefault(key, len(self.keys))
        if number == len(self.keys):
            self.keys.append(key)
            if number == len(self._sums_CTS):
                room = max(16, number)
                self._sums_CTS = np.concatenate([self._sums_CTS, np.zeros((room, *self._sums_CTS.shape[1:]))])
                self._scores_CTH = np.concatenate(
                    [self._scores_CTH, np.zeros((room, *self._scores_CTH.shape[1:]))]
                )
        return number

    def add(self, cell_E: np.ndarray, losses: Losses, candidate_E: np.ndarray) -> None:
        """Entry e counts candidate `candidate_E[e]` in cell `cell_E[e]`."""
        most = len(self.keys)
        for t in range(len(self.tasks)):
            for s, values_B in enumerate(losses.sums_TSB[t]):
                self._sums_CTS[:most, t, s] += np.bincount(cell_E, values_B[candidate_E], most)
            place_E = cell_E * (2 * STEPS) + losses.step_TB[t][candidate_E]
            weight_E = losses.sums_TSB[t][1][candidate_E]
            self._scores_CTH[:most, t] += np.bincount(place_E, weight_E, most * 2 * STEPS).reshape(
                most, 2 * STEPS
            )

    def rates_T(self, key: Key) -> np.ndarray:
        """The base rate so far, as one more positive and one more negative would leave it: 0.5 at first."""
        number = self._number.get(key)
        if number is None:
            return np.full(len(self.tasks), 0.5)
        sums_TS = self._sums_CTS[number]
        return (sums_TS[:, 2] + 1) / (sums_TS[:, 1] + 2)

    def report(self, keys: Iterable[Key]) -> dict[str, dict[str, Any]]:
        """Task → numbers of these cells together; those that aren't known are ignored."""
        numbers = [self._number[key] for key in keys if key in self._number]
        sums_TS, scores_TH = self._sums_CTS[numbers].sum(axis=0), self._scores_CTH[numbers].sum(axis=0)
        return {task: _numbers(sums_TS[t], scores_TH[t]) for t, task in enumerate(self.tasks)}

    def candidates(self, key: Key) -> int:
        return int(self._sums_CTS[self._number[key], 0, 0])

    def drop(self, is_over: Callable[[Key], bool]) -> None:
        """Forget cells."""
        kept = [n for n, key in enumerate(self.keys) if not is_over(key)]
        if len(kept) < len(self.keys):
            self._put([self.keys[n] for n in kept], self._sums_CTS[kept], self._scores_CTH[kept])

    def state(self, mine: Callable[[Key], bool]) -> dict[str, np.ndarray]:
        """Arrays that `load` takes back, of some cells; copies."""
        kept = [n for n, key in enumerate(self.keys) if mine(key)]
        keys = json.dumps({"tasks": self.tasks, "keys": [self.keys[n] for n in kept]}).encode()
        return {
            "keys": np.frombuffer(keys, dtype=np.uint8),
            "sums": self._sums_CTS[kept],
            "scores": self._scores_CTH[kept],
        }

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """Become these cells and those of before, of which the ones that `state` has are replaced. Of other tasks: nothing."""
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


class Losses:
    """What each candidate adds to a cell: once a batch, however many cells it is in."""

    def __init__(
        self, score_BT: np.ndarray, label_BT: np.ndarray, weight_BT: np.ndarray, base_BT: np.ndarray
    ) -> None:
        """`base_BT`: what a predictor that knows only base rates would have said."""
        weight_TB = weight_BT.T.astype(np.float64)
        clipped_TB = np.clip(score_BT.T.astype(np.float64), _EPSILON, 1 - _EPSILON)
        is_positive_TB = label_BT.T > 0
        odds_TB = np.log(clipped_TB / (1 - clipped_TB))
        step_TB = np.clip(((odds_TB + _WIDEST) * (STEPS / (2 * _WIDEST))).astype(np.int64), 0, STEPS - 1)
        self.step_TB = step_TB + STEPS * ~is_positive_TB
        columns = (
            (weight_TB > 0).astype(np.float64),
            weight_TB,
            np.where(is_positive_TB, weight_TB, 0.0),
            weight_TB * clipped_TB,
            -weight_TB * np.log(np.where(is_positive_TB, clipped_TB, 1 - clipped_TB)),
            -weight_TB * np.log(np.where(is_positive_TB, base_BT.T, 1 - base_BT.T)),
        )
        self.sums_TSB = np.stack(columns, axis=1)


def pooled_numbers(told: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The numbers of the same cells at several workers as one, from their `sums`; `auc`, which those don't tell, is None where
    more than one has counted anything."""
    counted = [numbers for numbers in told if numbers["candidates"]] or told[:1]
    if len(counted) == 1:
        return dict(counted[0])
    return {
        **_from_sums([sum(column) for column in zip(*(n["sums"] for n in counted), strict=True)]),
        "auc": None,
    }


def _numbers(sums_S: np.ndarray, scores_H: np.ndarray) -> dict[str, Any]:
    return {**_from_sums(sums_S.tolist()), "auc": _auc(scores_H[:STEPS], scores_H[STEPS:])}


def _from_sums(sums: list[float]) -> dict[str, Any]:
    """`ne` is relative to the base rate of the same candidates, `ne_online` to that known before each of them."""
    candidates, weight, positive, predicted, log_loss, base_log_loss = sums
    rate = positive / weight if weight else None
    entropy = 0.0 if rate in (None, 0.0, 1.0) else -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate))
    return {
        "candidates": int(candidates),
        "base_rate": rate,
        "ne": log_loss / weight / float(entropy) if entropy else None,
        "ne_online": log_loss / base_log_loss if base_log_loss else None,
        "calibration": predicted / positive if positive else None,
        "sums": sums,
    }


def _auc(positive_H: np.ndarray, negative_H: np.ndarray) -> float | None:
    pairs = positive_H.sum() * negative_H.sum()
    below_H = np.cumsum(negative_H) - negative_H
    return float((positive_H * (below_H + 0.5 * negative_H)).sum() / pairs) if pairs else None
