"""Metrics of a replay from the `predictions` topic: each request as it was scored before its labels were used."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from roostream.errors import WireError
from roostream.runtime.kafka.topics import PREDICTIONS
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.records import Record
from trainer.monitoring.progressive_metrics import DailyMetrics, Metrics, summarize

_AT_ONCE = 512
_FIRST_STRETCH, _MAX_POINTS = 32, 40


class PredictionMetrics:
    """Feed any records; predictions count, each sample id once (the first). 8 bytes of memory an id and more for exact AUC."""

    def __init__(self, tasks: Sequence[str], measure_from_ms: int = 0, scale_T: Sequence[float] = ()) -> None:
        """`scale_T`: as `Metrics.update`."""
        self._scale_T = scale_T
        self._daily = DailyMetrics(tasks, measure_from_ms=measure_from_ms)
        self._curve = Curve(tasks)
        self._num_tasks = len(tasks)
        self._seen: set[int] = set()
        self._waiting: list[pb.Prediction] = []

    def add(self, record: Record) -> None:
        """A record of any topic; those that aren't predictions, can't be read or come again count for nothing."""
        if record.topic != PREDICTIONS:
            return
        try:
            message = wire.decode(record.value)[1]
        except WireError:
            return
        if isinstance(message, pb.Prediction) and message.sample_id not in self._seen:
            self._seen.add(message.sample_id)
            self._waiting.append(message)
            if len(self._waiting) >= _AT_ONCE:
                self._count()

    def report(self) -> dict[str, object]:
        """`metrics` of a report: overall, measured, by_day, curve."""
        self._count()
        return {**self._daily.report(), "curve": self._curve.report()}

    def _count(self) -> None:
        """The waiting requests as one batch."""
        waiting = [
            p for p in self._waiting if p.scores or not p.item_ids
        ]  # the others were skipped and not looked at
        self._waiting = []
        if not waiting:
            return
        counts_R = np.array([len(p.item_ids) for p in waiting], np.int64)
        score_BT, label_BT = (
            np.concatenate([np.array(getattr(p, name), dtype=np.float32) for p in waiting]).reshape(
                -1, self._num_tasks
            )
            for name in ("scores", "labels")
        )
        index_B = np.repeat(np.arange(len(waiting)), counts_R)
        time_ms_R = np.array([p.time_ms for p in waiting], dtype=np.int64)
        stands_for_R = np.array([p.metric_weight or 1.0 for p in waiting])
        weight_BT = np.ones_like(label_BT) * stands_for_R[index_B][:, None].astype(np.float32)
        self._daily.update(score_BT, label_BT, weight_BT, index_B, time_ms_R, self._scale_T, stands_for_R)
        self._curve.update(score_BT, label_BT, index_B, time_ms_R, stands_for_R)


class Curve:
    """How the metrics went with the number of requests: stretches of equal length, in the order of training, at most 40 of them;
    where there would be more, each takes in its neighbour."""

    def __init__(self, tasks: Sequence[str]) -> None:
        self._tasks = tasks
        self._stretch, self._points, self._in_last = _FIRST_STRETCH, [Metrics(tasks)], 0

    def update(
        self,
        score_BT: np.ndarray,
        label_BT: np.ndarray,
        index_B: np.ndarray,
        time_ms_R: np.ndarray,
        stands_for_R: np.ndarray,
    ) -> None:
        """As `Metrics.update`; a label weighs as much as its request stands for."""
        start = 0
        while start < len(time_ms_R):
            if self._in_last == self._stretch:
                self._begin()
            end = min(len(time_ms_R), start + self._stretch - self._in_last)
            kept_B = (index_B >= start) & (index_B < end)
            score_KT, label_KT, index_K = score_BT[kept_B], label_BT[kept_B], index_B[kept_B]
            weight_KT = np.ones_like(label_KT) * stands_for_R[index_K][:, None].astype(np.float32)
            stands_for_M = stands_for_R[start:end]
            self._points[-1].update(
                score_KT,
                label_KT,
                weight_KT,
                index_K - start,
                time_ms_R[start:end],
                stands_for_R=stands_for_M,
            )
            self._in_last += end - start
            start = end

    def report(self) -> list[dict[str, object]]:
        """A point a stretch: `after` so many requests, then its own metrics. The last stretch may be shorter."""
        counts = np.cumsum([point.report()["requests"] for point in self._points]).tolist()
        return [
            {"after": n, **summarize(point.report())}
            for n, point in zip(counts, self._points, strict=True)
            if n
        ]

    def _begin(self) -> None:
        if len(self._points) == _MAX_POINTS:
            for one, other in zip(self._points[::2], self._points[1::2], strict=True):
                one.merge(other)
            self._points, self._stretch = self._points[::2], 2 * self._stretch
        self._points.append(Metrics(self._tasks))
        self._in_last = 0
