"""What a replay finds out from the topics beside the books: metrics, baselines, and the first dead letter of each reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from roostream.cli.replay.baselines import Baselines
from roostream.cli.replay.prediction_metrics import PredictionMetrics
from roostream.errors import WireError, printable
from roostream.runtime.kafka.topics import CORRECTIONS, DEAD_LETTERS, SAMPLES
from roostream.schema.schema import Schema
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.records import Record


class Findings:
    """Feed every record, each partition in its order. 8 bytes of memory a sample and more for exact AUC."""

    def __init__(self, schema: Schema, measure_from_ms: int = 0) -> None:
        self.metrics = PredictionMetrics(
            schema.tasks, measure_from_ms, [label.amount_scale for label in schema.labels]
        )
        self.baselines = Baselines(schema, measure_from_ms)
        self._sampled: set[int] = set()
        self._corrected: Counter[str] = Counter()
        self._letters: dict[str, pb.DeadLetter] = {}

    def add(self, record: Record) -> None:
        """A record of any topic; of a sample id the first counts, and what can't be read counts for nothing."""
        self.metrics.add(record)
        if record.topic not in (SAMPLES, CORRECTIONS, DEAD_LETTERS):
            return
        try:
            kind, message = wire.decode(record.value)
        except WireError:
            return
        if isinstance(message, pb.DeadLetter):
            self._letters.setdefault(message.reason, message)
        elif isinstance(message, pb.Sample) and message.sample_id not in self._sampled:
            self._sampled.add(message.sample_id)
            if kind == wire.SAMPLE:
                self.baselines.add(message, record)
            else:
                self._correct(message)

    def positives(self) -> dict[str, int]:
        """Candidates by label for which it was above 0 in the end."""
        found = self.baselines.positives()
        return {task: n + self._corrected[task] for task, n in found.items()}

    def _correct(self, message: pb.Sample) -> None:
        tasks = self.baselines.tasks
        for n, (before, after) in enumerate(zip(message.labels_before, message.labels, strict=False)):
            self._corrected[tasks[n % len(tasks)]] += (after > 0) - (before > 0)

    def first_dead_letters(self, find: Callable[[pb.DeadLetter], str]) -> dict[str, dict[str, Any]]:
        """Reason → `where` in the log, as `find` tells, and `error`, of the first with this reason."""
        return {
            printable(reason): {"where": printable(find(letter)), "error": printable(letter.error)}
            for reason, letter in sorted(self._letters.items())
        }
