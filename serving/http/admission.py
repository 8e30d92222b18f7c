"""Who is let in: what can't be answered within its deadline is refused at once, so that what is admitted keeps it (G7)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from serving.errors import RequestError

RETRY_AFTER_S = 1
_SMOOTH = 0.1  # weight of the newest request in the recent service time


class Gate:
    """Requests are scored one pass after another: a new one waits for those before it, each of about the recent service time,
    which is that of a pass over the requests in it (serving/http/scoring_queue.py). Used by one event loop."""

    def __init__(self, max_in_flight: int, now_s: Callable[[], float] = time.perf_counter) -> None:
        self.max_in_flight, self.now_s = max_in_flight, now_s
        self.in_flight = 0
        self.service_s = 0.0  # of recent requests, from when the one before was done
        self._done_s = 0.0

    def expected_s(self) -> float:
        """When a request that comes now would be answered."""
        return (self.in_flight + 1) * self.service_s

    def check(self, left_s: float) -> None:
        """Raises RequestError 429 with Retry-After: too many are in work, or there are `left_s` and it would take longer.

        Where nobody is in work the next one is let in whatever the last one took: else nothing would ever be measured again.
        """
        if self.in_flight >= self.max_in_flight:
            message = f"{self.in_flight} requests are in work, the most that this process takes; try again"
            raise RequestError(429, message, retry_after_s=RETRY_AFTER_S)
        if self.in_flight and self.expected_s() > left_s:
            message = f"{self.in_flight} requests are in work and this one would not be answered within its deadline; try again"
            raise RequestError(429, message, retry_after_s=RETRY_AFTER_S)

    @contextmanager
    def admit(self, left_s: float) -> Iterator[None]:
        """Raises as `check`."""
        self.enter(left_s)
        try:
            yield
        finally:
            self.leave()

    def enter(self, left_s: float) -> None:
        """Whoever gets in has to `leave`. Raises as `check`."""
        self.check(left_s)
        self.in_flight += 1

    def leave(self) -> None:
        self.in_flight -= 1

    def scored(self, num_answered: int, since_s: float) -> None:
        """A pass gave so many answers, the first of which was waited for since `since_s`. What gave none says nothing."""
        now_s = self.now_s()
        if num_answered:
            took_s = (now_s - max(since_s, self._done_s)) / num_answered
            weight = 1 - (1 - _SMOOTH) ** num_answered if self.service_s else 1.0
            self.service_s += (took_s - self.service_s) * weight
        self._done_s = now_s
