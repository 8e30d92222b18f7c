"""Event time of a serving process: it never goes back, and the watermark never overtakes a request in
flight."""

from __future__ import annotations

import threading
from collections import Counter

from roostream.runtime.clock import Clock


class InflightWatermark:
    """Thread-safe. Call `open` before and `close` after each request; its log records carry the timestamp
    that `open` returned."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._lock = threading.Lock()
        self._last_ms = 0
        self._open: Counter[int] = Counter()  # timestamps of requests in flight → number of requests

    def open(self) -> int:
        """Return the current time in ms. If the wall clock goes back, the last timestamp is repeated until
        the clock has caught up."""
        with self._lock:
            self._last_ms = max(self._last_ms, self.clock.now_ms())
            self._open[self._last_ms] += 1
            return self._last_ms

    def close(self, stamp_ms: int) -> None:
        """The request is logged, or will never be."""
        with self._lock:
            self._open[stamp_ms] -= 1
            if not self._open[stamp_ms]:
                del self._open[stamp_ms]

    def horizon_ms(self) -> int:
        """Return the watermark: no record with an older timestamp will be logged."""
        with self._lock:
            self._last_ms = max(self._last_ms, self.clock.now_ms())
            return min(self._open, default=self._last_ms)
