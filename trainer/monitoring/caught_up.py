"""Has training caught up? Decided from offsets, event times of the topic and a monotonic clock, never from
wall time (guarantee G8).

    initial (history) ──► catching_up ◄──► caught_up ◄──► idle (nothing arrives)
                          catching_up ◄──► falling_behind ──► caught_up
    any state ──► stalled, blocked, held or unknown, and back

Each partition has a state; the overall state is that of the worst partition that is not idle. An old state is
never reported as current: it is `unknown` while the offsets cannot be read. The rules are in
docs/concepts/freshness.md. Paper: Ads infrastructure, §III A (initial and caught-up training).
"""

from __future__ import annotations

import dataclasses
import enum
from collections import deque
from collections.abc import Collection, Mapping

from roostream.runtime.kafka.consumer import PartitionLag
from roostream.runtime.kafka.topics import Partition
from trainer.monitoring.rates import UNKNOWN_TIME_LEFT, Estimate, RateMeter, TimeLeft, time_left


class TrainingState(enum.StrEnum):
    """Ordered from best to worst: the worst partition decides."""

    IDLE = "idle"  # nothing has arrived for a while, and nothing is left
    CAUGHT_UP = "caught_up"
    CATCHING_UP = "catching_up"
    FALLING_BEHIND = "falling_behind"  # the lag is growing, with 95 % confidence
    INITIAL = "initial"  # records from before the start, or before the initial phase, are not trained yet
    STALLED = "stalled"
    BLOCKED = "blocked"
    UNKNOWN = "unknown"  # Kafka has not said where the topics end, or cannot be reached
    HELD = "held"


class ReadPhase(enum.StrEnum):
    """What the worker is assigned to read."""

    READ = "read"  # whatever is available
    HISTORY = "history"  # records from before the initial phase, as work units
    WAIT = "wait"  # all assigned units of the history are trained
    STREAM = "stream"  # records after the history


