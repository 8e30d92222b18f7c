"""What both engines of a replay share: what they are given, what they hand back, and how they show that they move."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from infra.auditor.accounts import Accounts
from roostream.cli.replay.baselines import Baselines
from roostream.cli.replay.prediction_metrics import PredictionMetrics
from roostream.errors import WireError, printable
from roostream.replay.config import ReplayConfig
from roostream.replay.kafka_partitioner import partition_of
from roostream.runtime.kafka.topics import (
    CORRECTIONS,
    DEAD_LETTERS,
    DEFAULT_PARTITIONS,
    SAMPLES,
    partitions_of,
)
from roostream.runtime.program import Stop
from roostream.schema.schema import Schema
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.records import Record
from trainer.monitoring.progressive_metrics import Report

log = logging.getLogger("roostream.replay")


@dataclasses.dataclass(kw_only=True)
class Outcome:
    """What an engine hands back: the topics, summed."""

    accounts: Accounts
    findings: Findings
    untrained: int  # samples before the committed offsets without a prediction; G2 says 0
    training: Training
    served: Report | None = (
        None  # metrics of the scores as a server would have given them; None = not asked for
    )
    archived: PastAtRest | None = (
        None  # what a fresh model was trained from before the rest came live; None = all came live
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PastAtRest:
    """The past of a log in the warehouse that the stack itself made of it."""

    samples: int  # rows of its files
    days: int
    files: int
    sealed: int  # of the files
    bytes: int
    archive_s: float  # from the first record to the last seal
    trained: int = 0  # samples, by a model that had seen none
    train_s: float = 0.0  # from the start of its programs to the hand-over


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """How it was trained; None = not known."""

    steps: int | None = None
    non_finite: int | None = None
    corrections: int | None = None  # beside the samples
    rehearsed: int | None = None  # requests trained once more, beside the samples
    model: dict[str, Any] | None = None  # its configuration
    dense_parameters: int | None = None
    rows: dict[str, int] | None = None  # of the embedding tables, by stack


class Stage:
    """Progress of a replay: requests sent, joined, trained."""

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
        self._total, self._said_s, self._said_tenth = total, time.monotonic(), 0

    def __enter__(self) -> Stage:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def at(self, **done: int) -> None:
        """Where there is no terminal, a plain line every 10 % of the requests, or every 10 s if that is sooner."""
        for name, count in done.items():
            self._done[name] = count
            self._progress.update(self._tasks[name], completed=count)
        tenth = 10 * self._done["trained"] // self._total if self._total else 0
        if self._progress.disable and (tenth > self._said_tenth or time.monotonic() - self._said_s > 10):
            self._said_s, self._said_tenth = time.monotonic(), tenth
            of = f" of {self._total} ({10 * tenth} %)" if self._total else ""
            log.info("%s%s", ", ".join(f"{name} {count}" for name, count in self._done.items()), of)

    def sending(self, records: Iterable[Record]) -> Iterator[Record]:
        count = 0
        for record in records:
            count += wire.kind_of(record.value) == wire.IMPRESSION
            if count % 256 == 0:
                self.at(sent=count)
            yield record
        self.at(sent=count)


Engine: TypeAlias = Callable[[ReplayConfig, Schema, Iterable[Record], Stage, Stop], Outcome]


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


class LocalTopics:
    """Nothing is kept: `accounts` and `findings` have seen what went through."""

    def __init__(self, schema: Schema, measure_from_ms: int = 0) -> None:
        self.accounts, self.findings = Accounts(), Findings(schema, measure_from_ms)
        self._offsets: Counter[tuple[str, int]] = Counter()

    def place(self, record: Record) -> Record:
        """A record of the log, with its offset."""
        placed = record._replace(offset=self._next_offset(record.topic, record.partition))
        self.accounts.add(placed)
        return placed

    def write(self, topic: str, key: bytes, value: bytes, time_ms: int) -> Record:
        """A record of an output topic."""
        partition = partition_of(key, partitions_of(topic, DEFAULT_PARTITIONS))
        record = Record(topic, partition, self._next_offset(topic, partition), time_ms, key, value)
        self.accounts.add(record)
        self.findings.add(record)
        return record

    def _next_offset(self, topic: str, partition: int) -> int:
        self._offsets[topic, partition] += 1
        return self._offsets[topic, partition] - 1
