"""Lets background work wait for a moment without requests."""

from __future__ import annotations

import threading
from collections.abc import Callable

from roostream.runtime.clock import Clock

MAX_IDLE_WAIT_S = 0.05  # a step of background work waits at most so long, then runs among the requests
_LOOK_S = 0.01  # waiters also poll, because another waiter may consume the event and `stop` does not notify


class IdleGate:
    """Set `in_flight` to a function that counts the requests in progress, and call `notify_idle` when the
    count becomes 0, which wakes the waiters. Any number of threads may `wait`.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.in_flight: Callable[[], int] = lambda: 0
        self._came = threading.Event()

    def notify_idle(self) -> None:
        """No request is in progress. Nearly free if no thread waits."""
        if not self._came.is_set():
            self._came.set()

    def wait(self, max_s: float, stop: threading.Event | None = None) -> bool:
        """Wait until no request is in progress, at most `max_s`; return whether none is."""
        until_s = self.clock.monotonic_s() + max_s
        self._came.clear()
        while self.in_flight():
            remaining_s = until_s - self.clock.monotonic_s()
            if remaining_s <= 0 or (stop is not None and stop.is_set()):
                return False
            self.clock.sleep(min(_LOOK_S, remaining_s), self._came)
            self._came.clear()
        return True
