"""Threads that die together."""

from __future__ import annotations

import threading

import pytest

from roo.errors import ConfigError
from runtime.crew import Crew


def test_a_thread_that_fails_stops_the_process(caplog: pytest.LogCaptureFixture) -> None:
    stop = threading.Event()
    crew = Crew(stop)
    crew.start("good", lambda: None)
    crew.start("bad", lambda: 1 / 0)
    assert stop.wait(10) and crew.join(10) == []
    assert crew.failed == ["bad"] and "thread bad failed" in caplog.text
    with pytest.raises(RuntimeError, match="threads failed: bad") as told:
        crew.check()
    assert isinstance(told.value.__cause__, ZeroDivisionError)


def test_what_a_thread_refuses_is_one_sentence(caplog: pytest.LogCaptureFixture) -> None:
    def refuse() -> None:
        raise ConfigError("expected 8 partitions, got 4")

    crew = Crew(threading.Event())
    crew.start("topics", refuse)
    crew.join(10)
    with pytest.raises(ConfigError, match="expected 8 partitions, got 4"):
        crew.check()
    assert "thread topics: expected 8 partitions" in caplog.text and "Traceback" not in caplog.text


def test_a_thread_that_does_not_end_is_named() -> None:
    release = threading.Event()
    crew = Crew(threading.Event())
    crew.start("slow", release.wait)
    assert crew.join(0.01) == ["slow"]
    release.set()
    assert crew.join(10) == []
    crew.check()
