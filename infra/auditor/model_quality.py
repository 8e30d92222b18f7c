"""Compares the model of a running stack with the baselines of a replay, on the requests that it trains.

Samples give the baselines' scores, predictions those of the model from before training. The baselines start
empty with the process, so the first requests only warm them up. The verdict is on the newest requests.
"""

from __future__ import annotations

from typing import Any

from roostream.errors import WireError
from roostream.runtime.kafka.topics import PREDICTIONS, SAMPLES
from roostream.schema.schema import Schema
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.records import Record
from trainer.monitoring.baselines import Baselines
from trainer.monitoring.scored_predictions import add_to_pairs, scored_batch
from trainer.monitoring.verdict import PairedRequests, metrics_of

WARM_UP = 1_000
"""Requests that the baselines learn from before their scores count."""
_MAX_REQUESTS = 20_000
_MAX_ITEMS = 200_000
_MAX_IDS = 50_000
_AT_ONCE = 256


class ModelQuality:
    """Call `add` with every record. Bounded memory: about 20 MB, and 40 bytes per item and task for at most
    200,000 items. Not thread-safe."""

    def __init__(self, schema: Schema, share: float = 1.0) -> None:
        """`share`: compare this share of the requests, chosen by sample id."""
        self.schema, self._max_id = schema, share * 2.0**64
        self._paired = PairedRequests(max_requests=_MAX_REQUESTS)
        self._baselines = Baselines(schema, paired=self._paired, max_items=_MAX_ITEMS, keep_metrics=False)
        self._sampled, self._predicted = _NewestIds(), _NewestIds()
        self._warm_up: set[int] = set()
        self._waiting: list[pb.Prediction] = []
        self._num_scored = 0
        self._metrics: dict[str, Any] | None = None

    def add(self, record: Record) -> None:
        """Add a record. Other topics, repeated ids, unreadable records and those of a schema with other
        labels are ignored."""
        if record.topic not in (SAMPLES, PREDICTIONS):
            return
        try:
            message = wire.decode(record.value)[1]
        except WireError:
            return
        if not isinstance(message, pb.Sample | pb.Prediction) or message.sample_id >= self._max_id:
            return
        if isinstance(message, pb.Sample) and self._sampled.add(message.sample_id):
            if len(self._warm_up) < WARM_UP:
                self._warm_up.add(message.sample_id)
            self._baselines.add(message, record)
        elif isinstance(message, pb.Prediction) and self._predicted.add(message.sample_id):
            self._predict(message)

    def metrics(self) -> dict[str, Any]:
        """Metrics of the newest verdict (`METRIC_SPECS` of trainer/monitoring/verdict.py)."""
        if self._metrics is None:
            self._metrics = metrics_of(self._paired.verdict())
        return self._metrics

    def _predict(self, message: pb.Prediction) -> None:
        num_tasks = len(self.schema.tasks)
        expected = len(message.item_ids) * num_tasks
        is_scored = 0 < expected == len(message.scores) == len(message.labels)
        if not is_scored or message.sample_id in self._warm_up:
            return
        self._waiting.append(message)
        if len(self._waiting) >= _AT_ONCE:
            scored = scored_batch(self._waiting, num_tasks, self.schema.labels)
            add_to_pairs(self._paired, self._waiting, scored, self._num_scored)
            self._num_scored += len(self._waiting)
            self._waiting, self._metrics = [], None


class _NewestIds:
    """The newest ids, to recognize repeated ones."""

    def __init__(self) -> None:
        self._ids: dict[int, None] = {}

    def add(self, id_: int) -> bool:
        """Whether the id is new."""
        if id_ in self._ids:
            return False
        self._ids[id_] = None
        if len(self._ids) > _MAX_IDS:
            del self._ids[next(iter(self._ids))]
        return True
