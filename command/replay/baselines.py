"""What needs no model, measured over the same samples in the same pass: a model that is not above these has learned nothing.

    random  the share of positives so far, for every candidate: an order by chance
    place   positives per view of the place in the list so far
    item    positives per view of the item so far

Each sample is scored by what the samples before it said, in the order in which they were joined, as a trainer would meet them.
Rates are (positives + 10 x share of positives so far) / (views + 10).

Letters: n candidates of a sample, I items, P places, T tasks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from roo import roo_pb2 as pb
from trainer.monitoring.quality import Metrics, Report, summary

NAMES = ("random", "place", "item")
_AT_ONCE = 512
_MOST_PLACES = 1000
_VIEWS_BEFORE = 10.0


class Baselines:
    """Feed each sample once, and no corrections. 16 bytes an item and task."""

    def __init__(self, tasks: Sequence[str], measure_from_ms: int = 0) -> None:
        self.tasks, self._measure_from_ms = tuple(tasks), measure_from_ms
        self.positives_T, self.num_candidates = np.zeros(len(tasks)), 0
        self._place = _Rates(len(tasks), _MOST_PLACES)
        self._item = _Rates(len(tasks), 64)
        self._row_of: dict[int, int] = {}
        self._metrics = {name: {when: Metrics(tasks) for when in ("overall", "measured")} for name in NAMES}
        self._waiting: list[tuple[dict[str, np.ndarray], np.ndarray, int]] = []

    def add(self, sample: pb.Sample) -> None:
        label_nT = np.array(sample.labels, np.float32).reshape(-1, len(self.tasks))
        if len(label_nT) != len(sample.item_ids):
            return  # written by another schema: its labels are others
        shown_n = np.array(sample.positions or range(len(label_nT)), np.int64)
        place_n = np.minimum(shown_n, _MOST_PLACES - 1)
        item_n = np.array([self._row_of.setdefault(i, len(self._row_of)) for i in sample.item_ids], np.int64)
        share_T = (self.positives_T + 1) / (self.num_candidates + 10)
        scores = {
            "random": np.tile(share_T, (len(label_nT), 1)),
            "place": self._place.rates(place_n, share_T),
            "item": self._item.rates(item_n, share_T),
        }
        positive_nT = (label_nT > 0).astype(np.float64)
        self._place.add(place_n, positive_nT)
        self._item.add(item_n, positive_nT)
        self.positives_T += positive_nT.sum(axis=0)
        self.num_candidates += len(label_nT)
        self._waiting.append((scores, label_nT, sample.header.time_ms))
        if len(self._waiting) >= _AT_ONCE:
            self._count()

    def positives(self) -> dict[str, int]:
        """Candidates by label for which it was above 0."""
        return dict(zip(self.tasks, self.positives_T.astype(int).tolist(), strict=True))

    def report(self) -> dict[str, dict[str, Report]]:
        """Baseline → `overall` and `measured`, as in `metrics`."""
        self._count()
        return {name: {when: summary(m.report()) for when, m in both.items()} for name, both in self._metrics.items()}

    def _count(self) -> None:
        waiting, self._waiting = self._waiting, []
        for when, since_ms in (("overall", 0), ("measured", self._measure_from_ms)):
            kept = [w for w in waiting if w[2] >= since_ms]
            if not kept:
                continue
            label_BT = np.concatenate([label_nT for _, label_nT, _ in kept])
            index_B = np.repeat(np.arange(len(kept)), [len(label_nT) for _, label_nT, _ in kept])
            time_ms_R = np.array([time_ms for _, _, time_ms in kept], np.int64)
            for name in NAMES:
                score_BT = np.concatenate([scores[name] for scores, _, _ in kept]).astype(np.float32)
                self._metrics[name][when].update(score_BT, label_BT, np.ones_like(label_BT), index_B, time_ms_R)


class _Rates:
    """Views and positives of numbered things; their number grows."""

    def __init__(self, num_tasks: int, size: int) -> None:
        self._views_I, self._positives_IT = np.zeros(size), np.zeros((size, num_tasks))

    def rates(self, row_n: np.ndarray, share_T: np.ndarray) -> np.ndarray:
        """[n, T]."""
        self._grow(int(row_n.max(initial=0)))
        views_n1 = self._views_I[row_n][:, None]
        return (self._positives_IT[row_n] + _VIEWS_BEFORE * share_T) / (views_n1 + _VIEWS_BEFORE)

    def add(self, row_n: np.ndarray, positive_nT: np.ndarray) -> None:
        np.add.at(self._views_I, row_n, 1.0)
        np.add.at(self._positives_IT, row_n, positive_nT)

    def _grow(self, row: int) -> None:
        if row >= len(self._views_I):
            more = max(row + 1, 2 * len(self._views_I)) - len(self._views_I)
            self._views_I = np.concatenate([self._views_I, np.zeros(more)])
            self._positives_IT = np.concatenate([self._positives_IT, np.zeros((more, self._positives_IT.shape[1]))])
