"""Is training live? Decided from offsets and event times of the topic alone; wall time never enters (G8).

initial ──► catching_up ──► caught_up        blocked: at the last stable offset while a transaction is open above it
(history     (behind the       │                  for longer than the joiner takes to commit one
of before    bound)  ▲─────────┘
the start)

unknown, from any of these: the ends are not known now. What was true a moment ago is not told as if it still were.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import deque
from collections.abc import Mapping

from runtime.kafka.record_reader import PartitionLag
from runtime.kafka.topics import Partition


class Liveness(enum.StrEnum):
    INITIAL = "initial"  # records that were there at the start are still to be trained
    CATCHING_UP = "catching_up"
    CAUGHT_UP = "caught_up"
    BLOCKED = "blocked"  # everything readable is trained; an open transaction hides the rest
    UNKNOWN = "unknown"  # Kafka does not say where the topics end: it is away, or has not been asked yet


_WORST = (Liveness.INITIAL, Liveness.BLOCKED, Liveness.CATCHING_UP, Liveness.CAUGHT_UP)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """One observation of all partitions."""

    state: Liveness
    partitions: dict[Partition, Liveness]
    lag_records: int | None  # None here and below: not known now
    lag_ms: int | None  # event time, of the partition furthest behind
    drained_per_s: float | None  # records by which the lag shrinks; negative while it grows
    eta_s: float | None  # until the lag is gone at this rate; None = not foreseeable, 0 = there


_NOT_KNOWN = Report(state=Liveness.UNKNOWN, partitions={}, lag_records=None, lag_ms=None, drained_per_s=None, eta_s=None)


class CaughtUp:
    """Call `observe` about once a second with a monotonic clock, which only measures how long a lag has been small."""

    def __init__(self, *, bound_ms: int, hold_s: float = 2.0, pinned_s: float = 10.0, rate_window_s: float = 30.0) -> None:
        self.bound_ms, self.hold_s, self.pinned_s, self.rate_window_s = bound_ms, hold_s, pinned_s, rate_window_s
        self._start_ends: dict[Partition, int] = {}
        self._small_since_s: dict[Partition, float] = {}
        self._hidden_since: dict[Partition, tuple[int, float]] = {}  # partition → (stable end, since when it hides something)
        self._history: deque[tuple[float, int]] = deque()

    def observe(self, lags: Mapping[Partition, PartitionLag], now_s: float) -> Report:
        """`lags` of every partition; {} = the ends are not known, so nothing is."""
        if not lags:
            self._small_since_s.clear()
            self._history.clear()
            return _NOT_KNOWN
        states = {p: self._state(p, lag, now_s) for p, lag in lags.items()}
        records = sum(lag.records for lag in lags.values())
        rate = self._rate(records, now_s)
        return Report(
            state=min(states.values(), key=_WORST.index),
            partitions=states,
            lag_records=records,
            lag_ms=max(lag.event_ms for lag in lags.values()),
            drained_per_s=rate,
            eta_s=0.0 if not records else records / rate if rate > 0 else None,
        )

    def _state(self, p: Partition, lag: PartitionLag, now_s: float) -> Liveness:
        start_end = self._start_ends.setdefault(p, lag.stable_end)
        if self._is_pinned(p, lag, now_s):
            self._small_since_s.pop(p, None)
            return Liveness.BLOCKED
        if lag.position < start_end:
            return Liveness.INITIAL
        if lag.records and (lag.event_ms > self.bound_ms or not lag.position_ms):
            self._small_since_s.pop(p, None)
            return Liveness.CATCHING_UP
        since_s = self._small_since_s.setdefault(p, now_s)
        return Liveness.CAUGHT_UP if now_s - since_s >= self.hold_s else Liveness.CATCHING_UP

    def _is_pinned(self, p: Partition, lag: PartitionLag, now_s: float) -> bool:
        """Everything readable is given, and the same open transaction has hidden the rest for a while, or for much event time."""
        if lag.records or lag.high_watermark <= lag.stable_end:
            self._hidden_since.pop(p, None)
            return False
        stable_end, since_s = self._hidden_since.get(p, (-1, now_s))
        if stable_end != lag.stable_end:
            since_s = now_s
        self._hidden_since[p] = (lag.stable_end, since_s)
        hidden_ms = lag.newest_ms - lag.position_ms if lag.position_ms else 0
        return now_s - since_s >= self.pinned_s or hidden_ms > self.bound_ms

    def _rate(self, records: int, now_s: float) -> float:
        history = self._history
        history.append((now_s, records))
        while len(history) > 2 and now_s - history[0][0] > self.rate_window_s:
            history.popleft()
        before, elapsed_s = history[0][1], now_s - history[0][0]
        return (before - records) / elapsed_s if elapsed_s > 0 else 0.0
