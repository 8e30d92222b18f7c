"""Is training live? Told from offsets and event times."""

from __future__ import annotations

import pytest

from runtime.clock import FakeClock
from runtime.kafka.record_reader import PartitionLag
from trainer.monitoring.caught_up import CaughtUp, Liveness

T0 = 1_700_000_000_000


def at(position: int, end: int, *, high: int | None = None, at_ms: int = 0, newest_ms: int = 0) -> PartitionLag:
    return PartitionLag(
        position=position,
        stable_end=end,
        high_watermark=end if high is None else high,
        position_ms=T0 + at_ms if position else 0,
        newest_ms=T0 + newest_ms if end else 0,
    )


def test_history_then_catching_up_then_caught_up() -> None:
    watch = CaughtUp(bound_ms=1000, hold_s=2)
    assert watch.observe({0: at(0, 100, newest_ms=100_000)}, 0).state is Liveness.INITIAL
    assert watch.observe({0: at(99, 120, at_ms=99_000, newest_ms=120_000)}, 1).state is Liveness.INITIAL
    assert watch.observe({0: at(100, 130, at_ms=100_000, newest_ms=130_000)}, 2).state is Liveness.CATCHING_UP
    assert watch.observe({0: at(139, 140, at_ms=139_500, newest_ms=140_000)}, 3).state is Liveness.CATCHING_UP, (
        "not for long enough"
    )
    assert watch.observe({0: at(150, 150, at_ms=150_000, newest_ms=150_000)}, 5).state is Liveness.CAUGHT_UP
    assert watch.observe({0: at(150, 190, at_ms=150_000, newest_ms=190_000)}, 6).state is Liveness.CATCHING_UP


def test_no_data_is_not_an_error() -> None:
    watch = CaughtUp(bound_ms=1000, hold_s=2)
    assert watch.observe({}, 0).state is Liveness.UNKNOWN, "the ends aren't known yet"
    watch.observe({0: at(0, 0), 1: at(0, 0)}, 1)
    report = watch.observe({0: at(0, 0), 1: at(0, 0)}, 3)
    assert report.state is Liveness.CAUGHT_UP and report.eta_s == 0.0 and report.lag_ms == 0


def test_a_reading_that_can_not_be_taken_is_unknown_and_never_good() -> None:
    watch = CaughtUp(bound_ms=1000, hold_s=2)
    there = {0: at(50, 50, at_ms=50_000, newest_ms=50_000)}
    watch.observe(there, 0)
    assert watch.observe(there, 3).state is Liveness.CAUGHT_UP
    away = watch.observe({}, 4)
    assert away.state is Liveness.UNKNOWN and away.partitions == {}
    assert away.lag_records is away.lag_ms is away.drained_per_s is away.eta_s is None
    assert watch.observe(there, 5).state is Liveness.CATCHING_UP, "it has to hold anew"
    assert watch.observe(there, 7).state is Liveness.CAUGHT_UP


def test_the_partition_furthest_behind_decides() -> None:
    watch = CaughtUp(bound_ms=1000, hold_s=0)
    report = watch.observe({0: at(5, 5, at_ms=5, newest_ms=5), 1: at(2, 5, at_ms=2, newest_ms=50_000)}, 0)
    assert report.state is Liveness.INITIAL
    assert report.partitions == {0: Liveness.CAUGHT_UP, 1: Liveness.INITIAL}
    assert (report.lag_records, report.lag_ms) == (3, 49_998)


def test_a_pinned_transaction_is_blocked_and_never_caught_up() -> None:
    watch = CaughtUp(bound_ms=1000, hold_s=2, pinned_s=10)
    open_briefly = {0: at(50, 50, high=60, at_ms=50_000, newest_ms=50_500)}
    assert watch.observe(open_briefly, 0).state is not Liveness.BLOCKED, "an ordinary commit is under way"
    assert watch.observe(open_briefly, 11).state is Liveness.BLOCKED
    assert watch.observe({0: at(50, 60, high=60, at_ms=50_000, newest_ms=50_500)}, 12).state is Liveness.CATCHING_UP
    hides_much = {0: at(60, 60, high=900, at_ms=60_000, newest_ms=99_000)}
    assert watch.observe(hides_much, 13).state is Liveness.BLOCKED


def test_g8_a_jump_of_the_wall_clock_does_not_report_caught_up() -> None:
    clock = FakeClock(T0)
    watch = CaughtUp(bound_ms=1000, hold_s=1)
    behind = {0: at(100, 200, at_ms=0, newest_ms=600_000)}
    watch.observe({0: at(100, 100)}, clock.monotonic_s())
    for jump_ms in (-7_200_000, 7_200_000, 86_400_000):
        clock.jump(jump_ms)
        clock.advance(5)
        assert watch.observe(behind, clock.monotonic_s()).state is Liveness.CATCHING_UP


@pytest.mark.parametrize(
    ("lags", "rate", "eta_s"),
    [
        ([100, 80, 60], 20.0, 3.0),  # shrinks: as long as the rest takes
        ([60, 80, 100], -20.0, None),  # grows: never at this rate
        ([50, 50, 50], 0.0, None),
    ],
)
def test_the_time_left_follows_from_the_rate_of_drain(lags: list[int], rate: float, eta_s: float | None) -> None:
    watch = CaughtUp(bound_ms=1000)
    for second, lag in enumerate(lags):
        report = watch.observe({0: at(1000, 1000 + lag, newest_ms=9_000)}, float(second))
    assert (report.drained_per_s, report.eta_s) == (rate, eta_s)
