"""Is training live? Decided from offsets, event times of the topic and a monotonic clock; wall time never enters (G8).

                  ┌───────────► falling_behind ◄──┐         of a partition, and of all together the worst of those that
                  │                  ▲ │          │         are not idle
initial ──► catching_up ◄────────────┼─┘          │
(history)         │  ▲               │            │         stalled    records are there, none is consumed
                  ▼  └───────────────┴── caught_up          blocked    what is there can't be read, with the reason
             caught_up ◄──► idle (nothing comes)            held       somebody stopped training, with the reason

unknown, from any of these: a reading can't be taken now. What was true a moment ago is not told as if it still were.
The rules are on docs/operations/caught-up.md. The paper: Ads infrastructure, §III A (initial and caught-up training).

One partition, observed again and again: how far behind it is, how fast it moves, whether it is stuck. See `caught_up`.
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
    """From the best to the worst: the worst partition decides."""

    IDLE = "idle"  # nothing has come for a while, and nothing is left
    CAUGHT_UP = "caught_up"
    CATCHING_UP = "catching_up"
    FALLING_BEHIND = "falling_behind"  # the lag surely grows
    INITIAL = (
        "initial"  # what was there when the initial phase began, or at the start, is still to be trained
    )
    STALLED = "stalled"
    BLOCKED = "blocked"
    UNKNOWN = "unknown"  # Kafka does not say where the topics end: it is away, or has not been asked yet
    HELD = "held"


class ReadPhase(enum.StrEnum):
    """What training is told to do."""

    READ = "read"  # whatever is there
    HISTORY = "history"  # what was there when the initial phase began, as it is handed out
    WAIT = "wait"  # all that was handed out of it is trained
    STREAM = "stream"  # what lies behind that


_RANK = {state: rank for rank, state in enumerate(TrainingState)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LagStatus:
    """Where a partition, or everything, stands. None: not known now."""

    state: TrainingState
    reason: str = ""  # of a state that isn't good, and of a loss
    in_state_s: float = 0.0
    lag_records: int | None = None  # to the last stable offset
    hidden_records: int | None = None  # from there to the high watermark
    lag_ms: int | None = None  # event time; of everything: of the partition furthest behind
    arrival: Estimate | None = None
    consumption: Estimate | None = None
    drain: Estimate | None = None
    eta: TimeLeft = UNKNOWN_TIME_LEFT
    lost_records: int = 0  # deleted before they were read, since this process watches
    retention_share: float | None = (
        None  # lag / what retention keeps, where it has begun to delete: at 1 records are lost
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Observation:
    """One look at all partitions."""

    overall: LagStatus
    partitions: dict[Partition, LagStatus]
    state_seconds: dict[TrainingState, float]  # how long everything was in each state so far


class _Stay:
    """A state, and since when."""

    def __init__(self) -> None:
        self.state: TrainingState | None = None
        self.since_s = self.seen_s = 0.0
        self.seconds: dict[TrainingState, float] = {}

    def note(self, state: TrainingState, now_s: float) -> float:
        """How long it has lasted. What lies between two looks counts for the state of the first."""
        if self.state is not None:
            self.seconds[self.state] = self.seconds.get(self.state, 0.0) + now_s - self.seen_s
        if state is not self.state:
            self.state, self.since_s = state, now_s
        self.seen_s = now_s
        return now_s - self.since_s


class CaughtUpDetector:
    """Call `observe` about once a second with a monotonic clock."""

    def __init__(self, patience: CaughtUpLimits) -> None:
        self.patience = patience
        self._watches: dict[Partition, PartitionTracker] = {}
        self._stays: dict[Partition, _Stay] = {}
        self._overall, self._meter, self._course = _Stay(), RateMeter(patience.window_s), ReadPhase.READ

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
        """`lags`: {} = the ends are not known, so nothing is; one of `expected` (None: those of before, too) that is missing is
        unknown. `held`, `obstacle`: why training stands still or can't go on, "" = it doesn't, it can."""
        self._course = phase
        wanted = {*self._watches, *lags} if expected is None else set(expected)
        for gone in self._stays.keys() - wanted:
            self._watches.pop(gone, None)
            del self._stays[gone]
            self._meter.clear()
        for p in wanted:
            self._note(p, lags.get(p), now_s)
        standings = {p: self._standing(p, now_s) for p in sorted(wanted)}
        worst = self._worst(standings, none_expected=expected is not None and not wanted)
        overall = self._together(standings, now_s, *self._stopped(worst, held, obstacle))
        return Observation(overall=overall, partitions=standings, state_seconds=dict(self._overall.seconds))

    def _note(self, p: Partition, lag: PartitionLag | None, now_s: float) -> None:
        if lag is None:
            if p in self._watches:  # afterwards it has to be good for a while anew
                self._watches[p].forget()
            self._meter.clear()
        elif p in self._watches:
            self._watches[p].note(lag, now_s)
        else:
            self._watches[p] = PartitionTracker(lag, now_s, self.patience)

    def _standing(self, p: Partition, now_s: float) -> LagStatus:
        watch, stay = self._watches.get(p), self._stays.setdefault(p, _Stay())
        if watch is None or not watch.is_known:
            return LagStatus(
                state=TrainingState.UNKNOWN,
                reason="Kafka does not tell where it ends",
                in_state_s=stay.note(TrainingState.UNKNOWN, now_s),
                lost_records=watch.lost if watch else 0,
            )
        state, reason = self._state(watch, stay.state, now_s)
        return LagStatus(
            state=state,
            reason=reason or watch.loss(now_s),
            in_state_s=stay.note(state, now_s),
            lag_records=watch.lag.records,
            hidden_records=watch.lag.hidden,
            lag_ms=watch.lag_ms(now_s),
            arrival=watch.meter.arrival,
            consumption=watch.meter.consumption,
            drain=watch.meter.drain,
            eta=time_left(watch.lag.records, watch.meter.drain),
            lost_records=watch.lost,
            retention_share=watch.retention_share,
        )

    def _state(
        self, watch: PartitionTracker, before: TrainingState | None, now_s: float
    ) -> tuple[TrainingState, str]:
        """(state, reason) by the first rule that holds."""
        if obstacle := watch.obstacle(now_s):
            return TrainingState.BLOCKED, obstacle
        if (
            watch.is_stuck(now_s)
            and self._course is not ReadPhase.WAIT
            and not self._waits_its_turn(watch, now_s)
        ):
            return (
                TrainingState.STALLED,
                f"{watch.lag.records} records are there, and none was trained for {self.patience.stalled_s:g} s",
            )
        before_the_start = self._course is ReadPhase.READ and watch.lag.position < watch.start_end
        if before_the_start or self._course in (ReadPhase.HISTORY, ReadPhase.WAIT):
            return TrainingState.INITIAL, ""
        if watch.is_idle(now_s):
            return TrainingState.IDLE, ""
        if watch.small_for_s(now_s) >= self.patience.hold_s and watch.is_small:
            return TrainingState.CAUGHT_UP, ""
        lag_ms = watch.lag_ms(now_s)
        little = lag_ms is not None and lag_ms <= 2 * self.patience.lag_ms
        if before in (TrainingState.CAUGHT_UP, TrainingState.IDLE) and (
            watch.is_small or (little and watch.large_for_s(now_s) < self.patience.hold_s)
        ):
            return TrainingState.CAUGHT_UP, ""
        return self._direction(watch.meter.drain, before), ""

    def _direction(self, drain: Estimate | None, before: TrainingState | None) -> TrainingState:
        """Behind: does it get better? Only a rate that is surely of the other sign changes what was said."""
        if drain is not None and drain.high is not None and drain.high < 0:
            return TrainingState.FALLING_BEHIND
        growing = before is TrainingState.FALLING_BEHIND and (
            drain is None or drain.low is None or drain.low <= 0
        )
        return TrainingState.FALLING_BEHIND if growing else TrainingState.CATCHING_UP

    def _waits_its_turn(self, watch: PartitionTracker, now_s: float) -> bool:
        """Partitions are merged by time: others move, and are not yet beyond everything that this one still has."""
        moving = [
            w.lag.position_ms
            for w in self._watches.values()
            if now_s - w.moved_s < self.patience.stalled_s and w.is_known
        ]
        return bool(moving) and max(moving) <= watch.lag.newest_ms

    def _together(
        self, standings: Mapping[Partition, LagStatus], now_s: float, state: TrainingState, reason: str
    ) -> LagStatus:
        known = [s for s in standings.values() if s.state is not TrainingState.UNKNOWN]
        lost = sum(s.lost_records for s in standings.values())
        if len(known) < len(standings) or not known:
            return LagStatus(
                state=state, reason=reason, in_state_s=self._overall.note(state, now_s), lost_records=lost
            )
        watches = self._watches.values()
        self._meter.note(now_s, sum(w.arrived for w in watches), sum(w.consumed for w in watches))
        records = sum(w.lag.records for w in watches)
        if state in (TrainingState.CATCHING_UP, TrainingState.FALLING_BEHIND):
            state = self._direction(self._meter.drain, self._overall.state)
        return LagStatus(
            state=state,
            reason=reason,
            in_state_s=self._overall.note(state, now_s),
            lag_records=records,
            hidden_records=sum(w.lag.hidden for w in watches),
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
    def _stopped(worst: tuple[TrainingState, str], held: str, obstacle: str) -> tuple[TrainingState, str]:
        """What stops all training is worse than what a partition says, but for what isn't known."""
        if held:
            return TrainingState.HELD, held
        return (
            (TrainingState.BLOCKED, obstacle) if obstacle and worst[0] is not TrainingState.UNKNOWN else worst
        )

    @staticmethod
    def _worst(standings: Mapping[Partition, LagStatus], none_expected: bool) -> tuple[TrainingState, str]:
        """Idle only if all are. The reason names the partition."""
        if none_expected:
            return TrainingState.IDLE, ""
        if not standings:
            return TrainingState.UNKNOWN, "Kafka has not told where the topics end"
        (topic, number), worst = max(
            standings.items(), key=lambda item: (_RANK[item[1].state], bool(item[1].reason))
        )
        if worst.reason:
            return worst.state, f"{topic}-{number}: {worst.reason}"
        told = next((f"{t}-{n}: {s.reason}" for (t, n), s in standings.items() if s.reason), "")
        return worst.state, told


