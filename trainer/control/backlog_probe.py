"""Sees new samples without a worker: what lies in Kafka behind the committed offsets, from a thread of the controller's."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Mapping
from typing import Protocol

from roostream.errors import UnavailableError
from roostream.runtime.clock import Clock
from roostream.runtime.kafka.topics import SAMPLES, Partition, Progress
from roostream.wire.records import Record
from trainer.control.controller import Controller
from trainer.control.idle import Backlog, IdleAction, IdleDetector

log = logging.getLogger("roostream.controller")

LOOK_S = 1.0
_MAX_MARKERS = 1000  # in a partition: more offsets than these are records, whatever lies among them
_PEEK_S = 0.5
_PEEKS = 10


class SampleLog(Protocol):
    """Of `roostream.runtime.kafka.kafka_consumer.KafkaConsumer`, which says what each method does."""

    @property
    def partitions(self) -> tuple[Partition, ...]: ...

    def bounds(self, *partitions: Partition) -> Mapping[Partition, tuple[int, int]]: ...

    def seek(self, progress: Mapping[Partition, int]) -> None: ...

    def pause(self, partitions: Collection[Partition]) -> None: ...

    def poll(self, max_records: int, timeout_s: float) -> list[Record]: ...

    def passed(self, partition: Partition) -> int: ...


class BacklogProbe:
    """One thread. Transactions leave markers in the log that no reader is given: the offsets behind a commit aren't all
    records. Where two looks find the same few, the log itself is read, once."""

    def __init__(self, log: SampleLog) -> None:
        self.log = log
        self._empty: Progress = {}  # below it there are no records but committed ones
        self._before: tuple[Progress, Progress] | None = None  # starts and ends of the look before
        self._read: tuple[Progress, Progress] | None = None  # between these records were found

    def look(self, committed: Progress) -> Backlog | None:
        """Behind `committed`, of its topics and `samples`; a partition that isn't named counts from its oldest record. None:
        Kafka doesn't tell now."""
        try:
            bounds = self.log.bounds(*self.log.partitions)
            topics = {SAMPLES, *(topic for topic, _ in committed)}
            ends = {p: end for p, (_, end) in bounds.items() if p[0] in topics}
            self._empty = {p: at for p, at in self._empty.items() if at <= ends.get(p, 0)}
            starts = {
                p: min(max(bounds[p][0], committed.get(p, 0), self._empty.get(p, 0)), end)
                for p, end in ends.items()
            }
            behind = {p: end - starts[p] for p, end in ends.items() if end > starts[p]}
            is_quiet, self._before = (starts, ends) == self._before, (starts, ends)
            if is_quiet and behind and max(behind.values()) <= _MAX_MARKERS and (starts, ends) != self._read:
                if self._are_records(starts, {p: bounds[p][1] for p in self.log.partitions}, behind):
                    self._read = starts, ends
                else:
                    self._empty |= {p: ends[p] for p in behind}
                    behind = {}
        except UnavailableError as error:
            log.debug("whether there is something to train isn't known now: %s", error)
            return None
        return Backlog(sum(behind.values()), ends)

    def _are_records(self, starts: Progress, ends: Progress, behind: Collection[Partition]) -> bool:
        """Raises UnavailableError: Kafka gives neither a record nor an end."""
        self.log.pause(())
        self.log.seek({**ends, **starts})
        try:
            for _ in range(_PEEKS):
                if self.log.poll(1, _PEEK_S):
                    return True
                if all(self.log.passed(p) >= ends[p] for p in behind):
                    return False
        finally:
            self.log.pause(self.log.partitions)
        raise UnavailableError(f"Kafka gave no record within {_PEEKS * _PEEK_S:g} s, and no end of the topic")


class IdleHoldWatcher:
    """Holds training while there is nothing to read, and ends that hold."""

    def __init__(
        self, controller: Controller, lookout: BacklogProbe, idle: IdleDetector, clock: Clock
    ) -> None:
        self.controller, self.lookout, self.idle, self.clock = controller, lookout, idle, clock

    def run(self, stop: threading.Event) -> None:
        """Until `stop`. A look that fails by a defect ends the hold: nobody else would."""
        while not stop.wait(LOOK_S):
            try:
                self.look()
            except Exception:
                log.exception(
                    "whether there is something to train can't be found out: workers are not released"
                )
                self.controller.end_idle()

    def look(self) -> IdleAction:
        """Once."""
        committed, held = self.controller.committed()
        advice = self.idle.observe(self.clock.monotonic_s(), self.lookout.look(committed), held=held)
        if advice is IdleAction.HOLD:
            self.controller.hold_idle(f"nothing to read for {self.idle.rule.hold_s:g} s")
        elif advice is IdleAction.RELEASE:
            self.controller.end_idle()
        return advice
