"""What both engines of a replay share: what they are given, what they hand back, and how they show that they move."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from infra.auditor.accounts import Accounts
from roostream.cli.replay.findings import Findings
from roostream.replay.config import ReplayConfig
from roostream.runtime.program import Stop
from roostream.schema.schema import Schema
from roostream.wire import records as wire
from roostream.wire.records import Record
from trainer.monitoring.quality import Report

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
