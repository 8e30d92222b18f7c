"""What both engines of a replay share: statistics of the topics, the outcome, and the progress display."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from infra.auditor.accounts import Accounts
from joiner.config import JoinerConfig
from joiner.local_engine import LocalEngine
from joiner.outputs import Output
from roostream.cli.replay.prediction_metrics import PredictionMetrics
from roostream.cli.replay.program_settings import program_settings
from roostream.errors import WireError, printable
from roostream.replay.config import ReplayConfig
from roostream.runtime.kafka.partitioner import partition_of
from roostream.runtime.kafka.topics import (
    CORRECTIONS,
    DEAD_LETTERS,
    DEFAULT_PARTITIONS,
    SAMPLES,
    partitions_of,
)
from roostream.runtime.program import Stop
from roostream.schema.schema import Registry, Schema
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.records import Record
from trainer.monitoring.baselines import Baselines
from trainer.monitoring.progressive_metrics import Report
from trainer.monitoring.verdict import PairedRequests

log = logging.getLogger("roostream.replay")


@dataclasses.dataclass(kw_only=True)
class Outcome:
    """The result of an engine."""

    accounts: Accounts
    statistics: ReplayStatistics
    untrained: int  # samples before the committed offsets without a prediction; guarantee G2 says 0
    training: TrainingSummary
    served: Report | None = None  # metrics of the scores at request time; None without --as-served
    streaming: Report | None = None  # metrics by evaluated window; None without --streaming-window
    archived: ArchivedPart | None = None  # the part trained from the archive; None without --archived-until
    others: tuple[OtherModel, ...] = ()  # models of the same pass beside the first


@dataclasses.dataclass(kw_only=True)
class OtherModel:
    """A further model that learned from the same samples."""

    file: str
    metrics: PredictionMetrics
    paired: PairedRequests
    training: TrainingSummary
    streaming: Report | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArchivedPart:
    """The first part of a log, which the stack archived and a new model was trained from."""

    samples: int
    days: int
    files: int
    sealed: int  # number of sealed files
    bytes: int
    archive_s: float  # from the first record to the last seal
    trained: int = 0  # samples trained from the archive
    train_s: float = 0.0  # from the start of the trainer to the switch to the stream


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingSummary:
    """What a model's training did in a replay; None = unknown."""

    steps: int | None = None
    non_finite: int | None = None
    corrections: int | None = None  # beside the samples
    rehearsed: int | None = None  # replayed requests, which are trained again beside the samples
    model: dict[str, Any] | None = None  # configuration
    dense_parameters: int | None = None
    rows: dict[str, int] | None = None  # embedding rows by stack


