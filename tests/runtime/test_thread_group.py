"""A group of threads: the failure of one stops the program."""

from __future__ import annotations

import math
import threading
import time

import pytest

from roostream.errors import ConfigError
from roostream.runtime.clock import FakeClock
from roostream.runtime.thread_group import StopBudget, ThreadGroup


def test_a_thread_that_fails_stops_the_process(caplog: pytest.LogCaptureFixture) -> None:
    stop = threading.Event()
    threads = ThreadGroup(stop)
    threads.start("good", lambda: None)
    threads.start("bad", lambda: 1 / 0)
    assert stop.wait(10) and threads.join(10) == []
    assert threads.failed == ["bad"] and "thread bad failed" in caplog.text
    with pytest.raises(RuntimeError, match="threads failed: bad") as caught:
        threads.check()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_user_error_in_a_thread_is_logged_as_one_sentence(caplog: pytest.LogCaptureFixture) -> None:
    def refuse() -> None:
        raise ConfigError("expected 8 partitions, got 4")

    threads = ThreadGroup(threading.Event())
    threads.start("topics", refuse)
    threads.join(10)
    with pytest.raises(ConfigError, match="expected 8 partitions, got 4"):
        threads.check()
    assert "thread topics failed: expected 8 partitions" in caplog.text and "Traceback" not in caplog.text


def test_a_thread_that_does_not_end_is_named() -> None:
    release = threading.Event()
    threads = ThreadGroup(threading.Event())
    threads.start("slow", release.wait)
    assert threads.join(0.01) == ["slow"]
    release.set()
    assert threads.join(10) == []
    threads.check()


def test_all_threads_share_one_time_limit() -> None:
    release, began_s = threading.Event(), time.monotonic()
    threads = ThreadGroup(threading.Event())
    for _ in range(100):
        threads.start("slow", release.wait)
    assert threads.join(0.1) == ["slow"] * 100
    assert time.monotonic() - began_s < 9, "the limit must hold for all threads together"
    release.set()


def test_a_stop_budget_counts_from_the_moment_at_which_the_stop_was_seen() -> None:
    stop, clock = threading.Event(), FakeClock()
    budget = StopBudget(stop, 8.0, clock)
    assert budget.left_s() == math.inf
    stop.set()
    clock.advance(100)
    assert budget.left_s() == 8.0
    clock.advance(5)
    assert budget.left_s() == 3.0
    clock.advance(5)
    assert budget.left_s() == 0.0
