"""Event time at the edge: never backwards within a process, and heartbeats that no open request can be older than."""

from __future__ import annotations

import threading
from collections import Counter

from roostream.runtime.clock import Clock


class InflightWatermark:
    """Thread-safe. `open` and `close` embrace a request; what it logs carries the stamp that `open` gave."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._lock = threading.Lock()
        self._last_ms = 0
        self._open: Counter[int] = Counter()  # stamps of open requests

    def open(self) -> int:
        """Now in ms; a wall clock that goes back is held until time has caught up."""
        with self._lock:
            self._last_ms = max(self._last_ms, self.clock.now_ms())
            self._open[self._last_ms] += 1
            return self._last_ms

    def close(self, stamp_ms: int) -> None:
        """The request is logged, or never will be."""
        with self._lock:
            self._open[stamp_ms] -= 1
            if not self._open[stamp_ms]:
                del self._open[stamp_ms]

    def horizon_ms(self) -> int:
        """Nothing will be logged with an older stamp."""
        with self._lock:
            self._last_ms = max(self._last_ms, self.clock.now_ms())
            return min(self._open, default=self._last_ms)
