"""Is training live? Told from offsets and event times."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roostream.runtime.clock import FakeClock
from roostream.runtime.kafka.consumer import PartitionLag
from trainer.monitoring.caught_up import (
    CaughtUpDetector,
    CaughtUpLimits,
    LagStatus,
    Observation,
    ReadPhase,
    TrainingState,
)
from trainer.monitoring.rates import Estimate, RateMeter, time_left
from trainer.worker_monitor import liveness_report

T0 = 1_700_000_000_000
P0, P1 = ("samples", 0), ("samples", 1)
H2_MS = 7_200_000


def at(
    position: int, end: int, *, high: int | None = None, at_ms: int = 0, newest_ms: int = 0, **more: int
) -> PartitionLag:
    return PartitionLag(
        position=position,
        stable_end=end,
        high_watermark=end if high is None else high,
        position_ms=T0 + at_ms if position else 0,
        newest_ms=T0 + newest_ms if end else 0,
        **more,
    )


def watching(**bounds: float) -> CaughtUpDetector:
    return CaughtUpDetector(CaughtUpLimits(**{"lag_ms": 1000, "hold_s": 2, **bounds}))  # type: ignore[arg-type]


def look(watch: CaughtUpDetector, lag: PartitionLag, now_s: float) -> LagStatus:
    return watch.observe({P0: lag}, now_s).overall


def live(watch: CaughtUpDetector, *, position: int = 50, until_s: float = 3) -> CaughtUpDetector:
    """Caught up at `until_s`."""
    for second in range(int(until_s) + 1):
        found = look(watch, at(position, position, at_ms=50_000, newest_ms=50_000), second)
    assert found.state is TrainingState.CAUGHT_UP
    return watch


def test_overall_rates_restart_when_a_partition_leaves() -> None:
    watch = watching()
    for second in range(3):
        before = watch.observe(
            {P0: at(10 * second, 100), P1: at(20 * second, 100)}, second, expected=(P0, P1)
        ).overall
    assert before.consumption is not None and before.consumption.value == pytest.approx(30)
    assert watch.observe({P0: at(30, 100)}, 3, expected=(P0,)).overall.consumption is None, (
        "sums of others can't be compared"
    )
    after = watch.observe({P0: at(40, 100)}, 4, expected=(P0,)).overall
    assert after.consumption is not None and after.consumption.value == pytest.approx(10)


def test_history_then_catching_up_then_caught_up() -> None:
    watch = watching()
    assert look(watch, at(0, 100, newest_ms=100_000), 0).state is TrainingState.INITIAL
    assert look(watch, at(99, 120, at_ms=99_000, newest_ms=120_000), 1).state is TrainingState.INITIAL
    assert look(watch, at(100, 130, at_ms=100_000, newest_ms=130_000), 2).state is TrainingState.CATCHING_UP
    near = at(139, 140, at_ms=139_500, newest_ms=140_000)
    assert look(watch, near, 3).state is TrainingState.CATCHING_UP, "not for long enough"
    assert look(watch, at(150, 150, at_ms=150_000, newest_ms=150_000), 5).state is TrainingState.CAUGHT_UP
    assert look(watch, at(150, 190, at_ms=150_000, newest_ms=190_000), 6).state is TrainingState.CATCHING_UP


def test_assigned_history_is_initial_until_the_stream_begins() -> None:
    watch = watching(stalled_s=5)
    lag = at(100, 100, at_ms=100_000, newest_ms=100_000)
    states = []
    for second, phase in enumerate([ReadPhase.HISTORY] * 4 + [ReadPhase.WAIT] * 2 + [ReadPhase.STREAM] * 4):
        states.append(watch.observe({P0: lag}, second, phase=phase).overall.state)
    assert states[:6] == [TrainingState.INITIAL] * 6, "nothing is behind, and it is still history"
    assert states[6:] == [TrainingState.CAUGHT_UP] * 4
    late = watching()
    behind = at(10, 100, at_ms=10_000, newest_ms=100_000)
    assert late.observe({P0: behind}, 0, phase=ReadPhase.STREAM).overall.state is TrainingState.CATCHING_UP
    assert watching().observe({P0: behind}, 0).overall.state is TrainingState.INITIAL, (
        "without phases: it was there at the start"
    )


def test_waiting_for_work_units_is_not_stalled() -> None:
    watch = watching(stalled_s=5)
    lag = at(50, 100, at_ms=50_000, newest_ms=100_000)
    waits = [watch.observe({P0: lag}, second, phase=ReadPhase.WAIT).overall.state for second in range(10)]
    assert set(waits) == {TrainingState.INITIAL}
    assert watch.observe({P0: lag}, 10, phase=ReadPhase.HISTORY).overall.state is TrainingState.STALLED


def test_a_short_moderate_lag_stays_caught_up() -> None:
    watch = live(watching())
    over = {"at_ms": 50_000, "newest_ms": 51_500}
    assert look(watch, at(50, 60, **over), 4).state is TrainingState.CAUGHT_UP
    assert look(watch, at(60, 60, at_ms=51_500, newest_ms=51_500), 5).state is TrainingState.CAUGHT_UP
    assert look(watch, at(60, 70, at_ms=51_500, newest_ms=53_000), 6).state is TrainingState.CAUGHT_UP
    assert look(watch, at(60, 70, at_ms=51_500, newest_ms=53_000), 8.5).state is TrainingState.CATCHING_UP, (
        "it stays too large"
    )
    far = {"at_ms": 50_000, "newest_ms": 52_500}  # more than twice the limit
    assert look(live(watching()), at(50, 60, **far), 4).state is TrainingState.CATCHING_UP


def test_falling_behind_begins_and_ends_with_certainty_only() -> None:
    watch = watching(window_s=20)
    look(watch, at(0, 0), 0)
    states = []
    for second in range(1, 61):
        rate = 10 if second <= 30 else 40  # of consumption; 20 arrive
        consumed = 10 * min(second, 30) + 40 * max(second - 30, 0)
        found = look(
            watch, at(consumed, 20 * second + 400, at_ms=consumed, newest_ms=900_000 + second), float(second)
        )
        states.append((rate, found.state))
    assert (10, TrainingState.FALLING_BEHIND) in states and (40, TrainingState.CATCHING_UP) in states
    changes = [b for a, b in itertools.pairwise(states) if a[1] is not b[1]]
    assert len(changes) == 2, "there and back, without flapping"
    assert found.drain is not None and found.drain.value == pytest.approx(20)
    assert found.eta.s == pytest.approx(found.lag_records / 20) and found.eta.high_s is not None  # type: ignore[operator]


def test_empty_topics_are_caught_up_and_then_idle() -> None:
    watch = watching()
    assert watch.observe({}, 0).overall.state is TrainingState.UNKNOWN, "the ends aren't known yet"
    assert watching().observe({}, 0, expected=()).overall.state is TrainingState.IDLE, "no partitions"
    watch.observe({P0: at(0, 0), P1: at(0, 0)}, 1)
    found = watch.observe({P0: at(0, 0), P1: at(0, 0)}, 3).overall
    assert found.state is TrainingState.CAUGHT_UP and found.eta == (0, 0, 0) and found.lag_ms == 0
    assert watch.observe({P0: at(0, 0), P1: at(0, 0)}, 61).overall.state is TrainingState.IDLE
    first = at(3, 4, at_ms=500, newest_ms=900)
    assert watch.observe({P0: first, P1: at(0, 0)}, 62).overall.state is TrainingState.CAUGHT_UP, (
        "what comes is as live as before"
    )


def test_an_idle_partition_does_not_decide_the_overall_state() -> None:
    watch = watching()
    for second in range(70):
        busy = at(10 * second + 10, 10 * second + 10, at_ms=1000 * second, newest_ms=1000 * second)
        found = watch.observe({P0: at(5, 5, at_ms=5, newest_ms=5), P1: busy}, float(second))
    assert {p: s.state for p, s in found.partitions.items()} == {
        P0: TrainingState.IDLE,
        P1: TrainingState.CAUGHT_UP,
    }
    assert (found.overall.state, found.overall.lag_ms) == (TrainingState.CAUGHT_UP, 0)
    behind = at(710, 900, at_ms=70_000, newest_ms=99_000)
    assert (
        watch.observe({P0: at(5, 5, at_ms=5, newest_ms=5), P1: behind}, 70).overall.state
        is TrainingState.CATCHING_UP
    )


def test_without_end_offsets_the_state_is_unknown() -> None:
    watch = live(watching())
    there = {P0: at(50, 50, at_ms=50_000, newest_ms=50_000)}
    away = watch.observe({}, 4)
    assert away.overall.state is TrainingState.UNKNOWN and away.partitions[P0].state is TrainingState.UNKNOWN
    assert away.overall.lag_records is away.overall.lag_ms is away.overall.drain is away.overall.eta.s is None
    assert watch.observe(there, 5).overall.state is TrainingState.CATCHING_UP, "it has to hold anew"
    assert watch.observe(there, 7).overall.state is TrainingState.CAUGHT_UP


def test_one_unknown_partition_makes_the_overall_state_unknown() -> None:
    watch = live(watching())
    found = watch.observe({P0: at(50, 50, at_ms=50_000, newest_ms=50_000)}, 4, expected=(P0, P1))
    assert {p: s.state for p, s in found.partitions.items()} == {
        P0: TrainingState.CAUGHT_UP,
        P1: TrainingState.UNKNOWN,
    }
    assert found.overall.state is TrainingState.UNKNOWN and found.overall.reason.startswith("samples-1: ")


def test_a_partition_that_moved_to_another_worker_is_forgotten() -> None:
    watch = watching()
    watch.observe({P0: at(5, 5), P1: at(0, 50)}, 0)
    assert watch.observe({P0: at(5, 5), P1: at(0, 50)}, 2).overall.state is TrainingState.INITIAL
    after = watch.observe({P0: at(5, 5), P1: at(0, 50)}, 3, expected=(P0,))
    assert (
        after.overall.state is TrainingState.CAUGHT_UP
        and list(after.partitions) == [P0]
        and after.overall.lag_records == 0
    )


def test_an_open_transaction_that_hides_records_is_blocked() -> None:
    watch = watching(pinned_s=10)
    open_briefly = at(50, 50, high=60, at_ms=50_000, newest_ms=50_500)
    look(watch, open_briefly, 0)
    assert look(watch, open_briefly, 1).state is not TrainingState.BLOCKED, "an ordinary commit is under way"
    blocked = look(watch, open_briefly, 11)
    assert blocked.state is TrainingState.BLOCKED and blocked.hidden_records == 10
    assert blocked.reason.startswith("samples-0") and "transaction" in blocked.reason
    assert (
        look(watch, at(50, 60, high=60, at_ms=50_000, newest_ms=50_500), 12).state
        is TrainingState.CATCHING_UP
    )
    hides_much = at(60, 60, high=900, at_ms=60_000, newest_ms=99_000)
    assert look(watch, hides_much, 13).state is TrainingState.BLOCKED


def test_records_that_are_not_consumed_are_stalled() -> None:
    watch = live(watching())
    stuck = at(50, 90, at_ms=50_000, newest_ms=50_400)
    assert look(watch, stuck, 10).state is TrainingState.CAUGHT_UP
    assert look(watch, stuck, 40).state is TrainingState.CATCHING_UP, (
        "30 s unread is a lag, whatever the event times say"
    )
    found = look(watch, stuck, 71)
    assert (found.state, found.reason) == (
        TrainingState.STALLED,
        "samples-0: 40 records are available, but none was trained for 60 s",
    )
    assert look(watch, at(60, 90, at_ms=50_100, newest_ms=50_400), 72).state is TrainingState.CATCHING_UP


def test_a_partition_that_waits_for_older_records_of_another_is_not_stalled() -> None:
    watch = watching()
    newer = at(1, 50, at_ms=500_000, newest_ms=900_000)
    for second in range(100):
        old = at(10 * second + 1, 5000, at_ms=1000 * second, newest_ms=900_000)
        found = watch.observe({P0: old, P1: newer}, float(second))
    assert (
        found.partitions[P1].state is TrainingState.INITIAL and found.overall.state is TrainingState.INITIAL
    )
    for second in range(100, 170):
        beyond = at(10 * second + 1, 5000, at_ms=900_000 + second, newest_ms=990_000)
        found = watch.observe({P0: beyond, P1: newer}, float(second))
    assert found.partitions[P1].state is TrainingState.STALLED, "the others are past everything that it has"


@pytest.mark.parametrize(
    ("held", "state"), [("an operator holds it", TrainingState.HELD), ("", TrainingState.BLOCKED)]
)
def test_a_hold_or_an_obstacle_overrides_the_partitions(held: str, state: TrainingState) -> None:
    watch = live(watching())
    there = {P0: at(50, 50, at_ms=50_000, newest_ms=50_000)}
    found = watch.observe(there, 4, held=held, obstacle="shard 1 is away").overall
    assert (found.state, found.reason) == (state, held or "shard 1 is away")
    assert watch.observe({}, 5, obstacle="shard 1 is away").overall.state is TrainingState.UNKNOWN


def test_records_lost_to_retention_are_reported_and_counted() -> None:
    watch = live(watching(report_loss_s=100))
    overrun = look(watch, at(50, 300, at_ms=50_000, newest_ms=99_000, oldest=200), 4)
    assert overrun.state is TrainingState.BLOCKED
    assert "150" in overrun.reason and "retention" in overrun.reason
    skipped = look(watch, at(50, 300, at_ms=50_000, newest_ms=99_000, oldest=50, lost=150), 5)
    assert skipped.lost_records == 150 and skipped.state is TrainingState.CATCHING_UP
    resumed = look(watch, at(210, 300, at_ms=90_000, newest_ms=99_000, oldest=200, lost=150), 6)
    assert resumed.consumption is not None and resumed.consumption.value == pytest.approx(10 / 6), (
        "the way over the gap is none"
    )
    later = look(watch, at(250, 300, at_ms=90_000, newest_ms=99_000, oldest=200, lost=150), 7)
    assert later.consumption is not None and later.consumption.value == pytest.approx(50 / 7), (
        "it is crossed once"
    )
    for second in range(8, 104):
        found = look(watch, at(300, 300, at_ms=99_000, newest_ms=99_000, oldest=200, lost=150), second)
        assert "150" in found.reason and "deleted" in found.reason
    assert look(watch, at(300, 300, at_ms=99_000, newest_ms=99_000, oldest=200, lost=150), 106).reason == ""
    assert found.lost_records == 150, "the count stays"


def test_the_retention_share_is_known_once_retention_deletes() -> None:
    watch = watching()
    assert look(watch, at(50, 300, at_ms=50_000, newest_ms=99_000), 1).retention_share is None
    assert look(watch, at(200, 300, at_ms=50_000, newest_ms=99_000, oldest=100), 2).retention_share == 0.5
    assert look(watch, at(90, 300, at_ms=50_000, newest_ms=99_000, oldest=100), 3).retention_share == 1.0


def test_a_log_that_ends_before_the_position_is_blocked() -> None:
    watch = live(watching())
    cut = at(50, 20, at_ms=50_000, newest_ms=20_000)
    look(watch, cut, 4)
    assert look(watch, cut, 6).state is not TrainingState.BLOCKED, (
        "the end may have been asked for before the records were read"
    )
    found = look(watch, cut, 16)
    assert found.state is TrainingState.BLOCKED and "records were lost" in found.reason


@pytest.mark.parametrize("jump_ms", [-H2_MS, H2_MS])
def test_g8_a_jump_of_the_wall_clock_changes_nothing(jump_ms: int) -> None:
    clock, watch = FakeClock(T0), watching(hold_s=1)
    behind = at(100, 200, at_ms=1, newest_ms=600_000)
    look(watch, at(100, 100, at_ms=1, newest_ms=1), clock.monotonic_s())
    for _ in range(3):
        clock.jump(jump_ms)
        clock.advance(5)
        assert look(watch, behind, clock.monotonic_s()).state is TrainingState.CATCHING_UP
    caught = at(200, 200, at_ms=600_000, newest_ms=600_000)
    look(watch, caught, clock.monotonic_s())
    clock.jump(-jump_ms)
    clock.advance(2)
    assert look(watch, caught, clock.monotonic_s()).state is TrainingState.CAUGHT_UP


@pytest.mark.parametrize("jump_ms", [-H2_MS, H2_MS])
def test_g8_wrong_event_times_neither_hide_nor_invent_a_lag(jump_ms: int) -> None:
    """Ten records of a time two hours off lie in the log; the newest event time of the partition is theirs
    for long."""
    watch, newest = watching(), 0
    for second in range(120):
        now_ms = 1000 * second + (jump_ms if 30 <= second < 40 else 0)
        newest = max(newest, now_ms)
        states = look(
            watch, at(10 * second + 8, 10 * second + 10, at_ms=now_ms, newest_ms=newest), second
        ).state
        if second > 10:
            assert states is TrainingState.CAUGHT_UP or (
                second < 45 and states is TrainingState.CATCHING_UP
            ), second
    for second in range(120, 150):  # nothing is consumed any more: no event time of before can make that good
        found = look(
            watch, at(1198, 10 * second + 10, at_ms=now_ms, newest_ms=max(newest, 1000 * second)), second
        )
    assert (
        found.state in (TrainingState.CATCHING_UP, TrainingState.FALLING_BEHIND) and found.lag_ms is not None
    )
    assert found.lag_ms >= 29_000


def test_time_in_state_restarts_with_each_state_and_adds_up() -> None:
    watch = watching()
    seen: list[Observation] = []
    for second, lag in enumerate([at(0, 9, newest_ms=9), *[at(9, 9, at_ms=9, newest_ms=9)] * 5]):
        seen.append(watch.observe({P0: lag}, second))
    told = [(str(found.overall.state), found.overall.in_state_s) for found in seen]
    assert told == [
        ("initial", 0),
        ("catching_up", 0),
        ("catching_up", 1),
        ("caught_up", 0),
        ("caught_up", 1),
        ("caught_up", 2),
    ]
    assert seen[-1].state_seconds == {
        TrainingState.INITIAL: 1,
        TrainingState.CATCHING_UP: 2,
        TrainingState.CAUGHT_UP: 2,
    }


def test_the_report_of_a_heartbeat_is_bounded() -> None:
    watch = watching()
    many = {("samples", n): at(1, 3, at_ms=5, newest_ms=5000) for n in range(1000)}
    told = liveness_report(watch.observe(many, 0))
    assert len(told["partitions"]) == 256 and told["lag_records"] == 2000
    row = told["partitions"][7]
    assert (row["topic"], row["partition"], row["state"], row["lag_records"]) == ("samples", 7, "initial", 2)
    assert row["drain_per_s"] is None and row["eta_s"] == [None, None, None]


# Caught-up over simulated partitions, with an account of every record beside it


T0 = 1_700_000_000_000
GOOD = (TrainingState.IDLE, TrainingState.CAUGHT_UP)
PATIENCE = CaughtUpLimits(lag_ms=5000, hold_s=3)


@dataclasses.dataclass
class Simulated:
    """A partition as an account: every record with the monotonic second at which it became readable, and its
    event time."""

    number: int
    readable_s: list[float] = dataclasses.field(default_factory=list)
    event_ms: list[int] = dataclasses.field(default_factory=list)
    position: int = 0
    oldest: int = 0
    hidden: int = 0
    lost: int = 0

    def produce(self, count: int, now_s: float, clock_off_ms: int) -> None:
        self.readable_s += [now_s] * count
        self.event_ms += [T0 + int(1000 * now_s) + clock_off_ms] * count

    def consume(self, count: int) -> None:
        if self.position < self.oldest:
            self.lost += self.oldest - self.position
            self.position = self.oldest
        self.position = min(self.position + count, self.stable_end)

    @property
    def stable_end(self) -> int:
        return len(self.event_ms) - self.hidden

    def lag(self) -> PartitionLag:
        return PartitionLag(
            position=self.position,
            stable_end=self.stable_end,
            high_watermark=len(self.event_ms),
            position_ms=self.event_ms[self.position - 1] if self.position else 0,
            newest_ms=max(self.event_ms, default=0),
            oldest=self.oldest,
            lost=self.lost,
        )

    def unread_for_s(self, now_s: float) -> float:
        """The truth: for how long the next record has waited."""
        return now_s - self.readable_s[self.position] if self.position < self.stable_end else 0.0


second = st.tuples(
    st.integers(0, 30),  # produced
    st.integers(0, 40),  # consumed
    st.sampled_from([0, 0, 0, -7_200_000, 7_200_000]),  # how wrong the producers' clock is
    st.sampled_from(["fine"] * 8 + ["away", "transaction", "retention", "rollback"]),
)
story = st.lists(st.tuples(second, second), min_size=10, max_size=60)


def tell(found: Simulated, event: str) -> None:
    match event:
        case "transaction":
            found.hidden = min(5, len(found.event_ms) - max(found.position, found.oldest))
        case "retention":
            found.oldest = min(found.position + 3, found.stable_end)
        case "rollback":
            found.position = max(found.position - 20, found.oldest)
        case _:
            found.hidden = 0


@given(story)
@settings(max_examples=30, deadline=None)
def test_waiting_records_are_never_reported_as_caught_up_and_counts_are_exact(
    steps: list[tuple[tuple[int, int, int, str], ...]],
) -> None:
    watch, parts = CaughtUpDetector(PATIENCE), [Simulated(0), Simulated(1)]
    for now_s, step in enumerate(steps):
        for part, (produced, consumed, off_ms, event) in zip(parts, step, strict=True):
            part.produce(produced, now_s, off_ms)
            tell(part, event)
            part.consume(consumed)
        away = any(event == "away" for _, _, _, event in step)
        lags = {} if away else {("samples", p.number): p.lag() for p in parts}
        found = watch.observe(lags, now_s)
        if away:
            assert found.overall.state is TrainingState.UNKNOWN and found.overall.lag_records is None
            continue
        for part in parts:
            standing = found.partitions["samples", part.number]
            assert standing.lag_records == part.stable_end - part.position
            assert standing.lost_records == part.lost
            assert standing.hidden_records == part.hidden
            if standing.state in GOOD:
                assert part.unread_for_s(now_s) <= 2 * PATIENCE.lag_ms / 1000 and part.position >= part.oldest
        if found.overall.state in GOOD:
            assert all(s.state in GOOD for s in found.partitions.values())
        assert found.overall.lost_records == sum(p.lost for p in parts)
    assert sum(found.state_seconds.values()) == len(steps) - 1


@given(
    st.lists(
        st.tuples(st.integers(0, 30), st.sampled_from([0, -7_200_000, 7_200_000])), min_size=30, max_size=80
    )
)
@settings(max_examples=20, deadline=None)
def test_a_reader_that_keeps_up_is_soon_caught_up_and_stays_so(seconds: list[tuple[int, int]]) -> None:
    """Also where the producers' clocks jump: nothing waits, so nothing is late."""
    watch, part = CaughtUpDetector(PATIENCE), Simulated(0)
    for now_s, (produced, off_ms) in enumerate(seconds):
        part.produce(produced, now_s, off_ms)
        part.consume(1000)
        state = watch.observe({("samples", 0): part.lag()}, now_s).overall.state
        assert now_s < PATIENCE.hold_s or state in GOOD


