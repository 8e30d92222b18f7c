"""Liveness and readiness. A program is alive while its main loop turns and ready once its work is done; an
unavailable peer never makes a program dead."""

from __future__ import annotations

import pytest

from roostream.runtime.clock import FakeClock
from roostream.runtime.health import Health


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def health(clock: FakeClock) -> Health:
    return Health(60, clock)


def test_a_starting_program_stays_alive_while_it_waits(health: Health, clock: FakeClock) -> None:
    clock.advance(3600)
    assert health.dead() == "" and health.unready() == "it is starting"


def test_a_turning_loop_is_alive_and_lists_what_is_missing(health: Health, clock: FakeClock) -> None:
    health.turned("it waits for the controller to restore it")
    assert health.unready() == "it waits for the controller to restore it"
    health.turned()
    clock.advance(60)
    assert health.dead() == "" == health.unready()


def test_a_stalled_loop_is_unhealthy_until_it_turns_again(health: Health, clock: FakeClock) -> None:
    health.turned()
    clock.advance(61)
    assert health.dead() == health.unready() == "the main loop has not turned for 61 s"
    health.turned()
    assert health.dead() == "" == health.unready()


def test_a_program_that_waits_for_a_peer_is_alive_but_soon_not_ready(
    health: Health, clock: FakeClock
) -> None:
    health.turned()
    with health.waiting("Redis"):
        clock.advance(4)
        assert health.unready() == "", "a short wait must not end readiness"
        clock.advance(3600)
        assert health.dead() == "" and health.unready() == "it waits for Redis"
    clock.advance(59)
    assert health.dead() == "" == health.unready(), "the time limit counts from the end of the wait"
    clock.advance(2)
    assert health.dead()


def test_a_wait_that_fails_also_ends(health: Health, clock: FakeClock) -> None:
    with pytest.raises(OSError, match="gone"), health.waiting("Redis"):
        raise OSError("gone")
    health.turned()
    assert health.unready() == ""
    clock.advance(61)
    assert health.dead()
