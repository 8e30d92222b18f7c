"""Time, injected: programs take a Clock, tests give them a FakeClock."""

from __future__ import annotations

import math
import threading
import time
from typing import Protocol


class Clock(Protocol):
    """Wall time for stamping and reporting, monotonic time for waiting. Never decides about rows or lag: events do (G8)."""

    def now_ms(self) -> int:
        """Milliseconds since 1970; may jump."""

    def monotonic_s(self) -> float:
        """Seconds from an arbitrary start; never goes back."""

    def sleep(self, seconds: float, stop: threading.Event | None = None) -> bool:
        """Wait, or until `stop` is set; True if it was set. Not exact."""


class SystemClock:
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
    """The wall time of a monotonic moment: taken when it is first asked for, so that it stays when clocks are set."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._known: tuple[float, int] = (math.nan, 0)

    def of(self, at_s: float) -> int:
        """ms since 1970. Any thread."""
        known_s, known_ms = self._known
        if at_s == known_s:
            return known_ms
        at_ms = self.clock.now_ms() - round((self.clock.monotonic_s() - at_s) * 1000)
        self._known = (at_s, at_ms)
        return at_ms


class FakeClock:
    """Stands still; `sleep` and `advance` move it."""

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
        """Move wall time only, as a corrected clock does."""
        self._now_ms += ms

    def sleep(self, seconds: float, stop: threading.Event | None = None) -> bool:
        self.advance(seconds)
        return stop is not None and stop.is_set()
