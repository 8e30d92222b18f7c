"""Background threads whose failure stops the process, so that a supervisor restarts it; and the time limit of
a shutdown."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Any

from roostream.errors import RoostreamError
from roostream.runtime.clock import Clock, SystemClock

log = logging.getLogger("roostream")

_UNFINISHED: list[threading.Thread] = []


def still_running() -> list[str]:
    """Names of threads that are still running although a `ThreadGroup.join` waited for them."""
    return [thread.name for thread in _UNFINISHED if thread.is_alive()]


class ThreadGroup:
    """Sets `stop` when one of its threads fails."""

    def __init__(self, stop: threading.Event) -> None:
        self.stop = stop
        self.failed: list[str] = []
        self._error: Exception | None = None
        self._threads: list[threading.Thread] = []

    def start(self, name: str, target: Callable[..., object], *args: Any) -> None:
        """Run `target(*args)` in a thread; an exception is logged and sets `stop`."""

        def body() -> None:
            try:
                target(*args)
            except RoostreamError as error:
                log.error("thread %s failed: %s; the process stops", name, error)
                self._fail(name, error)
            except Exception as error:
                log.exception("thread %s failed: this is a defect of Roostream; the process stops", name)
                self._fail(name, error)

        thread = threading.Thread(target=body, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _fail(self, name: str, error: Exception) -> None:
        self._error = self._error or error
        self.failed.append(name)
        self.stop.set()

    def check(self) -> None:
        """Raise the error of the first thread that failed; call after `join`.

        Raises:
            RoostreamError: that of the thread.
            RuntimeError: the thread raised another exception, which is the cause.
        """
        if isinstance(self._error, RoostreamError):
            raise self._error
        if self.failed:
            raise RuntimeError(f"threads failed: {', '.join(self.failed)}") from self._error

    def join(self, timeout_s: float) -> list[str]:
        """Wait for all threads, together at most `timeout_s`. Returns the names of those still running."""
        deadline_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(deadline_s - time.monotonic(), 0.0))
        late = [t for t in self._threads if t.is_alive()]
        _UNFINISHED.extend(t for t in late if t not in _UNFINISHED)
        return [t.name for t in late]


class StopBudget:
    """One time limit for everything a process does after `stop` was set. It is below the time after which a
    supervisor kills."""

    def __init__(self, stop: threading.Event, seconds: float, clock: Clock | None = None) -> None:
        self.stop, self.seconds, self.clock = stop, seconds, clock or SystemClock()
        self._since_s: float | None = None

    def begin(self, seconds: float) -> None:
        """Set `stop` with a limit of `seconds`, unless it is set already. Any thread."""
        if not self.stop.is_set():
            self.seconds = seconds
            self.stop.set()

    def left_s(self) -> float:
        """Time left, counted from the first call after `stop` was set; infinite before. Any thread."""
        if not self.stop.is_set():
            return math.inf
        now_s = self.clock.monotonic_s()
        if self._since_s is None:
            self._since_s = now_s
        return max(self._since_s + self.seconds - now_s, 0.0)