_MAX_ENDS = 512


@dataclasses.dataclass(frozen=True, kw_only=True)
class CaughtUpLimits:
    """Where states change; seconds of a monotonic clock unless said otherwise."""

    lag_ms: int  # event time: so little is as good as nothing
    hold_s: float = 2.0  # for how long it must have been little (or, up to twice lag_ms, too much) for the state to change
    pinned_s: float = 10.0  # an open transaction that hides records is in the way after this
    stalled_s: float = 60.0  # records are there and none is consumed
    idle_s: float = 60.0  # nothing comes, and nothing is left
    loud_s: float = 3600.0  # for how long a loss is told as the reason
    window_s: float = 60.0  # of rates


class PartitionTracker:
    """Facts of one partition after the last `note`; which state follows from them is decided in `caught_up`."""

    def __init__(self, lag: PartitionLag, now_s: float, patience: CaughtUpLimits) -> None:
        self.patience, self.lag = (
            patience,
            dataclasses.replace(lag, lost=0),
        )  # a loss before the first look is told, too
        self.start_end = lag.stable_end  # what was there before the start ends here
        self.arrived = self.consumed = self.lost = self._gap = 0
        self.meter = RateMeter(patience.window_s)
        self.moved_s = self.grew_s = now_s
        self.is_known, self.is_small = True, False
        self._lost_s = self._pinned_since_s = self._beyond_since_s = self._small_since_s = (
            self._large_since_s
        ) = -1.0
        self._ends: deque[tuple[float, int]] = deque(
            [(now_s, lag.stable_end)]
        )  # when a stable end was first seen
        self._newest = (
            lag.newest_ms,
            lag.high_watermark,
        )  # newest event time, and behind which offset at the latest it lies
        self.note(lag, now_s)
        self._gap = 0

    def note(self, lag: PartitionLag, now_s: float) -> None:
        """The next observation."""
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
        self.is_small = lag_ms is not None and lag_ms <= self.patience.lag_ms and not self.obstacle(now_s)
        self._small_since_s = self._since(self._small_since_s, self.is_small, now_s)
        self._large_since_s = self._since(self._large_since_s, not self.is_small, now_s)

    def forget(self) -> None:
        """It can't be observed now: rates and durations begin anew."""
        self.is_known = False
        self.meter.clear()
        self._pinned_since_s = self._beyond_since_s = self._small_since_s = self._large_since_s = -1.0

    def lag_ms(self, now_s: float) -> int | None:
        """Event time from the last record given to the newest one; where that can't be told, or is less, for how long the next
        record has been there to be read, by the monotonic clock. None: behind, and no record was given yet.

        The newest event time of a partition may lie behind the position (a clock was ahead for a while): then it says nothing
        about what is still to be read.
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
        return not self.lag.records and now_s - self.grew_s >= self.patience.idle_s

    def is_stuck(self, now_s: float) -> bool:
        """Nothing was consumed for long, though records are there."""
        return self.lag.records > 0 and now_s - max(self.moved_s, self._ends[0][0]) >= self.patience.stalled_s

    def small_for_s(self, now_s: float) -> float:
        return now_s - self._small_since_s if self._small_since_s >= 0 else 0.0

    def large_for_s(self, now_s: float) -> float:
        return now_s - self._large_since_s if self._large_since_s >= 0 else 0.0

    def obstacle(self, now_s: float) -> str:
        """What keeps the rest from being read, "" = nothing."""
        lag = self.lag
        if lag.position < lag.oldest:
            return f"{lag.oldest - lag.position} records were deleted before they were read: retention is too short"
        if self._beyond_since_s >= 0 and now_s - self._beyond_since_s >= self.patience.pinned_s:
            return f"the log ends at {lag.high_watermark}, before {lag.position}, which was read: records were lost"
        hidden_ms = lag.newest_ms - lag.position_ms if lag.position_ms and self._hides() else 0
        pinned = self._pinned_since_s >= 0 and now_s - self._pinned_since_s >= self.patience.pinned_s
        if pinned or hidden_ms > self.patience.lag_ms:
            return f"an open transaction hides {lag.hidden} records from offset {lag.stable_end} on"
        return ""

    def loss(self, now_s: float) -> str:
        """A loss that is to be told, "" = none."""
        if not self.lost or now_s - self._lost_s > self.patience.loud_s:
            return ""
        return f"{self.lost} records were gone before they were read"

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
        moved = max(
            lag.position - before.position, 0
        )  # a position that was put back is no consumption, nor is the way over a gap
        self._gap += lost
        over = min(self._gap, moved)
        self._gap -= over
        self.consumed += moved - over
        self.meter.note(now_s, self.arrived, self.consumed)

    @staticmethod
    def _since(since_s: float, holds: bool, now_s: float) -> float:
        """When it began to hold; -1 = it doesn't."""
        return -1.0 if not holds else now_s if since_s < 0 else since_s
