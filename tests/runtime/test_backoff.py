from __future__ import annotations

import logging
import threading

import pytest

from roostream.errors import UnavailableError
from roostream.runtime.backoff import Backoff
from roostream.runtime.clock import FakeClock


def test_delays_double_up_to_the_cap_with_jitter_below() -> None:
    clock, delays = FakeClock(), []
    backoff = Backoff(what="Kafka", first_s=0.1, max_s=1.0, clock=clock)
    for _ in range(8):
        before = clock.monotonic_s()
        backoff.wait("refused")
        delays.append(clock.monotonic_s() - before)
    for delay, max_delay in zip(delays, (0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0, 1.0), strict=True):
        assert max_delay / 2 - 1e-9 <= delay <= max_delay + 1e-9


def test_a_peer_that_answers_starts_from_the_first_delay_again() -> None:
    clock = FakeClock()
    backoff = Backoff(what="Kafka", first_s=0.1, clock=clock)
    for _ in range(5):
        backoff.wait("refused")
    backoff.reached()
    before = clock.monotonic_s()
    backoff.wait("refused")
    assert clock.monotonic_s() - before <= 0.1 + 1e-9


def test_an_outage_and_its_end_are_logged_at_intervals(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="roostream")
    backoff = Backoff(what="Redis", clock=FakeClock(), max_s=2.0, log_every_s=30.0)
    for _ in range(10):
        backoff.wait("refused")
    assert [r.message for r in caplog.records] == ["waiting for Redis: refused (retrying)"]
    for _ in range(40):
        backoff.wait("refused")
    assert len(caplog.records) > 1
    backoff.reached()
    assert "Redis is back after" in caplog.records[-1].message
    count = len(caplog.records)
    backoff.reached()
    assert len(caplog.records) == count


def test_an_expected_outage_is_a_warning_only_after_a_while(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="roostream")
    backoff = Backoff(what="topics", clock=FakeClock(), log_every_s=30.0, expected_s=20.0)
    for _ in range(40):
        backoff.wait("not all of them exist yet")
    levels = [record.levelno for record in caplog.records]
    assert len(levels) >= 2 and levels[0] == logging.INFO and set(levels[1:]) == {logging.WARNING}


def test_an_outage_beyond_its_limit_ends_the_wait_with_advice() -> None:
    clock = FakeClock()
    clock.advance(1000.0)  # a clock may start anywhere
    backoff = Backoff(what="a shard", timeout_s=1.0, clock=clock)
    with pytest.raises(
        UnavailableError,
        match=r"a shard has not answered for \d s \(refused\); start it or check the address",
    ):
        for _ in range(100):
            backoff.wait("refused")
    assert 1001.0 <= clock.monotonic_s() < 1010.0


def test_a_stop_ends_the_wait() -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(UnavailableError, match="stopped while waiting for Kafka"):
        Backoff(what="Kafka", clock=FakeClock()).wait("refused", stop)


def test_a_call_is_retried_on_retryable_errors() -> None:
    clock, tries = FakeClock(), []

    def call() -> int:
        tries.append(clock.monotonic_s())
        if len(tries) < 3:
            raise OSError("refused")
        return len(tries)

    backoff = Backoff(what="Kafka", clock=clock)
    assert backoff.until(call, (OSError,)) == 3 and clock.monotonic_s() > 0
    with pytest.raises(ZeroDivisionError):
        backoff.until(lambda: 1 // 0, (OSError,))
    with pytest.raises(UnavailableError, match="has not answered"):
        Backoff(what="Kafka", timeout_s=0.0, clock=clock).until(lambda: 1 // 0, (ZeroDivisionError,))
