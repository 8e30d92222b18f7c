"""`CaughtUpDetector` decides from offsets and event times whether training has caught up with the stream."""

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


def partition_lag(
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


def make_detector(**bounds: float) -> CaughtUpDetector:
    return CaughtUpDetector(CaughtUpLimits(**{"lag_ms": 1000, "hold_s": 2, **bounds}))  # type: ignore[arg-type]


def observe_p0(detector: CaughtUpDetector, lag: PartitionLag, now_s: float) -> LagStatus:
    return detector.observe({P0: lag}, now_s).overall


def caught_up_detector(
    detector: CaughtUpDetector, *, position: int = 50, until_s: float = 3
) -> CaughtUpDetector:
    """Feed the detector until it is caught up at `until_s`."""
    for second in range(int(until_s) + 1):
        found = observe_p0(
            detector, partition_lag(position, position, at_ms=50_000, newest_ms=50_000), second
        )
    assert found.state is TrainingState.CAUGHT_UP
    return detector


def test_overall_rates_restart_when_a_partition_leaves() -> None:
    detector = make_detector()
    for second in range(3):
        before = detector.observe(
            {P0: partition_lag(10 * second, 100), P1: partition_lag(20 * second, 100)},
            second,
            expected=(P0, P1),
        ).overall
    assert before.consumption is not None and before.consumption.value == pytest.approx(30)
    assert detector.observe({P0: partition_lag(30, 100)}, 3, expected=(P0,)).overall.consumption is None, (
        "a sum over fewer partitions cannot be compared with the sums before"
    )
    after = detector.observe({P0: partition_lag(40, 100)}, 4, expected=(P0,)).overall
    assert after.consumption is not None and after.consumption.value == pytest.approx(10)


def test_history_then_catching_up_then_caught_up() -> None:
    detector = make_detector()
    assert observe_p0(detector, partition_lag(0, 100, newest_ms=100_000), 0).state is TrainingState.INITIAL
    assert (
        observe_p0(detector, partition_lag(99, 120, at_ms=99_000, newest_ms=120_000), 1).state
        is TrainingState.INITIAL
    )
    assert (
        observe_p0(detector, partition_lag(100, 130, at_ms=100_000, newest_ms=130_000), 2).state
        is TrainingState.CATCHING_UP
    )
    near = partition_lag(139, 140, at_ms=139_500, newest_ms=140_000)
    assert observe_p0(detector, near, 3).state is TrainingState.CATCHING_UP, (
        "the lag must stay small for hold_s"
    )
    assert (
        observe_p0(detector, partition_lag(150, 150, at_ms=150_000, newest_ms=150_000), 5).state
        is TrainingState.CAUGHT_UP
    )
    assert (
        observe_p0(detector, partition_lag(150, 190, at_ms=150_000, newest_ms=190_000), 6).state
        is TrainingState.CATCHING_UP
    )


def test_assigned_history_is_initial_until_the_stream_begins() -> None:
    detector = make_detector(stalled_s=5)
    lag = partition_lag(100, 100, at_ms=100_000, newest_ms=100_000)
    states = []
    for second, phase in enumerate([ReadPhase.HISTORY] * 4 + [ReadPhase.WAIT] * 2 + [ReadPhase.STREAM] * 4):
        states.append(detector.observe({P0: lag}, second, phase=phase).overall.state)
    assert states[:6] == [TrainingState.INITIAL] * 6, "history stays initial even without a lag"
    assert states[6:] == [TrainingState.CAUGHT_UP] * 4
    late = make_detector()
    behind = partition_lag(10, 100, at_ms=10_000, newest_ms=100_000)
    assert late.observe({P0: behind}, 0, phase=ReadPhase.STREAM).overall.state is TrainingState.CATCHING_UP
    assert make_detector().observe({P0: behind}, 0).overall.state is TrainingState.INITIAL, (
        "without phases, records that existed at the start are initial"
    )


def test_waiting_for_work_units_is_not_stalled() -> None:
    detector = make_detector(stalled_s=5)
    lag = partition_lag(50, 100, at_ms=50_000, newest_ms=100_000)
    waits = [detector.observe({P0: lag}, second, phase=ReadPhase.WAIT).overall.state for second in range(10)]
    assert set(waits) == {TrainingState.INITIAL}
    assert detector.observe({P0: lag}, 10, phase=ReadPhase.HISTORY).overall.state is TrainingState.STALLED


def test_a_short_moderate_lag_stays_caught_up() -> None:
    detector = caught_up_detector(make_detector())
    over = {"at_ms": 50_000, "newest_ms": 51_500}
    assert observe_p0(detector, partition_lag(50, 60, **over), 4).state is TrainingState.CAUGHT_UP
    assert (
        observe_p0(detector, partition_lag(60, 60, at_ms=51_500, newest_ms=51_500), 5).state
        is TrainingState.CAUGHT_UP
    )
    assert (
        observe_p0(detector, partition_lag(60, 70, at_ms=51_500, newest_ms=53_000), 6).state
        is TrainingState.CAUGHT_UP
    )
    assert (
        observe_p0(detector, partition_lag(60, 70, at_ms=51_500, newest_ms=53_000), 8.5).state
        is TrainingState.CATCHING_UP
    ), "the lag stays above the limit for longer than hold_s"
    far = {"at_ms": 50_000, "newest_ms": 52_500}  # more than twice the limit
    assert (
        observe_p0(caught_up_detector(make_detector()), partition_lag(50, 60, **far), 4).state
        is TrainingState.CATCHING_UP
    )


def test_falling_behind_changes_only_when_the_rate_is_certain() -> None:
    detector = make_detector(window_s=20)
    observe_p0(detector, partition_lag(0, 0), 0)
    states = []
    for second in range(1, 61):
        rate = 10 if second <= 30 else 40  # records consumed per second; 20 arrive
        consumed = 10 * min(second, 30) + 40 * max(second - 30, 0)
        found = observe_p0(
            detector,
            partition_lag(consumed, 20 * second + 400, at_ms=consumed, newest_ms=900_000 + second),
            float(second),
        )
        states.append((rate, found.state))
    assert (10, TrainingState.FALLING_BEHIND) in states and (40, TrainingState.CATCHING_UP) in states
    changes = [b for a, b in itertools.pairwise(states) if a[1] is not b[1]]
    assert len(changes) == 2, "the state must not flap"
    assert found.drain is not None and found.drain.value == pytest.approx(20)
    assert found.eta.s == pytest.approx(found.lag_records / 20) and found.eta.high_s is not None  # type: ignore[operator]


def test_empty_topics_are_caught_up_and_then_idle() -> None:
    detector = make_detector()
    assert detector.observe({}, 0).overall.state is TrainingState.UNKNOWN, "the end offsets are not known yet"
    assert make_detector().observe({}, 0, expected=()).overall.state is TrainingState.IDLE, (
        "a worker without partitions is idle"
    )
    detector.observe({P0: partition_lag(0, 0), P1: partition_lag(0, 0)}, 1)
    found = detector.observe({P0: partition_lag(0, 0), P1: partition_lag(0, 0)}, 3).overall
    assert found.state is TrainingState.CAUGHT_UP and found.eta == (0, 0, 0) and found.lag_ms == 0
    assert (
        detector.observe({P0: partition_lag(0, 0), P1: partition_lag(0, 0)}, 61).overall.state
        is TrainingState.IDLE
    )
    first = partition_lag(3, 4, at_ms=500, newest_ms=900)
    assert (
        detector.observe({P0: first, P1: partition_lag(0, 0)}, 62).overall.state is TrainingState.CAUGHT_UP
    ), "a new record in an idle topic keeps the state caught up"


def test_an_idle_partition_does_not_decide_the_overall_state() -> None:
    detector = make_detector()
    for second in range(70):
        busy = partition_lag(10 * second + 10, 10 * second + 10, at_ms=1000 * second, newest_ms=1000 * second)
        found = detector.observe({P0: partition_lag(5, 5, at_ms=5, newest_ms=5), P1: busy}, float(second))
    assert {p: s.state for p, s in found.partitions.items()} == {
        P0: TrainingState.IDLE,
        P1: TrainingState.CAUGHT_UP,
    }
    assert (found.overall.state, found.overall.lag_ms) == (TrainingState.CAUGHT_UP, 0)
    behind = partition_lag(710, 900, at_ms=70_000, newest_ms=99_000)
    assert (
        detector.observe({P0: partition_lag(5, 5, at_ms=5, newest_ms=5), P1: behind}, 70).overall.state
        is TrainingState.CATCHING_UP
    )


def test_without_end_offsets_the_state_is_unknown() -> None:
    detector = caught_up_detector(make_detector())
    lags = {P0: partition_lag(50, 50, at_ms=50_000, newest_ms=50_000)}
    found = detector.observe({}, 4)
    assert (
        found.overall.state is TrainingState.UNKNOWN and found.partitions[P0].state is TrainingState.UNKNOWN
    )
    assert (
        found.overall.lag_records
        is found.overall.lag_ms
        is found.overall.drain
        is found.overall.eta.s
        is None
    )
    assert detector.observe(lags, 5).overall.state is TrainingState.CATCHING_UP, (
        "the lag must stay small for hold_s again"
    )
    assert detector.observe(lags, 7).overall.state is TrainingState.CAUGHT_UP


def test_one_unknown_partition_makes_the_overall_state_unknown() -> None:
    detector = caught_up_detector(make_detector())
    found = detector.observe(
        {P0: partition_lag(50, 50, at_ms=50_000, newest_ms=50_000)}, 4, expected=(P0, P1)
    )
    assert {p: s.state for p, s in found.partitions.items()} == {
        P0: TrainingState.CAUGHT_UP,
        P1: TrainingState.UNKNOWN,
    }
    assert found.overall.state is TrainingState.UNKNOWN and found.overall.reason.startswith("samples-1: ")


def test_a_partition_that_moved_to_another_worker_is_forgotten() -> None:
    detector = make_detector()
    detector.observe({P0: partition_lag(5, 5), P1: partition_lag(0, 50)}, 0)
    assert (
        detector.observe({P0: partition_lag(5, 5), P1: partition_lag(0, 50)}, 2).overall.state
        is TrainingState.INITIAL
    )
    after = detector.observe({P0: partition_lag(5, 5), P1: partition_lag(0, 50)}, 3, expected=(P0,))
    assert (
        after.overall.state is TrainingState.CAUGHT_UP
        and list(after.partitions) == [P0]
        and after.overall.lag_records == 0
    )


def test_an_open_transaction_that_hides_records_is_blocked() -> None:
    detector = make_detector(pinned_s=10)
    open_briefly = partition_lag(50, 50, high=60, at_ms=50_000, newest_ms=50_500)
    observe_p0(detector, open_briefly, 0)
    assert observe_p0(detector, open_briefly, 1).state is not TrainingState.BLOCKED, (
        "an ordinary transaction may be about to commit"
    )
    blocked = observe_p0(detector, open_briefly, 11)
    assert blocked.state is TrainingState.BLOCKED and blocked.hidden_records == 10
    assert blocked.reason.startswith("samples-0") and "transaction" in blocked.reason
    assert (
        observe_p0(detector, partition_lag(50, 60, high=60, at_ms=50_000, newest_ms=50_500), 12).state
        is TrainingState.CATCHING_UP
    )
    hides_much = partition_lag(60, 60, high=900, at_ms=60_000, newest_ms=99_000)
    assert observe_p0(detector, hides_much, 13).state is TrainingState.BLOCKED


def test_records_that_are_not_consumed_are_stalled() -> None:
    detector = caught_up_detector(make_detector())
    stuck = partition_lag(50, 90, at_ms=50_000, newest_ms=50_400)
    assert observe_p0(detector, stuck, 10).state is TrainingState.CAUGHT_UP
    assert observe_p0(detector, stuck, 40).state is TrainingState.CATCHING_UP, (
        "records that wait for 30 s are a lag, even if their event times are close"
    )
    found = observe_p0(detector, stuck, 71)
    assert (found.state, found.reason) == (
        TrainingState.STALLED,
        "samples-0: 40 records are available, but none was trained for 60 s",
    )
    assert (
        observe_p0(detector, partition_lag(60, 90, at_ms=50_100, newest_ms=50_400), 72).state
        is TrainingState.CATCHING_UP
    )


def test_a_partition_that_waits_for_older_records_of_another_is_not_stalled() -> None:
    detector = make_detector()
    newer = partition_lag(1, 50, at_ms=500_000, newest_ms=900_000)
    for second in range(100):
        old = partition_lag(10 * second + 1, 5000, at_ms=1000 * second, newest_ms=900_000)
        found = detector.observe({P0: old, P1: newer}, float(second))
    assert (
        found.partitions[P1].state is TrainingState.INITIAL and found.overall.state is TrainingState.INITIAL
    )
    for second in range(100, 170):
        beyond = partition_lag(10 * second + 1, 5000, at_ms=900_000 + second, newest_ms=990_000)
        found = detector.observe({P0: beyond, P1: newer}, float(second))
    assert found.partitions[P1].state is TrainingState.STALLED, "the other partition is past all its records"


@pytest.mark.parametrize(
    ("held", "state"), [("an operator holds it", TrainingState.HELD), ("", TrainingState.BLOCKED)]
)
def test_a_hold_or_an_obstacle_overrides_the_partitions(held: str, state: TrainingState) -> None:
    detector = caught_up_detector(make_detector())
    lags = {P0: partition_lag(50, 50, at_ms=50_000, newest_ms=50_000)}
    found = detector.observe(lags, 4, held=held, obstacle="shard 1 is away").overall
    assert (found.state, found.reason) == (state, held or "shard 1 is away")
    assert detector.observe({}, 5, obstacle="shard 1 is away").overall.state is TrainingState.UNKNOWN


def test_records_lost_to_retention_are_reported_and_counted() -> None:
    detector = caught_up_detector(make_detector(report_loss_s=100))
    overrun = observe_p0(detector, partition_lag(50, 300, at_ms=50_000, newest_ms=99_000, oldest=200), 4)
    assert overrun.state is TrainingState.BLOCKED
    assert "150" in overrun.reason and "retention" in overrun.reason
    skipped = observe_p0(
        detector, partition_lag(50, 300, at_ms=50_000, newest_ms=99_000, oldest=50, lost=150), 5
    )
    assert skipped.lost_records == 150 and skipped.state is TrainingState.CATCHING_UP
    resumed = observe_p0(
        detector, partition_lag(210, 300, at_ms=90_000, newest_ms=99_000, oldest=200, lost=150), 6
    )
    assert resumed.consumption is not None and resumed.consumption.value == pytest.approx(10 / 6), (
        "skipping the lost records is no consumption"
    )
    later = observe_p0(
        detector, partition_lag(250, 300, at_ms=90_000, newest_ms=99_000, oldest=200, lost=150), 7
    )
    assert later.consumption is not None and later.consumption.value == pytest.approx(50 / 7), (
        "the lost records are subtracted once"
    )
    for second in range(8, 104):
        found = observe_p0(
            detector, partition_lag(300, 300, at_ms=99_000, newest_ms=99_000, oldest=200, lost=150), second
        )
        assert "150" in found.reason and "deleted" in found.reason
    assert (
        observe_p0(
            detector, partition_lag(300, 300, at_ms=99_000, newest_ms=99_000, oldest=200, lost=150), 106
        ).reason
        == ""
    )
    assert found.lost_records == 150, "the count of lost records stays after the warning ends"


def test_the_retention_share_is_known_once_retention_deletes() -> None:
    detector = make_detector()
    assert (
        observe_p0(detector, partition_lag(50, 300, at_ms=50_000, newest_ms=99_000), 1).retention_share
        is None
    )
    assert (
        observe_p0(
            detector, partition_lag(200, 300, at_ms=50_000, newest_ms=99_000, oldest=100), 2
        ).retention_share
        == 0.5
    )
    assert (
        observe_p0(
            detector, partition_lag(90, 300, at_ms=50_000, newest_ms=99_000, oldest=100), 3
        ).retention_share
        == 1.0
    )


def test_a_log_that_ends_before_the_position_is_blocked() -> None:
    detector = caught_up_detector(make_detector())
    cut = partition_lag(50, 20, at_ms=50_000, newest_ms=20_000)
    observe_p0(detector, cut, 4)
    assert observe_p0(detector, cut, 6).state is not TrainingState.BLOCKED, (
        "the end offset may have been fetched before the records were read"
    )
    found = observe_p0(detector, cut, 16)
    assert found.state is TrainingState.BLOCKED and "records were lost" in found.reason


@pytest.mark.parametrize("jump_ms", [-H2_MS, H2_MS])
def test_g8_a_jump_of_the_wall_clock_changes_nothing(jump_ms: int) -> None:
    clock, detector = FakeClock(T0), make_detector(hold_s=1)
    behind = partition_lag(100, 200, at_ms=1, newest_ms=600_000)
    observe_p0(detector, partition_lag(100, 100, at_ms=1, newest_ms=1), clock.monotonic_s())
    for _ in range(3):
        clock.jump(jump_ms)
        clock.advance(5)
        assert observe_p0(detector, behind, clock.monotonic_s()).state is TrainingState.CATCHING_UP
    caught = partition_lag(200, 200, at_ms=600_000, newest_ms=600_000)
    observe_p0(detector, caught, clock.monotonic_s())
    clock.jump(-jump_ms)
    clock.advance(2)
    assert observe_p0(detector, caught, clock.monotonic_s()).state is TrainingState.CAUGHT_UP


@pytest.mark.parametrize("jump_ms", [-H2_MS, H2_MS])
def test_g8_wrong_event_times_neither_hide_nor_invent_a_lag(jump_ms: int) -> None:
    """Some records have event times that are two hours wrong. For a long time, theirs is the newest event
    time of the partition."""
    detector, newest = make_detector(), 0
    for second in range(120):
        now_ms = 1000 * second + (jump_ms if 30 <= second < 40 else 0)
        newest = max(newest, now_ms)
        state = observe_p0(
            detector, partition_lag(10 * second + 8, 10 * second + 10, at_ms=now_ms, newest_ms=newest), second
        ).state
        if second > 10:
            assert state is TrainingState.CAUGHT_UP or (second < 45 and state is TrainingState.CATCHING_UP), (
                second
            )
    # Consumption has stopped; the earlier wrong event times must not hide that.
    for second in range(120, 150):
        found = observe_p0(
            detector,
            partition_lag(1198, 10 * second + 10, at_ms=now_ms, newest_ms=max(newest, 1000 * second)),
            second,
        )
    assert (
        found.state in (TrainingState.CATCHING_UP, TrainingState.FALLING_BEHIND) and found.lag_ms is not None
    )
    assert found.lag_ms >= 29_000


def test_time_in_state_restarts_with_each_state_and_adds_up() -> None:
    detector = make_detector()
    seen: list[Observation] = []
    for second, lag in enumerate(
        [partition_lag(0, 9, newest_ms=9), *[partition_lag(9, 9, at_ms=9, newest_ms=9)] * 5]
    ):
        seen.append(detector.observe({P0: lag}, second))
    states = [(str(found.overall.state), found.overall.in_state_s) for found in seen]
    assert states == [
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
    detector = make_detector()
    many = {("samples", n): partition_lag(1, 3, at_ms=5, newest_ms=5000) for n in range(1000)}
    report = liveness_report(detector.observe(many, 0))
    assert len(report["partitions"]) == 256 and report["lag_records"] == 2000
    row = report["partitions"][7]
    assert (row["topic"], row["partition"], row["state"], row["lag_records"]) == ("samples", 7, "initial", 2)
    assert row["drain_per_s"] is None and row["eta_s"] == [None, None, None]


# Property tests over simulated partitions that know the true state of every record


T0 = 1_700_000_000_000
CAUGHT_UP_STATES = (TrainingState.IDLE, TrainingState.CAUGHT_UP)
LIMITS = CaughtUpLimits(lag_ms=5000, hold_s=3)


@dataclasses.dataclass
class SimulatedPartition:
    """A partition that keeps, for every record, the monotonic second at which it became readable and its
    event time."""

    number: int
    readable_s: list[float] = dataclasses.field(default_factory=list)
    event_ms: list[int] = dataclasses.field(default_factory=list)
    position: int = 0
    oldest: int = 0
    hidden: int = 0
    lost: int = 0

    def produce(self, count: int, now_s: float, clock_error_ms: int) -> None:
        self.readable_s += [now_s] * count
        self.event_ms += [T0 + int(1000 * now_s) + clock_error_ms] * count

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
        """Return for how long the next record has really waited."""
        return now_s - self.readable_s[self.position] if self.position < self.stable_end else 0.0


second = st.tuples(
    st.integers(0, 30),  # produced
    st.integers(0, 40),  # consumed
    st.sampled_from([0, 0, 0, -7_200_000, 7_200_000]),  # error of the producers' clock in ms
    st.sampled_from(["fine"] * 8 + ["away", "transaction", "retention", "rollback"]),
)
histories = st.lists(st.tuples(second, second), min_size=10, max_size=60)


def apply_event(partition: SimulatedPartition, event: str) -> None:
    match event:
        case "transaction":
            partition.hidden = min(5, len(partition.event_ms) - max(partition.position, partition.oldest))
        case "retention":
            partition.oldest = min(partition.position + 3, partition.stable_end)
        case "rollback":
            partition.position = max(partition.position - 20, partition.oldest)
        case _:
            partition.hidden = 0


@given(histories)
@settings(max_examples=30)
def test_waiting_records_are_never_reported_as_caught_up_and_counts_are_exact(
    steps: list[tuple[tuple[int, int, int, str], ...]],
) -> None:
    detector, parts = CaughtUpDetector(LIMITS), [SimulatedPartition(0), SimulatedPartition(1)]
    for now_s, step in enumerate(steps):
        for part, (produced, consumed, clock_error_ms, event) in zip(parts, step, strict=True):
            part.produce(produced, now_s, clock_error_ms)
            apply_event(part, event)
            part.consume(consumed)
        is_unavailable = any(event == "away" for _, _, _, event in step)
        lags = {} if is_unavailable else {("samples", p.number): p.lag() for p in parts}
        found = detector.observe(lags, now_s)
        if is_unavailable:
            assert found.overall.state is TrainingState.UNKNOWN and found.overall.lag_records is None
            continue
        for part in parts:
            status = found.partitions["samples", part.number]
            assert status.lag_records == part.stable_end - part.position
            assert status.lost_records == part.lost
            assert status.hidden_records == part.hidden
            if status.state in CAUGHT_UP_STATES:
                assert part.unread_for_s(now_s) <= 2 * LIMITS.lag_ms / 1000 and part.position >= part.oldest
        if found.overall.state in CAUGHT_UP_STATES:
            assert all(s.state in CAUGHT_UP_STATES for s in found.partitions.values())
        assert found.overall.lost_records == sum(p.lost for p in parts)
    assert sum(found.state_seconds.values()) == len(steps) - 1


@given(
    st.lists(
        st.tuples(st.integers(0, 30), st.sampled_from([0, -7_200_000, 7_200_000])), min_size=30, max_size=80
    )
)
@settings(max_examples=20)
def test_a_reader_that_keeps_up_becomes_and_stays_caught_up(seconds: list[tuple[int, int]]) -> None:
    """This also holds while the producers' clocks jump, because no record waits."""
    detector, part = CaughtUpDetector(LIMITS), SimulatedPartition(0)
    for now_s, (produced, clock_error_ms) in enumerate(seconds):
        part.produce(produced, now_s, clock_error_ms)
        part.consume(1000)
        state = detector.observe({("samples", 0): part.lag()}, now_s).overall.state
        assert now_s < LIMITS.hold_s or state in CAUGHT_UP_STATES


@given(st.integers(1, 40), st.integers(1, 40))
@settings(max_examples=20)
def test_the_direction_of_a_large_lag_follows_the_rates(arriving: int, consuming: int) -> None:
    detector, part = CaughtUpDetector(dataclasses.replace(LIMITS, window_s=20)), SimulatedPartition(0)
    detector.observe({("samples", 0): part.lag()}, 0)
    part.produce(4000, 0, 0)
    for now_s in range(1, 40):
        part.produce(arriving, now_s, 0)
        part.consume(consuming)
        found = detector.observe({("samples", 0): part.lag()}, now_s).overall
    falling = arriving > consuming
    assert found.state is (TrainingState.FALLING_BEHIND if falling else TrainingState.CATCHING_UP)
    assert found.drain is not None and abs(found.drain.value - (consuming - arriving)) < 1e-6
    assert (found.eta.s is None) == (arriving >= consuming)


# RateMeter: how fast a lag shrinks, the confidence interval of that rate, and the time until the lag is gone


def feed_meter(steps: list[tuple[float, float]], window_s: float = 60.0) -> RateMeter:
    """Feed a meter with one step per second. A step has the numbers of arrived and consumed records."""
    meter, arrived, consumed = RateMeter(window_s), 0.0, 0.0
    meter.update(0.0, 0, 0)
    for second, (num_arrived, num_consumed) in enumerate(steps, start=1):
        arrived, consumed = arrived + num_arrived, consumed + num_consumed
        meter.update(float(second), arrived, consumed)
    return meter


def test_a_rate_needs_two_observations_and_an_interval_four() -> None:
    assert feed_meter([]).drain is None
    assert feed_meter([(0, 5)]).drain == (5.0, None, None)
    assert time_left(10, feed_meter([(0, 5)]).drain) == (2.0, None, None)
    assert feed_meter([(0, 5)] * 3).drain == pytest.approx(Estimate(5, 5, 5))


def test_rates_are_measured_over_the_window_only() -> None:
    meter = feed_meter([(0, 100)] * 50 + [(0, 1)] * 50, window_s=20)
    assert meter.consumption == pytest.approx(Estimate(1, 1, 1))
    meter.clear()
    assert meter.consumption is None


@pytest.mark.parametrize(
    ("records", "drain", "expected"),
    [
        (0, None, (0.0, 0.0, 0.0)),  # no records left
        (50, None, (None, None, None)),  # the rate is not known yet
        (50, Estimate(-1, -2, 0.5), (None, None, None)),  # the lag grows
        (50, Estimate(0, -1, 1), (None, None, None)),
        (60, Estimate(20, 10, 30), (3.0, 2.0, 6.0)),
        # The lag may not shrink at all, so there is no upper bound.
        (60, Estimate(20, -5, 30), (3.0, 2.0, None)),
    ],
)
def test_time_left_follows_from_the_rate_and_its_interval(
    records: int, drain: Estimate | None, expected: tuple[float | None, ...]
) -> None:
    assert time_left(records, drain) == expected


def test_the_interval_contains_the_true_rate_nearly_always() -> None:
    """Records arrive at 50/s (Poisson) and are consumed in chunks of 64 or 192 at a mean of 80/s, so the true
    rate is 30/s."""
    random, hits = np.random.default_rng(5), 0
    for _ in range(300):
        arrived_N = random.poisson(50, 60)
        consumed_N = 64 * random.poisson(80 / 128, 60) * random.choice([1, 3], 60)
        drain = feed_meter(list(zip(arrived_N.tolist(), consumed_N.tolist(), strict=True))).drain
        assert drain is not None and drain.low is not None and drain.high is not None
        hits += drain.low <= 30 <= drain.high
    assert hits >= 0.9 * 300