@given(st.integers(1, 40), st.integers(1, 40))
@settings(max_examples=20, deadline=None)
def test_the_direction_of_a_large_lag_follows_the_rates(arriving: int, consuming: int) -> None:
    watch, part = CaughtUpDetector(dataclasses.replace(PATIENCE, window_s=20)), Simulated(0)
    watch.observe({("samples", 0): part.lag()}, 0)
    part.produce(4000, 0, 0)
    for now_s in range(1, 40):
        part.produce(arriving, now_s, 0)
        part.consume(consuming)
        found = watch.observe({("samples", 0): part.lag()}, now_s).overall
    falling = arriving > consuming
    assert found.state is (TrainingState.FALLING_BEHIND if falling else TrainingState.CATCHING_UP)
    assert found.drain is not None and abs(found.drain.value - (consuming - arriving)) < 1e-6
    assert (found.eta.s is None) == (arriving >= consuming)


# How fast a lag shrinks, how sure that is, and when it will be gone


def metered(steps: list[tuple[float, float]], window_s: float = 60.0) -> RateMeter:
    """One second a step: (arrived, consumed) in it."""
    meter, arrived, consumed = RateMeter(window_s), 0.0, 0.0
    meter.update(0.0, 0, 0)
    for second, (came, went) in enumerate(steps, start=1):
        arrived, consumed = arrived + came, consumed + went
        meter.update(float(second), arrived, consumed)
    return meter


