"""Progressive metrics of a replay from the topic `predictions`, in which requests are scored before their
labels are used."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from roostream.errors import WireError
from roostream.runtime.kafka.topics import PREDICTIONS
from roostream.schema.schema import Label
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.records import Record
from trainer.monitoring.progressive_metrics import DailyMetrics, Metrics, ScoredBatch, summarize
from trainer.monitoring.scored_predictions import add_to_pairs, is_scored, scored_batch
from trainer.monitoring.verdict import PairedRequests

_AT_ONCE = 512
_FIRST_LENGTH, _MAX_POINTS = 32, 40


class PredictionMetrics:
    """Call `add` with records of any topic; the first prediction of each sample id counts.

    Memory: 8 bytes per id, and more for exact AUC.
    """

    def __init__(
        self,
        tasks: Sequence[str],
        measure_from_ms: int = 0,
        declared_T: Sequence[Label] = (),
        paired: PairedRequests | None = None,
    ) -> None:
        """`declared_T`: see `ScoredBatch`. `paired` gets the scores of each request."""
        self._declared_T, self._paired, self._num_scored = declared_T, paired, 0
        self._daily = DailyMetrics(tasks, measure_from_ms=measure_from_ms)
        self._curve = LearningCurve(tasks)
        self._num_tasks = len(tasks)
        self._seen: set[int] = set()
        self._waiting: list[pb.Prediction] = []

    def add(self, record: Record) -> None:
        """Add a record. Other topics, unreadable records and repeated predictions are ignored."""
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
        """The `metrics` of a report: overall, measured, by_day, curve."""
        self._count()
        return {**self._daily.report(), "curve": self._curve.report()}

    def _count(self) -> None:
        """Add the waiting requests to the metrics as one batch."""
        waiting = [p for p in self._waiting if is_scored(p)]
        self._waiting = []
        if not waiting:
            return
        scored = scored_batch(waiting, self._num_tasks, self._declared_T)
        if self._paired is not None:
            add_to_pairs(self._paired, waiting, scored, self._num_scored)
        self._num_scored += len(waiting)
        self._daily.update(scored)
        self._curve.update(scored)


class LearningCurve:
    """Metrics over consecutive intervals of equally many requests, in training order.

    There are at most 40 intervals: when there would be more, adjacent intervals are merged.
    """

    def __init__(self, tasks: Sequence[str]) -> None:
        self._tasks = tasks
        self._length, self._points, self._in_last = _FIRST_LENGTH, [Metrics(tasks)], 0

    def update(self, scored: ScoredBatch) -> None:
        """As `Metrics.update`."""
        start, place_R = 0, np.arange(len(scored.time_ms_R))
        while start < len(place_R):
            if self._in_last == self._length:
                self._begin()
            end = min(len(place_R), start + self._length - self._in_last)
            self._points[-1].update(scored.of_requests((place_R >= start) & (place_R < end)))
            self._in_last += end - start
            start = end

    def report(self) -> list[dict[str, object]]:
        """One entry per interval: `after` that many requests, and the metrics. The last interval may be
        shorter."""
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
            self._points, self._length = self._points[::2], 2 * self._length
        self._points.append(Metrics(self._tasks))
        self._in_last = 0
