"""Whether a program lives and whether it does its work, for the probes of whoever runs it (roostream/runtime/metrics_server.py serves them).

**Alive** is about the program itself: its main loop has turned within a bound. A peer that is away never makes it dead: a
program that starts, or that waits for a peer, needn't turn. **Ready** is about its work: the loop says with each turn what is
still missing.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from roostream.runtime.clock import Clock, SystemClock

_PATIENCE_S = 5.0  # a wait that is shorter doesn't make a program unready


class Health:
    """Written by the main loop, read by probes in other threads."""

    def __init__(self, bound_s: float, clock: Clock | None = None) -> None:
        self.bound_s, self.clock = bound_s, clock or SystemClock()
        self._lock = threading.Lock()
        self._turned_s: float | None = None
        self._missing = "it is starting"
        self._waiting, self._waits_since_s = "", 0.0

    def turned(self, missing: str = "") -> None:
        """The main loop has gone round; `missing` says what the program still needs to do its work, "" = nothing."""
        with self._lock:
            self._turned_s, self._missing = self.clock.monotonic_s(), missing

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Around a call of the main loop that returns only when a peer, named `what`, is back."""
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
        """Why the program should be started anew, in one line; "" while it lives."""
        with self._lock:
            if self._turned_s is None or self._waiting:
                return ""
            silent_s = self.clock.monotonic_s() - self._turned_s
            return "" if silent_s <= self.bound_s else f"the main loop has not turned for {silent_s:.0f} s"

    def unready(self) -> str:
        """What the program waits for, in one line; "" while it does its work."""
        with self._lock:
            if self._waiting and self.clock.monotonic_s() - self._waits_since_s > _PATIENCE_S:
                return f"it waits for {self._waiting}"
            return self._missing
