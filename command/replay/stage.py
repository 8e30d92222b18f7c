"""What both engines of a replay share: what they are given, what they hand back, and how they show that they move."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from command.accounts import Accounts
from command.replay.prediction_metrics import PredictionMetrics
from roo import wire
from roo.schema import Schema
from roo.wire import Record
from runtime.program import Stop
from traffic.config import ReplayConfig

log = logging.getLogger("roostream.replay")


@dataclasses.dataclass(kw_only=True)
class Outcome:
    """What an engine hands back: the topics, summed."""

    accounts: Accounts
    metrics: PredictionMetrics
    untrained: int  # samples before the committed offsets without a prediction; G2 says 0


class Stage:
    """Progress of a replay: requests sent, joined, trained."""

    def __init__(self, console: Console, total: int) -> None:
        columns = (TextColumn("{task.description:>8}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._tasks = {name: self._progress.add_task(name, total=total or None) for name in ("sent", "joined", "trained")}
        self._done = dict.fromkeys(self._tasks, 0)
        self._said_s = time.monotonic()

    def __enter__(self) -> Stage:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def at(self, **done: int) -> None:
        """Plain lines every 10 s where there is no terminal."""
        for name, count in done.items():
            self._done[name] = count
            self._progress.update(self._tasks[name], completed=count)
        if self._progress.disable and time.monotonic() - self._said_s > 10:
            self._said_s = time.monotonic()
            log.info(", ".join(f"{name} {count}" for name, count in self._done.items()))

    def sending(self, records: Iterable[Record]) -> Iterator[Record]:
        count = 0
        for record in records:
            count += wire.kind_of(record.value) == wire.IMPRESSION
            if count % 256 == 0:
                self.at(sent=count)
            yield record
        self.at(sent=count)


Engine: TypeAlias = Callable[[ReplayConfig, Schema, Iterable[Record], Stage, Stop], Outcome]


def joiner_settings(config: ReplayConfig) -> dict[str, Any]:
    """The same for both engines. Caps are out of the way: they are outside the claim that order doesn't matter."""
    wide = {"max_open_requests": 1 << 20, "max_requests": 1 << 20, "max_orphans": 1 << 20, "max_engagements": 1 << 20}
    return {"window_ms": config.window_ms, "lateness_ms": config.lateness_ms, "replay": True, **wide}
