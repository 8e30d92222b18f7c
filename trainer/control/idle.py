"""Whether training is worth its devices: a pure rule over what lies behind the committed offsets.

    training ── nothing to read for `hold_s` ──► held
    held ── `min_records` are there, or some for `max_wait_s`; not before `min_held_s` ──► training

After Kurian et al., *Scalable Machine Learning Training Infrastructure for Online Ads Recommendation*, §VI-A, "transient
stalls".
What can't be read is unknown: it neither holds nor releases, and the quiet before it doesn't count.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import NamedTuple

from roostream.runtime.kafka.topics import Progress

_WATCHED_S = 10.0  # between two readings; nobody watched what lies further apart


@dataclasses.dataclass(frozen=True, kw_only=True)
class IdleRule:
    """Two bounds apart from each other, and a least time between them, so that a trickle doesn't start and end workers."""

    hold_s: float  # nothing to read for this long: training is held; 0 = never
    min_records: int = 100  # so many end the hold at once
    max_wait_s: float = 10.0  # fewer end it when they have been there for this long
    min_held_s: float = 30.0


class Backlog(NamedTuple):
    """What lies behind the committed offsets at one moment."""

    records: int  # 0 = surely none
    ends: Progress


class IdleAction(enum.StrEnum):
    """What is to be done now."""

    NOTHING = "nothing"
    HOLD = "hold"
    RELEASE = "release"


class IdleDetector:
    """Call `observe` about once a second with a monotonic clock. One that goes back begins each wait anew. Not thread-safe."""

    def __init__(self, rule: IdleRule) -> None:
        self.rule = rule
        self._held = False
        self._held_s = self._seen_s = 0.0  # held since; the last reading
        self._quiet_s: float | None = None  # nothing to read since then
        self._there_s: float | None = None  # while held: something to read since then
        self._ends: Progress = {}

    def observe(self, now_s: float, unread: Backlog | None, *, held: bool) -> IdleAction:
        """`unread` None: not known now. `held`: training is held, for this reason."""
        if held != self._held or now_s < self._seen_s:
            self._held, self._held_s, self._quiet_s, self._there_s = held, now_s, None, None
        if unread is None or now_s - self._seen_s > _WATCHED_S:
            self._quiet_s = None
        self._seen_s = now_s
        if unread is None:
            return IdleAction.NOTHING
        return self._while_held(now_s, unread) if held else self._while_training(now_s, unread)

    def _while_training(self, now_s: float, unread: Backlog) -> IdleAction:
        came, self._ends = unread.ends != self._ends, unread.ends
        if unread.records or came:
            self._quiet_s = None
        if not unread.records and self._quiet_s is None:
            self._quiet_s = now_s
        quiet = self._quiet_s is not None and now_s - self._quiet_s >= self.rule.hold_s > 0
        return IdleAction.HOLD if quiet else IdleAction.NOTHING

    def _while_held(self, now_s: float, unread: Backlog) -> IdleAction:
        if not unread.records:
            self._there_s = None
            return IdleAction.NOTHING
        if self._there_s is None:
            self._there_s = now_s
        enough = unread.records >= self.rule.min_records or now_s - self._there_s >= self.rule.max_wait_s
        return (
            IdleAction.RELEASE
            if enough and now_s - self._held_s >= self.rule.min_held_s
            else IdleAction.NOTHING
        )
