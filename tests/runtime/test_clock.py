from __future__ import annotations

import threading

import pytest

from roostream.runtime.clock import Clock, FakeClock, MonotonicToWallTime, SystemClock


@pytest.mark.parametrize("clock", [SystemClock(), FakeClock()], ids=["system", "fake"])
def test_every_clock_moves_forward_while_sleeping_and_heeds_a_stop(clock: Clock) -> None:
    before = clock.monotonic_s()
    assert clock.sleep(0.001) is False
    assert clock.monotonic_s() > before
    assert clock.now_ms() > 1_600_000_000_000
    stop = threading.Event()
    assert clock.sleep(0.001, stop) is False
    stop.set()
    assert clock.sleep(0.001, stop) is True


def test_a_jump_moves_wall_time_only() -> None:
    clock = FakeClock(now_ms=1000)
    clock.jump(-500)
    assert (clock.now_ms(), clock.monotonic_s()) == (500, 0.0)
    clock.advance(1.5)
    assert (clock.now_ms(), clock.monotonic_s()) == (2000, 1.5)


def test_the_wall_time_of_a_moment_does_not_change_when_the_clock_is_set() -> None:
    clock = FakeClock(now_ms=10_000)
    wall = MonotonicToWallTime(clock)
    clock.advance(2.5)
    assert wall.of(0.0) == 10_000
    clock.jump(7_200_000)
    assert wall.of(0.0) == 10_000 and wall.of(clock.monotonic_s()) == 7_212_500
