"""Injected time: programs take a `Clock`, tests pass a `FakeClock`."""

from __future__ import annotations

import math
import threading
import time
from typing import Protocol


class Clock(Protocol):
    """Wall time for timestamps and reports, monotonic time for waiting. Rows and lag depend on event time
    only (guarantee G8)."""

    def now_ms(self) -> int:
        """Milliseconds since 1970; may jump."""

    def monotonic_s(self) -> float:
        """Seconds from an arbitrary start; never goes back."""

    def sleep(self, seconds: float, stop: threading.Event | None = None) -> bool:
        """Wait for about so long, or until `stop` is set; True if it was set."""


class SystemClock:
    """The clock of the machine."""

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic_s(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float, stop: threading.Event | None = None) -> bool:
        if stop is not None:
            return stop.wait(seconds)
        time.sleep(seconds)
        return False


class MonotonicToWallTime:
    """Converts a monotonic time to wall time, once, so that the result stays the same when the wall clock is
    adjusted."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._last: tuple[float, int] = (math.nan, 0)

    def of(self, at_s: float) -> int:
        """Milliseconds since 1970. Any thread."""
        last_s, last_ms = self._last
        if at_s == last_s:
            return last_ms
        at_ms = self.clock.now_ms() - round((self.clock.monotonic_s() - at_s) * 1000)
        self._last = (at_s, at_ms)
        return at_ms


class FakeClock:
    """Stands still until `sleep` or `advance` moves it."""

    def __init__(self, now_ms: int = 1_700_000_000_000) -> None:
        self._now_ms = float(now_ms)
        self._monotonic_s = 0.0

    def now_ms(self) -> int:
        return int(self._now_ms)

    def monotonic_s(self) -> float:
        return self._monotonic_s

    def advance(self, seconds: float) -> None:
        self._now_ms += seconds * 1000
        self._monotonic_s += seconds

    def jump(self, ms: int) -> None:
        """Move only wall time, as when a clock is corrected."""
        self._now_ms += ms

    def sleep(self, seconds: float, stop: threading.Event | None = None) -> bool:
        self.advance(seconds)
        return stop is not None and stop.is_set()
