"""Releases workers while there is nothing to read: a pure rule over the backlog, and a thread of the
controller that applies it.

    training ── nothing to read for `hold_s` ──► on hold
    on hold ── `min_records` unread, or some for `max_wait_s`; not before `min_held_s` ──► training

After Kurian et al., *Scalable Machine Learning Training Infrastructure for Online Ads Recommendation*, §VI-A,
"transient stalls". An unknown backlog neither holds nor releases, and a quiet period before it does not
count."""

from __future__ import annotations

import dataclasses
import enum
import logging
import threading
from collections.abc import Collection
from typing import NamedTuple

from roostream.errors import UnavailableError
from roostream.runtime.clock import Clock
from roostream.runtime.kafka.kafka_consumer import KafkaConsumer
from roostream.runtime.kafka.topics import SAMPLES, Partition, Progress
from trainer.control.controller import Controller

log = logging.getLogger("roostream.controller")

CHECK_INTERVAL_S = 1.0
_MAX_GAP_S = 10.0  # a quiet period does not continue over a longer gap between two readings
_MAX_MARKERS = 1000  # per partition; more offsets than this must contain records
_PEEK_S = 0.5
_PEEKS = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class IdleRule:
    """Two separate thresholds and a minimum hold time, so that a trickle of records does not start and stop
    workers."""

    hold_s: float  # hold training after nothing was readable for this long; 0 = never
    min_records: int = 100  # this many unread records end the hold at once
    max_wait_s: float = 10.0  # fewer records end it after they have waited this long
    min_held_s: float = 30.0


class Backlog(NamedTuple):
    """What lies behind the committed offsets at one moment."""

    records: int  # 0 = certainly none
    ends: Progress


class IdleAction(enum.StrEnum):
    """What to do about the hold for lack of input."""

    NOTHING = "nothing"
    HOLD = "hold"
    RELEASE = "release"


class IdleDetector:
    """Call `observe` about once a second with a monotonic clock. A clock that goes back restarts all waits.
    Not thread-safe."""

    def __init__(self, rule: IdleRule) -> None:
        self.rule = rule
        self._held = False
        self._held_s = self._seen_s = 0.0  # start of the hold; time of the last reading
        self._quiet_s: float | None = None  # since when there is nothing to read
        self._unread_s: float | None = None  # on hold: since when there is something to read
        self._ends: Progress = {}

    def observe(self, now_s: float, backlog: Backlog | None, *, held: bool) -> IdleAction:
        """Decide by one reading of the backlog. `backlog`: None = unknown now. `held`: training is on hold
        for lack of input."""
        if held != self._held or now_s < self._seen_s:
            self._held, self._held_s, self._quiet_s, self._unread_s = held, now_s, None, None
        if backlog is None or now_s - self._seen_s > _MAX_GAP_S:
            self._quiet_s = None
        self._seen_s = now_s
        if backlog is None:
            return IdleAction.NOTHING
        return self._while_held(now_s, backlog) if held else self._while_training(now_s, backlog)

    def _while_training(self, now_s: float, backlog: Backlog) -> IdleAction:
        grew, self._ends = backlog.ends != self._ends, backlog.ends
        if backlog.records or grew:
            self._quiet_s = None
        if not backlog.records and self._quiet_s is None:
            self._quiet_s = now_s
        quiet = self._quiet_s is not None and now_s - self._quiet_s >= self.rule.hold_s > 0
        return IdleAction.HOLD if quiet else IdleAction.NOTHING

    def _while_held(self, now_s: float, backlog: Backlog) -> IdleAction:
        if not backlog.records:
            self._unread_s = None
            return IdleAction.NOTHING
        if self._unread_s is None:
            self._unread_s = now_s
        enough = backlog.records >= self.rule.min_records or now_s - self._unread_s >= self.rule.max_wait_s
        may_release = enough and now_s - self._held_s >= self.rule.min_held_s
        return IdleAction.RELEASE if may_release else IdleAction.NOTHING


class BacklogProbe:
    """Counts unread samples without a worker, for one thread. Transactions leave markers in the log that
    readers never see, so not every offset behind a commit is a record. If two probes find the same small
    backlog, the log itself is read once."""

    def __init__(self, log: KafkaConsumer) -> None:
        self.log = log
        self._empty: Progress = {}  # no uncommitted records below these offsets
        self._before: tuple[Progress, Progress] | None = None  # starts and ends of the last probe
        self._read: tuple[Progress, Progress] | None = None  # records were found between these offsets

    def count(self, committed: Progress) -> Backlog | None:
        """Backlog behind `committed`, of its topics and `samples`. A partition that is missing counts from
        its oldest record. None: Kafka does not answer now."""
        try:
            bounds = self.log.bounds(*self.log.partitions)
            topics = {SAMPLES, *(topic for topic, _ in committed)}
            ends = {p: end for p, (_, end) in bounds.items() if p[0] in topics}
            self._empty = {p: offset for p, offset in self._empty.items() if offset <= ends.get(p, 0)}
            starts = {
                p: min(max(bounds[p][0], committed.get(p, 0), self._empty.get(p, 0)), end)
                for p, end in ends.items()
            }
            behind = {p: end - starts[p] for p, end in ends.items() if end > starts[p]}
            is_quiet, self._before = (starts, ends) == self._before, (starts, ends)
            if is_quiet and behind and max(behind.values()) <= _MAX_MARKERS and (starts, ends) != self._read:
                if self._has_records(starts, {p: bounds[p][1] for p in self.log.partitions}, behind):
                    self._read = starts, ends
                else:
                    self._empty |= {p: ends[p] for p in behind}
                    behind = {}
        except UnavailableError as error:
            log.debug("the backlog is unknown now: %s", error)
            return None
        return Backlog(sum(behind.values()), ends)

    def _has_records(self, starts: Progress, ends: Progress, behind: Collection[Partition]) -> bool:
        """Raises UnavailableError: Kafka returns neither a record nor the end."""
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
        raise UnavailableError(
            f"Kafka returned neither a record nor the topic's end within {_PEEKS * _PEEK_S:g} s"
        )


class IdleHoldWatcher:
    """Puts training on hold while there is nothing to read, and ends that hold."""

    def __init__(
        self, controller: Controller, probe: BacklogProbe, detector: IdleDetector, clock: Clock
    ) -> None:
        self.controller, self.backlog_probe, self.detector, self.clock = controller, probe, detector, clock

    def run(self, stop: threading.Event) -> None:
        """Run until `stop`. An unexpected error ends the hold, because nothing else would."""
        while not stop.wait(CHECK_INTERVAL_S):
            try:
                self.check()
            except Exception:
                log.exception("the backlog cannot be determined, so workers are not released")
                self.controller.end_idle()

    def check(self) -> IdleAction:
        """Probe once and act on it."""
        committed, held = self.controller.committed()
        action = self.detector.observe(
            self.clock.monotonic_s(), self.backlog_probe.count(committed), held=held
        )
        if action is IdleAction.HOLD:
            self.controller.hold_idle(f"nothing to read for {self.detector.rule.hold_s:g} s")
        elif action is IdleAction.RELEASE:
            self.controller.end_idle()
        return action
