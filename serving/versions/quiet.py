"""When work that nobody waits for may run: between requests."""

from __future__ import annotations

import threading
from collections.abc import Callable

from runtime.clock import Clock

_LOOK_S = 0.001


class Quiet:
    """`in_flight` tells how many requests are in work now; whoever lets them in sets it."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.in_flight: Callable[[], int] = lambda: 0

    def wait(self, most_s: float, stop: threading.Event | None = None) -> bool:
        """Until no request is in work, at most so long; whether none is."""
        until_s = self.clock.monotonic_s() + most_s
        while self.in_flight():
            if self.clock.monotonic_s() >= until_s or self.clock.sleep(_LOOK_S, stop):
                return False
        return True
