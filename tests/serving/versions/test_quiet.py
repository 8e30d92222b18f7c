"""Work that nobody waits for runs between requests."""

from __future__ import annotations

import threading

from runtime.clock import FakeClock
from serving.versions.quiet import Quiet


def test_without_requests_nothing_is_waited_for() -> None:
    clock = FakeClock()
    assert Quiet(clock).wait(9.0) and clock.monotonic_s() == 0


def test_it_waits_until_the_last_request_is_answered() -> None:
    clock = FakeClock()
    quiet = Quiet(clock)
    quiet.in_flight = lambda: int(clock.monotonic_s() < 0.5)
    assert quiet.wait(9.0) and 0.5 <= clock.monotonic_s() < 0.6


def test_it_waits_no_longer_than_it_was_told_to() -> None:
    clock = FakeClock()
    quiet = Quiet(clock)
    quiet.in_flight = lambda: 1
    assert not quiet.wait(2.0) and 2.0 <= clock.monotonic_s() < 2.1


def test_a_stop_ends_it() -> None:
    clock, stop = FakeClock(), threading.Event()
    quiet = Quiet(clock)
    quiet.in_flight = lambda: 1
    stop.set()
    assert not quiet.wait(60.0, stop) and clock.monotonic_s() < 0.1
