"""Baselines without a model, measured on the same samples. A model that is not better has learned nothing.

    random  the share of positives so far for every candidate: a random order
    place   positives per view of the position so far
    item    positives per view of the item so far
    recent  the same with exponential decay: an event one hour ago counts 0.72, three hours ago 0.37
    linear  a logistic regression on the floats

Each sample is scored with the samples before it, in the order in which they were joined.
Rates are (positives + 10 x share of positives so far) / (views + 10).

The inputs of the regression are the floats of candidate and request after the schema's transforms, indicators
of missing values, and the length of the list. Each is passed through asinh and standardized by its moments so
far. The optimizer is Adagrad (Duchi et al.
2011) with one step per batch of samples.

Letters: n candidates of a sample, B candidates of a batch, D inputs, I items, P positions, T tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from roostream.runtime.event_time import SteppedEventTime
from roostream.schema.schema import Registry, Schema
from roostream.wire import roo_pb2 as pb
from roostream.wire import transform
from roostream.wire.batch import Batch
from roostream.wire.decode import Decoder
from roostream.wire.records import MAX_WEIGHT, Record
from trainer.monitoring.progressive_metrics import Metrics, Report, ScoredBatch, summarize
from trainer.monitoring.verdict import RULES, PairedRequests, request_scores

NAMES = ("random", *RULES)
_AT_ONCE = 512
_STEP = 16  # samples in a step of `linear`
_RECENT_MS = 3 * 3_600_000.0
_MAX_PLACES = 1000
_VIEWS_BEFORE = 10.0


class Baselines:
    """Call `add` once for each sample, not for corrections. Memory: 48 bytes per item and task."""

    def __init__(
        self,
        schema: Schema,
        measure_from_ms: int = 0,
        paired: PairedRequests | None = None,
        *,
        max_items: int = 0,
        keep_metrics: bool = True,
        registry: Registry | None = None,
    ) -> None:
        """`paired` gets the scores of each request. `max_items`: beyond it, the less viewed half of the items
        is forgotten; 0 = never. Without `keep_metrics`, `report` counts nothing. `registry`: the schemas that
        wrote samples; None = `schema` alone."""
        self._max_items, self._keep_metrics = max_items, keep_metrics
        self.tasks, self._measure_from_ms, self._paired = schema.tasks, measure_from_ms, paired
        tasks = self.tasks
        self._num_positives_T, self._positives_T, self._candidates_T = np.zeros((3, len(tasks)))
        self._place = _Rates(len(tasks), _MAX_PLACES)
        self._item, self._recent = _Rates(len(tasks), 64), _DecayingRates(len(tasks), 64)
        self._own, self._registry = schema.fingerprint, registry
        self._linear, self._to_learn = LogisticRegression(schema, registry), list[Record]()
        self._row_of: dict[int, int] = {}
        self._metrics = {name: {when: Metrics(tasks) for when in ("overall", "measured")} for name in NAMES}
        self._waiting: list[_Scored] = []

    def add(self, sample: pb.Sample, record: Record) -> None:
        """`record` is the record of the sample. A sample that the decoder would refuse is ignored."""
        label_nT = self._labels(sample)
        if label_nT is None or len(sample.positions) not in (0, len(label_nT)):
            return
        if not 0 <= sample.weight <= MAX_WEIGHT:
            return
        shown_n = np.array(sample.positions or range(len(label_nT)), np.int64)
        place_n = np.minimum(shown_n, _MAX_PLACES - 1)
        if self._max_items and len(self._row_of) > self._max_items:
            self._forget_items()
        item_n = np.array([self._row_of.setdefault(i, len(self._row_of)) for i in sample.item_ids], np.int64)
        share_T = (self._positives_T + 1) / (self._candidates_T + 10)
        scores = {
            "random": np.tile(share_T, (len(label_nT), 1)),
            "place": self._place.rates(place_n, share_T),
            "item": self._item.rates(item_n, share_T),
            "recent": self._recent.rates_at(sample.header.time_ms, item_n, share_T),
        }
        weight = sample.weight or 1.0
        positive_nT, known_nT = (weight * x for x in (label_nT > 0, ~np.isnan(label_nT)))
        self._place.add(place_n, known_nT, positive_nT)
        self._item.add(item_n, known_nT, positive_nT)
        self._recent.add(item_n, known_nT, positive_nT)
        self._num_positives_T += (label_nT > 0).sum(axis=0)
        self._positives_T += positive_nT.sum(axis=0)
        self._candidates_T += known_nT.sum(axis=0)
        scores["linear"] = scores["random"]  # until `_learn` has computed it
        self._waiting.append(
            _Scored(
                scores,
                label_nT,
                weight,
                sample.header.time_ms,
                (record.partition, record.offset),
                sample.sample_id,
            )
        )
        self._to_learn.append(record)
        if len(self._to_learn) >= _STEP:
            self._learn()
        if len(self._waiting) >= _AT_ONCE:
            self._count()

    def _labels(self, sample: pb.Sample) -> np.ndarray | None:
        """float32 [n, T]; NaN for a label that the schema of the sample does not have. None: the sample has
        another number of labels than its schema, or than this one if its schema is not known."""
        writer = None
        if self._registry is not None and sample.header.schema != self._own:
            writer = self._registry(sample.header.schema)
        tasks = self.tasks if writer is None else writer.tasks
        if len(sample.labels) != len(sample.item_ids) * len(tasks):
            return None
        written_nT = np.array(sample.labels, np.float32).reshape(-1, len(tasks))
        if tasks == self.tasks:
            return written_nT
        label_nT = np.full((len(written_nT), len(self.tasks)), np.nan, np.float32)
        for t, task in enumerate(self.tasks):
            if task in tasks:
                label_nT[:, t] = written_nT[:, tasks.index(task)]
        return label_nT

    def _forget_items(self) -> None:
        items = list(self._row_of)
        views_I = self._recent.views(len(items))
        kept = np.sort(np.argsort(views_I, kind="stable")[len(items) // 2 :])
        self._row_of = {items[row]: n for n, row in enumerate(kept.tolist())}
        self._item.keep(kept)
        self._recent.keep(kept)

    def positives(self) -> dict[str, int]:
        """Label → number of candidates with a value above 0."""
        return dict(zip(self.tasks, self._num_positives_T.astype(int).tolist(), strict=True))

    def weighted_counts(self) -> dict[str, tuple[float, float]]:
        """Label → sums of the sampling weights of its positives, and of all candidates with this label."""
        sums = zip(self._positives_T.tolist(), self._candidates_T.tolist(), strict=True)
        return dict(zip(self.tasks, sums, strict=True))

    def report(self) -> dict[str, dict[str, Report]]:
        """Baseline → `overall` and `measured`, like the `metrics` of a report."""
        self._count()
        return {
            name: {when: summarize(m.report()) for when, m in both.items()}
            for name, both in self._metrics.items()
        }

    def _learn(self) -> None:
        found = self._linear.learn(self._to_learn)
        for scored in self._waiting[-len(self._to_learn) :]:
            if (score_nT := found.get(scored.position)) is not None:
                scored.scores["linear"] = score_nT
        self._to_learn = []

    def _count(self) -> None:
        if self._to_learn:
            self._learn()
        waiting, self._waiting = self._waiting, []
        if waiting and self._paired is not None:
            self._compare(waiting, self._paired)
        if not self._keep_metrics:
            return
        for when, since_ms in (("overall", 0), ("measured", self._measure_from_ms)):
            kept = [w for w in waiting if w.time_ms >= since_ms]
            if not kept:
                continue
            label_BT = np.concatenate([w.label_nT for w in kept])
            index_B = np.repeat(np.arange(len(kept)), [len(w.label_nT) for w in kept])
            time_ms_R = np.array([w.time_ms for w in kept], np.int64)
            weight_R = np.array([w.weight for w in kept])
            weight_BT = ~np.isnan(label_BT) * weight_R[index_B][:, None]
            for name in NAMES:
                score_BT = np.concatenate([w.scores[name] for w in kept]).astype(np.float32)
                columns = (score_BT, np.nan_to_num(label_BT), weight_BT, index_B, time_ms_R)
                self._metrics[name][when].update(ScoredBatch(*columns, importance_R=weight_R))

    def _compare(self, waiting: Sequence[_Scored], paired: PairedRequests) -> None:
        waiting = [w for w in waiting if not np.isnan(w.label_nT[:, 0]).any()]
        if not waiting:
            return
        index_B = np.repeat(np.arange(len(waiting)), [len(w.label_nT) for w in waiting])
        positive_B = np.concatenate([w.label_nT[:, 0] for w in waiting]) > 0
        scores = {
            name: request_scores(
                np.concatenate([w.scores[name][:, 0] for w in waiting]).astype(np.float32),
                positive_B,
                index_B,
                len(waiting),
            )
            for name in RULES
        }
        paired.add_rules([w.sample_id for w in waiting], scores)


class _Scored(NamedTuple):
    """A scored sample that is not yet in the metrics."""

    scores: dict[str, np.ndarray]
    label_nT: np.ndarray
    weight: float
    time_ms: int
    position: tuple[int, int]  # partition, offset
    sample_id: int


class _Rates:
    """Counts of views and positives, a row for each item or place; rows are added when they are first used.
    A view counts for the tasks whose label is known."""

    def __init__(self, num_tasks: int, size: int) -> None:
        self._views_IT, self._positives_IT = np.zeros((2, size, num_tasks))

    def rates(self, row_n: np.ndarray, share_T: np.ndarray) -> np.ndarray:
        """Positives per view of these rows, [n, T]. `share_T`: the rate of a row without views; it counts as
        much as _VIEWS_BEFORE views."""
        self._grow(int(row_n.max(initial=0)))
        return (self._positives_IT[row_n] + _VIEWS_BEFORE * share_T) / (self._views_IT[row_n] + _VIEWS_BEFORE)

    def add(self, row_n: np.ndarray, known_nT: np.ndarray, positive_nT: np.ndarray) -> None:
        np.add.at(self._views_IT, row_n, known_nT)
        np.add.at(self._positives_IT, row_n, positive_nT)

    def views(self, num_rows: int) -> np.ndarray:
        """The views of the first rows, [num_rows]."""
        self._grow(num_rows - 1)
        return self._views_IT[:num_rows].max(axis=1)

    def keep(self, row_n: np.ndarray) -> None:
        """Keep these rows only, in this order: row_n[0] becomes row 0."""
        self._grow(int(row_n.max(initial=0)))
        self._views_IT, self._positives_IT = self._views_IT[row_n], self._positives_IT[row_n]

    def _grow(self, row: int) -> None:
        if row >= len(self._views_IT):
            more = max(row + 1, 2 * len(self._views_IT)) - len(self._views_IT)
            added_IT = np.zeros((more, self._views_IT.shape[1]))
            self._views_IT = np.concatenate([self._views_IT, added_IT])
            self._positives_IT = np.concatenate([self._positives_IT, added_IT])


class _DecayingRates(_Rates):
    """Rates with exponential decay, applied in steps of 1/64 of the time constant. One wrong time, which
    would end all later decay, is not followed."""

    def __init__(self, num_tasks: int, size: int) -> None:
        super().__init__(num_tasks, size)
        self._now_ms, self._newest = 0, SteppedEventTime()

    def rates_at(self, time_ms: int, row_n: np.ndarray, share_T: np.ndarray) -> np.ndarray:
        """As `rates`, at this time. A time before the newest one counts as the newest."""
        self._newest.event(time_ms, int(_RECENT_MS))
        passed_ms = self._newest.newest_ms - self._now_ms
        if passed_ms > _RECENT_MS / 64:
            left = np.exp(-passed_ms / _RECENT_MS) if self._now_ms else 1.0
            self._views_IT *= left
            self._positives_IT *= left
            self._now_ms = self._newest.newest_ms
        return self.rates(row_n, share_T)


_RATE = 0.2
_MAX_DEVIATIONS = 5.0
_LOGITS = 15.0


class LogisticRegression:
    """Online logistic regression on the floats of one schema. Samples of schemas that are not in `registry`
    are ignored; None = all but this one."""

    def __init__(self, schema: Schema, registry: Registry | None = None) -> None:
        self.schema = schema
        self._decoder = Decoder(schema, registry or {schema.fingerprint: schema}.get)
        self._weight_DT = self._squares_DT = np.zeros((0, len(schema.tasks)))
        self._count, self._sum_D, self._square_D = 0.0, np.zeros(0), np.zeros(0)

    def learn(self, records: Sequence[Record]) -> dict[tuple[int, int], np.ndarray]:
        """Score the samples, then train on them. Returns (partition, offset) → scores [n, T] of each readable
        sample."""
        batch, _ = self._decoder.decode(records)
        if not batch.num_candidates:
            return {}
        x_BD = self._standard(_inputs(batch))
        score_BT = 1 / (1 + np.exp(-np.clip(x_BD @ self._weight_DT, -_LOGITS, _LOGITS)))
        error_BT = (score_BT - (batch.label_BT > 0)) * batch.weight_BT
        gradient_DT = x_BD.T @ error_BT / len(x_BD)
        self._squares_DT += gradient_DT**2
        self._weight_DT -= _RATE * gradient_DT / np.sqrt(self._squares_DT + 1e-12)
        ends_R = np.cumsum(batch.num_candidates_R)[:-1]
        places = zip(batch.partition_R.tolist(), batch.offset_R.tolist(), strict=True)
        return dict(zip(places, np.split(score_BT, ends_R), strict=True))

    def _standard(self, x_BD: np.ndarray) -> np.ndarray:
        """Standardize by the moments so far, including these candidates, and append a constant."""
        if not self._count:
            self._sum_D, self._square_D = np.zeros((2, x_BD.shape[1]))
            self._weight_DT, self._squares_DT = np.zeros((2, x_BD.shape[1] + 1, len(self.schema.tasks)))
            self._weight_DT[-1] = -1.0
        self._count += len(x_BD)
        self._sum_D += x_BD.sum(axis=0)
        self._square_D += (x_BD**2).sum(axis=0)
        mean_D = self._sum_D / self._count
        deviation_D = np.sqrt(np.maximum(self._square_D / self._count - mean_D**2, 0.0))
        scaled_BD = np.where(deviation_D > 1e-6, (x_BD - mean_D) / np.maximum(deviation_D, 1e-6), 0.0)
        return np.concatenate(
            [np.clip(scaled_BD, -_MAX_DEVIATIONS, _MAX_DEVIATIONS), np.ones((len(x_BD), 1))], axis=1
        )


def _inputs(batch: Batch) -> np.ndarray:
    """The columns of the regression, float64 [B, D]: all floats, whether each is missing, and the length of
    the list."""
    ro_RG, nro_BG = transform.apply_transforms(batch)
    index_B = batch.request_index_B
    ro_BG = np.concatenate([ro_RG, ~batch.ro_present_RF], axis=1)[index_B]
    length_B1 = np.log(batch.num_candidates_R[index_B].astype(np.float64))[:, None]
    return np.arcsinh(
        np.concatenate([nro_BG, ~batch.nro_present_BF, ro_BG, length_B1], axis=1, dtype=np.float64)
    )