_RANK = {state: rank for rank, state in enumerate(TrainingState)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LagStatus:
    """Lag and state of one partition, or of all together. None: not known now."""

    state: TrainingState
    reason: str = ""  # of a bad state, or of a loss of records
    in_state_s: float = 0.0
    lag_records: int | None = None  # up to the last stable offset
    hidden_records: int | None = None  # between the last stable offset and the high watermark
    lag_ms: int | None = None  # event time; overall: of the partition furthest behind
    arrival: Estimate | None = None
    consumption: Estimate | None = None
    drain: Estimate | None = None
    eta: TimeLeft = UNKNOWN_TIME_LEFT
    lost_records: int = 0  # deleted before they were read, since this process started
    # Lag / records kept by retention, once it has begun to delete; at 1 records are lost
    retention_share: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Observation:
    """Status of all partitions at one time."""

    overall: LagStatus
    partitions: dict[Partition, LagStatus]
    state_seconds: dict[TrainingState, float]  # how long the overall state was each state


class _StateTimer:
    """A state, since when, and the total time of each state."""

    def __init__(self) -> None:
        self.state: TrainingState | None = None
        self.since_s = self.seen_s = 0.0
        self.seconds: dict[TrainingState, float] = {}

    def update(self, state: TrainingState, now_s: float) -> float:
        """Seconds in this state. The time between two observations counts for the state of the first."""
        if self.state is not None:
            self.seconds[self.state] = self.seconds.get(self.state, 0.0) + now_s - self.seen_s
        if state is not self.state:
            self.state, self.since_s = state, now_s
        self.seen_s = now_s
        return now_s - self.since_s


class CaughtUpDetector:
    """Derives the state from lags. Call `observe` about once a second with a monotonic clock."""

    def __init__(self, limits: CaughtUpLimits) -> None:
        self.limits = limits
        self._trackers: dict[Partition, PartitionTracker] = {}
        self._timers: dict[Partition, _StateTimer] = {}
        self._overall, self._meter, self._phase = _StateTimer(), RateMeter(limits.window_s), ReadPhase.READ

    def observe(
        self,
        lags: Mapping[Partition, PartitionLag],
        now_s: float,
        *,
        expected: Collection[Partition] | None = None,
        held: str = "",
        obstacle: str = "",
        phase: ReadPhase = ReadPhase.READ,
    ) -> Observation:
        """Take one observation of all partitions.

        `lags`: {} = the end offsets are unknown. A partition of `expected` (None: those seen before as well)
        that is missing is unknown. `held`, `obstacle`: why training is stopped or cannot continue; "" =
        neither.
        """
        self._phase = phase
        wanted = {*self._trackers, *lags} if expected is None else set(expected)
        for gone in self._timers.keys() - wanted:
            self._trackers.pop(gone, None)
            del self._timers[gone]
            self._meter.clear()
        for p in wanted:
            self._update_tracker(p, lags.get(p), now_s)
        statuses = {p: self._partition_status(p, now_s) for p in sorted(wanted)}
        worst = self._worst(statuses, none_expected=expected is not None and not wanted)
        overall = self._overall_status(statuses, now_s, *self._override(worst, held, obstacle))
        return Observation(overall=overall, partitions=statuses, state_seconds=dict(self._overall.seconds))

    def _update_tracker(self, p: Partition, lag: PartitionLag | None, now_s: float) -> None:
        if lag is None:
            if p in self._trackers:  # afterwards the lag must be small for a while again
                self._trackers[p].forget()
            self._meter.clear()
        elif p in self._trackers:
            self._trackers[p].update(lag, now_s)
        else:
            self._trackers[p] = PartitionTracker(lag, now_s, self.limits)

    def _partition_status(self, p: Partition, now_s: float) -> LagStatus:
        tracker, timer = self._trackers.get(p), self._timers.setdefault(p, _StateTimer())
        if tracker is None or not tracker.is_known:
            return LagStatus(
                state=TrainingState.UNKNOWN,
                reason="Kafka has not reported the end offset of this partition",
                in_state_s=timer.update(TrainingState.UNKNOWN, now_s),
                lost_records=tracker.lost if tracker else 0,
            )
        state, reason = self._state(tracker, timer.state, now_s)
        return LagStatus(
            state=state,
            reason=reason or tracker.loss(now_s),
            in_state_s=timer.update(state, now_s),
            lag_records=tracker.lag.records,
            hidden_records=tracker.lag.hidden,
            lag_ms=tracker.lag_ms(now_s),
            arrival=tracker.meter.arrival,
            consumption=tracker.meter.consumption,
            drain=tracker.meter.drain,
            eta=time_left(tracker.lag.records, tracker.meter.drain),
            lost_records=tracker.lost,
            retention_share=tracker.retention_share,
        )

    def _state(
        self, tracker: PartitionTracker, before: TrainingState | None, now_s: float
    ) -> tuple[TrainingState, str]:
        """(state, reason) by the first rule that applies."""
        if obstacle := tracker.obstacle(now_s):
            return TrainingState.BLOCKED, obstacle
        may_wait = self._phase is ReadPhase.WAIT or self._waits_for_merge(tracker, now_s)
        if tracker.is_stuck(now_s) and not may_wait:
            num, seconds = tracker.lag.records, self.limits.stalled_s
            reason = f"{num} records are available, but none was trained for {seconds:g} s"
            return TrainingState.STALLED, reason
        before_the_start = self._phase is ReadPhase.READ and tracker.lag.position < tracker.start_end
        if before_the_start or self._phase in (ReadPhase.HISTORY, ReadPhase.WAIT):
            return TrainingState.INITIAL, ""
        if tracker.is_idle(now_s):
            return TrainingState.IDLE, ""
        if tracker.small_for_s(now_s) >= self.limits.hold_s and tracker.is_small:
            return TrainingState.CAUGHT_UP, ""
        lag_ms = tracker.lag_ms(now_s)
        is_moderate = lag_ms is not None and lag_ms <= 2 * self.limits.lag_ms
        if before in (TrainingState.CAUGHT_UP, TrainingState.IDLE) and (
            tracker.is_small or (is_moderate and tracker.large_for_s(now_s) < self.limits.hold_s)
        ):
            return TrainingState.CAUGHT_UP, ""
        return self._direction(tracker.meter.drain, before), ""

    def _direction(self, drain: Estimate | None, before: TrainingState | None) -> TrainingState:
        """Behind: is the lag shrinking? Only a rate that is certainly of the other sign changes the state."""
        if drain is not None and drain.high is not None and drain.high < 0:
            return TrainingState.FALLING_BEHIND
        growing = before is TrainingState.FALLING_BEHIND and (
            drain is None or drain.low is None or drain.low <= 0
        )
        return TrainingState.FALLING_BEHIND if growing else TrainingState.CATCHING_UP

    def _waits_for_merge(self, tracker: PartitionTracker, now_s: float) -> bool:
        """Partitions are merged by event time: others are consumed and have not passed the records of this
        one."""
        moving = [
            w.lag.position_ms
            for w in self._trackers.values()
            if now_s - w.moved_s < self.limits.stalled_s and w.is_known
        ]
        return bool(moving) and max(moving) <= tracker.lag.newest_ms

    def _overall_status(
        self, statuses: Mapping[Partition, LagStatus], now_s: float, state: TrainingState, reason: str
    ) -> LagStatus:
        known = [s for s in statuses.values() if s.state is not TrainingState.UNKNOWN]
        lost = sum(s.lost_records for s in statuses.values())
        if len(known) < len(statuses) or not known:
            return LagStatus(
                state=state, reason=reason, in_state_s=self._overall.update(state, now_s), lost_records=lost
            )
        trackers = self._trackers.values()
        self._meter.update(now_s, sum(w.arrived for w in trackers), sum(w.consumed for w in trackers))
        records = sum(w.lag.records for w in trackers)
        if state in (TrainingState.CATCHING_UP, TrainingState.FALLING_BEHIND):
            state = self._direction(self._meter.drain, self._overall.state)
        return LagStatus(
            state=state,
            reason=reason,
            in_state_s=self._overall.update(state, now_s),
            lag_records=records,
            hidden_records=sum(w.lag.hidden for w in trackers),
            lag_ms=None if any(s.lag_ms is None for s in known) else max(s.lag_ms or 0 for s in known),
            arrival=self._meter.arrival,
            consumption=self._meter.consumption,
            drain=self._meter.drain,
            eta=time_left(records, self._meter.drain),
            lost_records=lost,
            retention_share=max(
                (s.retention_share for s in known if s.retention_share is not None), default=None
            ),
        )

    @staticmethod
    def _override(worst: tuple[TrainingState, str], held: str, obstacle: str) -> tuple[TrainingState, str]:
        """A reason that stops all training overrides the partitions' state, except `unknown`."""
        if held:
            return TrainingState.HELD, held
        return (
            (TrainingState.BLOCKED, obstacle) if obstacle and worst[0] is not TrainingState.UNKNOWN else worst
        )

    @staticmethod
    def _worst(statuses: Mapping[Partition, LagStatus], none_expected: bool) -> tuple[TrainingState, str]:
        """Idle only if all partitions are. The reason names the partition."""
        if none_expected:
            return TrainingState.IDLE, ""
        if not statuses:
            return TrainingState.UNKNOWN, "Kafka has not reported the end offsets of the topics"
        (topic, number), worst = max(
            statuses.items(), key=lambda item: (_RANK[item[1].state], bool(item[1].reason))
        )
        if worst.reason:
            return worst.state, f"{topic}-{number}: {worst.reason}"
        first_reason = next((f"{t}-{n}: {s.reason}" for (t, n), s in statuses.items() if s.reason), "")
        return worst.state, first_reason


_MAX_ENDS = 512


@dataclasses.dataclass(frozen=True, kw_only=True)
class CaughtUpLimits:
    """Thresholds between states; seconds of a monotonic clock unless stated otherwise."""

    lag_ms: int  # event time: a lag up to this counts as caught up
    # How long the lag must be small, or (up to twice lag_ms) large, before the state changes
    hold_s: float = 2.0
    pinned_s: float = 10.0  # an open transaction that hides records blocks after this time
    stalled_s: float = 60.0  # records exist and none is consumed
    idle_s: float = 60.0  # nothing arrives and nothing is left
    report_loss_s: float = 3600.0  # how long a loss of records is reported as the reason
    window_s: float = 60.0  # for rates


class PartitionTracker:
    """Lag, rates and obstacles of one partition after the last `update`."""

    def __init__(self, lag: PartitionLag, now_s: float, limits: CaughtUpLimits) -> None:
        # A loss before the first observation is reported too.
        self.limits, self.lag = limits, dataclasses.replace(lag, lost=0)
        self.start_end = lag.stable_end  # records before this offset existed at the start
        self.arrived = self.consumed = self.lost = self._gap = 0
        self.meter = RateMeter(limits.window_s)
        self.moved_s = self.grew_s = now_s
        self.is_known, self.is_small = True, False
        self._lost_s = self._pinned_since_s = self._beyond_since_s = -1.0
        self._small_since_s = self._large_since_s = -1.0
        self._ends = deque([(now_s, lag.stable_end)])  # when each stable end was first seen
        self._newest = lag.newest_ms, lag.high_watermark  # newest event time, and an offset at or after it
        self.update(lag, now_s)
        self._gap = 0

    def update(self, lag: PartitionLag, now_s: float) -> None:
        """Update the counters and timers of the partition with the newest measurement of its lag, taken at
        `now_s` of a monotonic clock."""
        before, self.lag, self.is_known = self.lag, lag, True
        self._count(before, now_s)
        if lag.stable_end != self._ends[-1][1]:
            self._ends.append((now_s, lag.stable_end))
            if len(self._ends) > _MAX_ENDS:
                del self._ends[1]
        while len(self._ends) > 1 and self._ends[0][1] <= lag.position:
            self._ends.popleft()
        if lag.newest_ms != self._newest[0]:
            self._newest = lag.newest_ms, lag.high_watermark
        self._pinned_since_s = self._since(
            self._pinned_since_s, self._hides() and before.stable_end == lag.stable_end, now_s
        )
        beyond = lag.position > lag.high_watermark and before.high_watermark == lag.high_watermark
        self._beyond_since_s = self._since(self._beyond_since_s, beyond, now_s)
        lag_ms = self.lag_ms(now_s)
        self.is_small = lag_ms is not None and lag_ms <= self.limits.lag_ms and not self.obstacle(now_s)
        self._small_since_s = self._since(self._small_since_s, self.is_small, now_s)
        self._large_since_s = self._since(self._large_since_s, not self.is_small, now_s)

    def forget(self) -> None:
        """The partition cannot be observed now: rates and durations start again."""
        self.is_known = False
        self.meter.clear()
        self._pinned_since_s = self._beyond_since_s = self._small_since_s = self._large_since_s = -1.0

    def lag_ms(self, now_s: float) -> int | None:
        """Event time from the last consumed record to the newest one. If that is unknown or smaller: how long
        the next record has been readable, by the monotonic clock. None: behind, and no record was consumed
        yet.

        The newest event time may lie before the position if a clock was ahead; then it says nothing about
        unread records.
        """
        lag = self.lag
        if not lag.records:
            return 0
        if not lag.position_ms:
            return None
        waits_ms = int(1000 * (now_s - self._ends[0][0]))
        _, behind = self._newest
        return waits_ms if lag.position >= behind else max(lag.event_ms, waits_ms)

    @property
    def retention_share(self) -> float | None:
        kept = self.lag.stable_end - self.lag.oldest
        return min(self.lag.records / kept, 1.0) if self.lag.oldest and kept > 0 else None

    def is_idle(self, now_s: float) -> bool:
        return not self.lag.records and now_s - self.grew_s >= self.limits.idle_s

    def is_stuck(self, now_s: float) -> bool:
        """Nothing was consumed for `stalled_s`, though records exist."""
        return self.lag.records > 0 and now_s - max(self.moved_s, self._ends[0][0]) >= self.limits.stalled_s

    def small_for_s(self, now_s: float) -> float:
        return now_s - self._small_since_s if self._small_since_s >= 0 else 0.0

    def large_for_s(self, now_s: float) -> float:
        return now_s - self._large_since_s if self._large_since_s >= 0 else 0.0

    def obstacle(self, now_s: float) -> str:
        """What prevents reading the rest; "" = nothing."""
        lag = self.lag
        if lag.position < lag.oldest:
            num = lag.oldest - lag.position
            return f"{num} records were deleted before they were read: extend the topic's retention"
        if self._beyond_since_s >= 0 and now_s - self._beyond_since_s >= self.limits.pinned_s:
            return f"the log ends at {lag.high_watermark}, but {lag.position} was read: records were lost"
        hidden_ms = lag.newest_ms - lag.position_ms if lag.position_ms and self._hides() else 0
        pinned = self._pinned_since_s >= 0 and now_s - self._pinned_since_s >= self.limits.pinned_s
        if pinned or hidden_ms > self.limits.lag_ms:
            return f"an open transaction hides {lag.hidden} records from offset {lag.stable_end} on"
        return ""

    def loss(self, now_s: float) -> str:
        """A loss of records that is still to be reported; "" = none."""
        if not self.lost or now_s - self._lost_s > self.limits.report_loss_s:
            return ""
        return f"{self.lost} records were deleted before they were read"

    def _hides(self) -> bool:
        return not self.lag.records and self.lag.hidden > 0

    def _count(self, before: PartitionLag, now_s: float) -> None:
        lag, lost = self.lag, max(self.lag.lost - before.lost, 0)
        if lost:
            self.lost, self._lost_s = self.lost + lost, now_s
        if lag.position != before.position:
            self.moved_s = now_s
        if lag.stable_end != before.stable_end:
            self.grew_s = now_s
        self.arrived += max(lag.stable_end - before.stable_end, 0)
        # Neither a position that was reset nor skipping a gap is consumption.
        moved = max(lag.position - before.position, 0)
        self._gap += lost
        over = min(self._gap, moved)
        self._gap -= over
        self.consumed += moved - over
        self.meter.update(now_s, self.arrived, self.consumed)

    @staticmethod
    def _since(since_s: float, holds: bool, now_s: float) -> float:
        """When the condition began to hold; -1 = it does not."""
        return -1.0 if not holds else now_s if since_s < 0 else since_s
