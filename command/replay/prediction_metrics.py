"""Metrics of a replay from the `predictions` topic: each request as it was scored before its labels were used."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from roo import roo_pb2 as pb
from roo import wire
from roo.errors import WireError
from roo.wire import Record
from runtime.kafka.topics import PREDICTIONS
from trainer.quality import DailyMetrics

_AT_ONCE = 512


class PredictionMetrics:
    """Feed any records; predictions count, each sample id once (the first). 8 bytes of memory an id and more for exact AUC."""

    def __init__(self, tasks: Sequence[str], measure_from_ms: int = 0) -> None:
        self._daily = DailyMetrics(tasks, measure_from_ms=measure_from_ms)
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
        """`metrics` of a report: overall, measured, by_day."""
        self._count()
        return self._daily.report()

    def _count(self) -> None:
        """The waiting requests as one batch."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        counts_R = np.array([len(p.item_ids) for p in waiting])
        score_BT, label_BT = (
            np.concatenate([np.array(getattr(p, name), dtype=np.float32) for p in waiting]).reshape(-1, self._num_tasks)
            for name in ("scores", "labels")
        )
        index_B = np.repeat(np.arange(len(waiting)), counts_R)
        time_ms_R = np.array([p.time_ms for p in waiting], dtype=np.int64)
        self._daily.update(score_BT, label_BT, np.ones_like(label_BT), index_B, time_ms_R)
