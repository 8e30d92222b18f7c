"""Liveness and readiness of a program, for health probes (served by roostream/runtime/metrics_server.py).

A program is **alive** if its main loop has completed a turn within a bound. While it starts or waits for a
peer it counts as alive. It is **ready** if it can do its work; with each turn the loop reports what is still
missing.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from roostream.runtime.clock import Clock, SystemClock

_MAX_SHORT_WAIT_S = 5.0  # shorter waits do not make a program unready


class Health:
    """Written by the main loop, read by probes in other threads."""

    def __init__(self, bound_s: float, clock: Clock | None = None) -> None:
        self.bound_s, self.clock = bound_s, clock or SystemClock()
        self._lock = threading.Lock()
        self._turned_s: float | None = None
        self._missing = "it is starting"
        self._waiting, self._waits_since_s = "", 0.0

    def turned(self, missing: str = "") -> None:
        """The main loop completed a turn. `missing`: what the program still needs to do its work, "" =
        nothing."""
        with self._lock:
            self._turned_s, self._missing = self.clock.monotonic_s(), missing

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Wrap a call of the main loop that blocks until a peer (`what`) is available."""
        with self._lock:
            self._waiting, self._waits_since_s = what, self.clock.monotonic_s()
        try:
            yield
        finally:
            with self._lock:
                self._waiting = ""
                if self._turned_s is not None:
                    self._turned_s = self.clock.monotonic_s()

    def dead(self) -> str:
        """Why the program should be restarted, in one line; "" while it is alive."""
        with self._lock:
            if self._turned_s is None or self._waiting:
                return ""
            silent_s = self.clock.monotonic_s() - self._turned_s
            return "" if silent_s <= self.bound_s else f"the main loop has not turned for {silent_s:.0f} s"

    def unready(self) -> str:
        """Why the program cannot do its work, in one line; "" while it can. What a loop that hangs has
        reported last does not count."""
        if reason := self.dead():
            return reason
        with self._lock:
            if self._waiting and self.clock.monotonic_s() - self._waits_since_s > _MAX_SHORT_WAIT_S:
                return f"it waits for {self._waiting}"
            return self._missing
