"""A replay's scores as a server would have given them: each request at its own time, by the weights of that time.

A sample is scored again when it is trained, by weights that have seen what was joined meanwhile: one window of the future. Only
scores from the request's own time show what late labels cost.

    impression ──► waits ──► scored before the next step (weights don't change in between)
    sample, corrections ──► labels, put right until the end

Letters: n candidates of a request, B of several, T tasks, R requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from roostream.cli.skew.logged_lists import sample_of
from roostream.runtime.kafka.topics import CORRECTIONS, IMPRESSIONS, SAMPLES
from roostream.schema.ids import NO_KEY, sample_id
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.batch import Batch
from roostream.wire.decode import Decoder
from roostream.wire.records import Record
from trainer.monitoring.quality import DailyMetrics, Report

_AT_ONCE = 256


class _ScoredList:
    """A request from its first impression on: 4 bytes an item and task for scores and labels each, and some more."""

    __slots__ = ("label_nT", "row_of", "score_nT", "time_ms")

    def __init__(self, impression: pb.Impression, num_tasks: int) -> None:
        self.time_ms = impression.header.time_ms
        self.row_of = {item: n for n, item in enumerate(dict.fromkeys(impression.item_ids))}
        self.score_nT = np.full((len(self.row_of), num_tasks), np.nan, np.float32)
        self.label_nT: np.ndarray | None = None


class AsServed:
    """Feed every record in the order of time, and call `score` before weights change. All requests stay in memory."""

    def __init__(self, tasks: Sequence[str], decoder: Decoder, scores: Callable[[Batch], np.ndarray]) -> None:
        """`scores`: probabilities [B, T] by the weights of now."""
        self.tasks, self.decoder, self.scores = tuple(tasks), decoder, scores
        self._shown: dict[int, _ScoredList] = {}
        self._waiting: list[Record] = []

    def add(self, record: Record) -> None:
        """A record of any topic. Of a request's pages the first is scored; what can't be read counts for nothing."""
        kind = wire.kind_of(record.value)
        if record.topic == IMPRESSIONS and kind == wire.IMPRESSION:
            self._show(record)
        elif record.topic in (SAMPLES, CORRECTIONS):
            self._label(record)

    def score(self) -> None:
        """What has been shown since the last call."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        batch, _ = self.decoder.decode(waiting)
        score_BT, ends_R = self.scores(batch), np.cumsum(batch.num_candidates_R)
        for r, id_ in enumerate(batch.sample_id_R.view(np.uint64).tolist()):
            shown, start = self._shown[id_], int(ends_R[r] - batch.num_candidates_R[r])
            items = batch.item_B[start : ends_R[r]].view(np.uint64).tolist()
            for n, item in reversed([*enumerate(items)]):  # of an item that is there twice, the first
                shown.score_nT[shown.row_of[item]] = score_BT[start + n]

    def report(self, measure_from_ms: int) -> Report:
        """`overall`, `measured` and `by_day`, as `metrics` of a report; labels as they are now."""
        metrics = DailyMetrics(self.tasks, measure_from_ms=measure_from_ms)
        known = [s for s in self._shown.values() if s.label_nT is not None and not np.isnan(s.score_nT).any()]
        for start in range(0, len(known), _AT_ONCE):
            part = known[start : start + _AT_ONCE]
            label_BT = np.concatenate([s.label_nT for s in part if s.label_nT is not None])
            index_B = np.repeat(np.arange(len(part)), [len(s.score_nT) for s in part])
            time_ms_R = np.array([s.time_ms for s in part], np.int64)
            metrics.update(
                np.concatenate([s.score_nT for s in part]),
                label_BT,
                np.ones_like(label_BT),
                index_B,
                time_ms_R,
            )
        return metrics.report()

    def _show(self, record: Record) -> None:
        message = pb.Impression.FromString(record.value[2:])
        id_ = sample_id(record.key or NO_KEY, message.header.request_id)
        if id_ in self._shown:
            return
        self._shown[id_] = _ScoredList(message, len(self.tasks))
        sample = sample_of(record, message, len(self.tasks))
        self._waiting.append(record._replace(topic=SAMPLES, value=wire.encode(wire.SAMPLE, sample)))
        if len(self._waiting) >= _AT_ONCE:
            self.score()

    def _label(self, record: Record) -> None:
        message = pb.Sample.FromString(record.value[2:])
        shown = self._shown.get(sample_id(record.key or NO_KEY, message.header.request_id))
        if shown is None:
            return
        if shown.label_nT is None:
            shown.label_nT = np.zeros_like(shown.score_nT)
        label_nT = np.array(message.labels, np.float32).reshape(-1, len(self.tasks))
        for item, label_T in zip(message.item_ids, label_nT, strict=True):
            if item in shown.row_of:
                shown.label_nT[shown.row_of[item]] = label_T
