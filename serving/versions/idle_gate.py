"""When work that nobody waits for may run: between requests."""

from __future__ import annotations

import threading
from collections.abc import Callable

from roostream.runtime.clock import Clock

MAX_IDLE_WAIT_S = 0.05  # a step of a new version waits so long for a moment without requests, then it takes its turn among them
_LOOK_S = (
    0.01  # who waits looks so often by himself: a second one may have taken the moment, and a stop isn't told
)


class IdleGate:
    """Whoever lets requests in sets `in_flight`, which tells how many are in work now, and calls `notify_idle` when none is any more:
    who waits is woken then, and takes no time from requests before. Any number of threads may `wait`."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.in_flight: Callable[[], int] = lambda: 0
        self._came = threading.Event()

    def notify_idle(self) -> None:
        """No request is in work now. Costs nothing worth mentioning where nobody waits."""
        if not self._came.is_set():
            self._came.set()

    def wait(self, max_s: float, stop: threading.Event | None = None) -> bool:
        """Until no request is in work, at most so long; whether none is."""
        until_s = self.clock.monotonic_s() + max_s
        self._came.clear()
        while self.in_flight():
            remaining_s = until_s - self.clock.monotonic_s()
            if remaining_s <= 0 or (stop is not None and stop.is_set()):
                return False
            self.clock.sleep(min(_LOOK_S, remaining_s), self._came)
            self._came.clear()
        return True
