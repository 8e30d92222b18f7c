"""Is training live? Decided from offsets, event times of the topic and a monotonic clock; wall time never enters (G8).

                  ┌───────────► falling_behind ◄──┐         of a partition, and of all together the worst of those that
                  │                  ▲ │          │         are not idle
initial ──► catching_up ◄────────────┼─┘          │
(history)         │  ▲               │            │         stalled    records are there, none is consumed
                  ▼  └───────────────┴── caught_up          blocked    what is there can't be read, with the reason
             caught_up ◄──► idle (nothing comes)            held       somebody stopped training, with the reason

unknown, from any of these: a reading can't be taken now. What was true a moment ago is not told as if it still were.
The rules are on docs/operations/caught-up.md. The paper: Ads infrastructure, §III A (initial and caught-up training).
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Collection, Mapping

from roostream.runtime.kafka.consumer import PartitionLag
from roostream.runtime.kafka.topics import Partition
from trainer.monitoring.partition_watch import PartitionWatch, Patience
from trainer.monitoring.rates import NOT_FORESEEABLE, Estimate, RateMeter, TimeLeft, time_left


class Liveness(enum.StrEnum):
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


class Course(enum.StrEnum):
    """What training is told to do."""

    READ = "read"  # whatever is there
    HISTORY = "history"  # what was there when the initial phase began, as it is handed out
    WAIT = "wait"  # all that was handed out of it is trained
    STREAM = "stream"  # what lies behind that


_RANK = {state: rank for rank, state in enumerate(Liveness)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Standing:
    """Where a partition, or everything, stands. None: not known now."""

    state: Liveness
    reason: str = ""  # of a state that isn't good, and of a loss
    in_state_s: float = 0.0
    lag_records: int | None = None  # to the last stable offset
    hidden_records: int | None = None  # from there to the high watermark
    lag_ms: int | None = None  # event time; of everything: of the partition furthest behind
    arrival: Estimate | None = None
    consumption: Estimate | None = None
    drain: Estimate | None = None
    eta: TimeLeft = NOT_FORESEEABLE
    lost_records: int = 0  # deleted before they were read, since this process watches
    retention_share: float | None = (
        None  # lag / what retention keeps, where it has begun to delete: at 1 records are lost
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Observation:
    """One look at all partitions."""

    overall: Standing
    partitions: dict[Partition, Standing]
    state_seconds: dict[Liveness, float]  # how long everything was in each state so far


class _Stay:
    """A state, and since when."""

    def __init__(self) -> None:
        self.state: Liveness | None = None
        self.since_s = self.seen_s = 0.0
        self.seconds: dict[Liveness, float] = {}

    def note(self, state: Liveness, now_s: float) -> float:
        """How long it has lasted. What lies between two looks counts for the state of the first."""
        if self.state is not None:
            self.seconds[self.state] = self.seconds.get(self.state, 0.0) + now_s - self.seen_s
        if state is not self.state:
            self.state, self.since_s = state, now_s
        self.seen_s = now_s
        return now_s - self.since_s


class CaughtUp:
    """Call `observe` about once a second with a monotonic clock."""

    def __init__(self, patience: Patience) -> None:
        self.patience = patience
        self._watches: dict[Partition, PartitionWatch] = {}
        self._stays: dict[Partition, _Stay] = {}
        self._overall, self._meter, self._course = _Stay(), RateMeter(patience.window_s), Course.READ

    def observe(
        self,
        lags: Mapping[Partition, PartitionLag],
        now_s: float,
        *,
        expected: Collection[Partition] | None = None,
        held: str = "",
        obstacle: str = "",
        course: Course = Course.READ,
    ) -> Observation:
        """`lags`: {} = the ends are not known, so nothing is; one of `expected` (None: those of before, too) that is missing is
        unknown. `held`, `obstacle`: why training stands still or can't go on, "" = it doesn't, it can."""
        self._course = course
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
            self._watches[p] = PartitionWatch(lag, now_s, self.patience)

    def _standing(self, p: Partition, now_s: float) -> Standing:
        watch, stay = self._watches.get(p), self._stays.setdefault(p, _Stay())
        if watch is None or not watch.is_known:
            return Standing(
                state=Liveness.UNKNOWN,
                reason="Kafka does not tell where it ends",
                in_state_s=stay.note(Liveness.UNKNOWN, now_s),
                lost_records=watch.lost if watch else 0,
            )
        state, reason = self._state(watch, stay.state, now_s)
        return Standing(
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

    def _state(self, watch: PartitionWatch, before: Liveness | None, now_s: float) -> tuple[Liveness, str]:
        """(state, reason) by the first rule that holds."""
        if obstacle := watch.obstacle(now_s):
            return Liveness.BLOCKED, obstacle
        if (
            watch.is_stuck(now_s)
            and self._course is not Course.WAIT
            and not self._waits_its_turn(watch, now_s)
        ):
            return (
                Liveness.STALLED,
                f"{watch.lag.records} records are there, and none was trained for {self.patience.stalled_s:g} s",
            )
        before_the_start = self._course is Course.READ and watch.lag.position < watch.start_end
        if before_the_start or self._course in (Course.HISTORY, Course.WAIT):
            return Liveness.INITIAL, ""
        if watch.is_idle(now_s):
            return Liveness.IDLE, ""
        if watch.small_for_s(now_s) >= self.patience.hold_s and watch.is_small:
            return Liveness.CAUGHT_UP, ""
        lag_ms = watch.lag_ms(now_s)
        little = lag_ms is not None and lag_ms <= 2 * self.patience.lag_ms
        if before in (Liveness.CAUGHT_UP, Liveness.IDLE) and (
            watch.is_small or (little and watch.large_for_s(now_s) < self.patience.hold_s)
        ):
            return Liveness.CAUGHT_UP, ""
        return self._direction(watch.meter.drain, before), ""

    def _direction(self, drain: Estimate | None, before: Liveness | None) -> Liveness:
        """Behind: does it get better? Only a rate that is surely of the other sign changes what was said."""
        if drain is not None and drain.high is not None and drain.high < 0:
            return Liveness.FALLING_BEHIND
        growing = before is Liveness.FALLING_BEHIND and (drain is None or drain.low is None or drain.low <= 0)
        return Liveness.FALLING_BEHIND if growing else Liveness.CATCHING_UP

    def _waits_its_turn(self, watch: PartitionWatch, now_s: float) -> bool:
        """Partitions are merged by time: others move, and are not yet beyond everything that this one still has."""
        moving = [
            w.lag.position_ms
            for w in self._watches.values()
            if now_s - w.moved_s < self.patience.stalled_s and w.is_known
        ]
        return bool(moving) and max(moving) <= watch.lag.newest_ms

    def _together(
        self, standings: Mapping[Partition, Standing], now_s: float, state: Liveness, reason: str
    ) -> Standing:
        known = [s for s in standings.values() if s.state is not Liveness.UNKNOWN]
        lost = sum(s.lost_records for s in standings.values())
        if len(known) < len(standings) or not known:
            return Standing(
                state=state, reason=reason, in_state_s=self._overall.note(state, now_s), lost_records=lost
            )
        watches = self._watches.values()
        self._meter.note(now_s, sum(w.arrived for w in watches), sum(w.consumed for w in watches))
        records = sum(w.lag.records for w in watches)
        if state in (Liveness.CATCHING_UP, Liveness.FALLING_BEHIND):
            state = self._direction(self._meter.drain, self._overall.state)
        return Standing(
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
    def _stopped(worst: tuple[Liveness, str], held: str, obstacle: str) -> tuple[Liveness, str]:
        """What stops all training is worse than what a partition says, but for what isn't known."""
        if held:
            return Liveness.HELD, held
        return (Liveness.BLOCKED, obstacle) if obstacle and worst[0] is not Liveness.UNKNOWN else worst

    @staticmethod
    def _worst(standings: Mapping[Partition, Standing], none_expected: bool) -> tuple[Liveness, str]:
        """Idle only if all are. The reason names the partition."""
        if none_expected:
            return Liveness.IDLE, ""
        if not standings:
            return Liveness.UNKNOWN, "Kafka has not told where the topics end"
        (topic, number), worst = max(
            standings.items(), key=lambda item: (_RANK[item[1].state], bool(item[1].reason))
        )
        if worst.reason:
            return worst.state, f"{topic}-{number}: {worst.reason}"
        told = next((f"{t}-{n}: {s.reason}" for (t, n), s in standings.items() if s.reason), "")
        return worst.state, told