def test_a_rate_needs_two_observations_and_an_interval_four() -> None:
    assert metered([]).drain is None
    assert metered([(0, 5)]).drain == (5.0, None, None)
    assert time_left(10, metered([(0, 5)]).drain) == (2.0, None, None)
    assert metered([(0, 5)] * 3).drain == pytest.approx(Estimate(5, 5, 5))


def test_only_the_window_counts() -> None:
    meter = metered([(0, 100)] * 50 + [(0, 1)] * 50, window_s=20)
    assert meter.consumption == pytest.approx(Estimate(1, 1, 1))
    meter.clear()
    assert meter.consumption is None


@pytest.mark.parametrize(
    ("records", "drain", "expected"),
    [
        (0, None, (0.0, 0.0, 0.0)),  # there
        (50, None, (None, None, None)),  # not known yet
        (50, Estimate(-1, -2, 0.5), (None, None, None)),  # grows: never at this rate
        (50, Estimate(0, -1, 1), (None, None, None)),
        (60, Estimate(20, 10, 30), (3.0, 2.0, 6.0)),
        (60, Estimate(20, -5, 30), (3.0, 2.0, None)),  # perhaps it doesn't shrink at all: no bound above
    ],
)
def test_time_left_follows_from_the_rate_and_its_interval(
    records: int, drain: Estimate | None, expected: tuple[float | None, ...]
) -> None:
    assert time_left(records, drain) == expected


def test_the_interval_contains_the_true_rate_nearly_always() -> None:
    """Poisson arrivals at 50/s, and consumption of whole chunks of 64 or 192 at a mean of 80/s: drain is
    30."""
    random, held = np.random.default_rng(5), 0
    for _ in range(300):
        came = random.poisson(50, 60)
        went = 64 * random.poisson(80 / 128, 60) * random.choice([1, 3], 60)
        drain = metered(list(zip(came.tolist(), went.tolist(), strict=True))).drain
        assert drain is not None and drain.low is not None and drain.high is not None
        held += drain.low <= 30 <= drain.high
    assert held >= 0.9 * 300