class ReplayProgress:
    """Shows the number of requests sent, joined and trained, as a progress bar or as log lines."""

    def __init__(self, console: Console, total: int) -> None:
        columns = (
            TextColumn("{task.description:>8}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._tasks = {
            name: self._progress.add_task(name, total=total or None) for name in ("sent", "joined", "trained")
        }
        self._done = dict.fromkeys(self._tasks, 0)
        self._total, self._logged_s, self._logged_tenth = total, time.monotonic(), 0

    def __enter__(self) -> ReplayProgress:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def update(self, **done: int) -> None:
        """Without a terminal, log a line after every 10 % of the requests and at least every 10 s."""
        for name, count in done.items():
            self._done[name] = count
            self._progress.update(self._tasks[name], completed=count)
        tenth = 10 * self._done["trained"] // self._total if self._total else 0
        if self._progress.disable and (tenth > self._logged_tenth or time.monotonic() - self._logged_s > 10):
            self._logged_s, self._logged_tenth = time.monotonic(), tenth
            share = f" of {self._total} ({10 * tenth} %)" if self._total else ""
            log.info("%s%s", ", ".join(f"{name} {count}" for name, count in self._done.items()), share)


def count_impressions(records: Iterable[Record], update: Callable[[int], None]) -> Iterator[Record]:
    """Pass the records through, and call `update` with the number of impressions so far, now and then."""
    count = 0
    for record in records:
        count += wire.kind_of(record.value) == wire.IMPRESSION
        if count % 256 == 0:
            update(count)
        yield record
    update(count)


Engine: TypeAlias = Callable[[ReplayConfig, Schema, Iterable[Record], ReplayProgress, Stop], Outcome]


class ReplayStatistics:
    """Metrics, baselines and dead letters of a replay. Call `add` with every record, in the order of each
    partition.

    Memory: 140 bytes per sample, and more for exact AUC.
    """

    def __init__(self, schema: Schema, measure_from_ms: int = 0, registry: Registry | None = None) -> None:
        self.paired = PairedRequests()
        self.metrics = PredictionMetrics(schema.tasks, measure_from_ms, schema.labels, self.paired)
        self.baselines = Baselines(schema, measure_from_ms, self.paired, registry=registry)
        self._sampled: set[int] = set()
        self._corrected: Counter[str] = Counter()
        self._corrected_weight: defaultdict[str, float] = defaultdict(float)
        self._letters: dict[str, pb.DeadLetter] = {}

    def add(self, record: Record) -> None:
        """Add a record of any topic. The first record of a sample id counts; unreadable records are
        ignored."""
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
        """Label → number of candidates whose final value is above 0."""
        found = self.baselines.positives()
        return {task: n + self._corrected[task] for task, n in found.items()}

    def base_rates(self) -> dict[str, float]:
        """Label → share of candidates whose final value is above 0, by the sampling weights of requests."""
        sums = self.baselines.weighted_counts()
        return {
            task: (positive + self._corrected_weight[task]) / known if known else 0.0
            for task, (positive, known) in sums.items()
        }

    def _correct(self, message: pb.Sample) -> None:
        tasks, weight = self.baselines.tasks, message.weight or 1.0
        for n, (before, after) in enumerate(zip(message.labels_before, message.labels, strict=False)):
            change = (after > 0) - (before > 0)
            self._corrected[tasks[n % len(tasks)]] += change
            self._corrected_weight[tasks[n % len(tasks)]] += weight * change

    def first_dead_letters(self, find: Callable[[pb.DeadLetter], str]) -> dict[str, dict[str, Any]]:
        """Reason → `where` and `error` of the first dead letter with this reason; `find` returns its position
        in the log."""
        return {
            printable(reason): {"where": printable(find(letter)), "error": printable(letter.error)}
            for reason, letter in sorted(self._letters.items())
        }


class LocalTopics:
    """The topics of a local replay: assigns partitions and offsets as Kafka would, and counts records without
    keeping them."""

    def __init__(self, schema: Schema, measure_from_ms: int = 0, registry: Registry | None = None) -> None:
        self.accounts, self.statistics = Accounts(), ReplayStatistics(schema, measure_from_ms, registry)
        self._offsets: Counter[tuple[str, int]] = Counter()

    def append(self, record: Record) -> Record:
        """Append a record of the log; returns it with its offset."""
        placed = record._replace(offset=self._next_offset(record.topic, record.partition))
        self.accounts.add(placed)
        return placed

    def write(self, topic: str, key: bytes, value: bytes, time_ms: int) -> Record:
        """Append a record to an output topic."""
        partition = partition_of(key, partitions_of(topic, DEFAULT_PARTITIONS))
        record = Record(topic, partition, self._next_offset(topic, partition), time_ms, key, value)
        self.accounts.add(record)
        self.statistics.add(record)
        return record

    def _next_offset(self, topic: str, partition: int) -> int:
        self._offsets[topic, partition] += 1
        return self._offsets[topic, partition] - 1


class LocalJoin:
    """The joiner of a replay in this process: records of the log in, records of the output topics out."""

    def __init__(self, config: ReplayConfig, schema: Schema, topics: LocalTopics) -> None:
        self.topics, self.config = topics, JoinerConfig(engine="local", **program_settings(config).joiner)
        self._engine = LocalEngine(self.config, schema, {schema.fingerprint: schema}.get)

    def process(self, record: Record) -> list[Record]:
        """`record` is one that `LocalTopics.append` returned."""
        return self._write(self._engine.process(record))

    def end_of_input(self) -> list[Record]:
        return self._write(self._engine.end_of_input())

    def _write(self, outputs: Iterable[Output]) -> list[Record]:
        now_ms = self._engine.watermark_ms
        return [
            self.topics.write(o.topic, o.key, o.value, now_ms if o.timestamp_ms is None else o.timestamp_ms)
            for o in outputs
        ]
