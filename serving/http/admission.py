"""Who is let in: what can't be answered within its deadline is refused at once, so that what is admitted keeps it (G7)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from serving.errors import RequestError

RETRY_AFTER_S = 1
_NEWEST = 9  # answers before a new one that count beside it, or those of RECENT_S of work, whichever are more
RECENT_S = 0.25
_FEW = 8  # requests in work that keep the processor busy: they may take the whole deadline, a longer queue half of it


class AdmissionGate:
    """Requests are scored one pass after another: a new one waits for those before it, each of about the recent service time,
    which is that of a pass over the requests in it (serving/http/scoring_queue.py). Used by one event loop.

    Recent is a share of time, not a number of answers: a pass that something kept for 100 ms is 100 ms of lost time, and no sign
    that all others take as long (docs/decisions/0099)."""

    def __init__(self, max_in_flight: int, now_s: Callable[[], float] = time.perf_counter) -> None:
        self.max_in_flight, self.now_s = max_in_flight, now_s
        self.in_flight = 0
        self.service_s = 0.0  # of recent requests, from when the one before was done
        self._done_s = 0.0
        self.on_idle: Callable[[], None] = lambda: None  # told whenever the last one in work leaves

    def expected_s(self) -> float:
        """When a request that comes now would be answered."""
        return (self.in_flight + 1) * self.service_s

    def refusal_reason(self, remaining_s: float) -> str:
        """Why a request that has `remaining_s` can't be let in; "": it can.

        Too many are in work, or it would take longer, or so long that a queue of more than a few leaves less than half of the
        time for what nobody foresees. Where nobody is in work the next one is let in whatever the last one took: else nothing
        would ever be measured again.
        """
        in_flight = self.in_flight
        if in_flight >= self.max_in_flight:
            return f"{in_flight} requests are in work, the most that this process takes; try again"
        if in_flight and self.expected_s() > (remaining_s if in_flight < _FEW else remaining_s / 2):
            return f"{in_flight} requests are in work and this one might not be answered within its deadline; try again"
        return ""

    def check(self, remaining_s: float) -> None:
        """Raises RequestError 429 with Retry-After: see `refusal_reason`."""
        if why := self.refusal_reason(remaining_s):
            raise overloaded(why)

    @contextmanager
    def admit(self, remaining_s: float) -> Iterator[None]:
        """Raises as `check`."""
        self.enter(remaining_s)
        try:
            yield
        finally:
            self.leave()

    def enter(self, remaining_s: float) -> None:
        """Whoever gets in has to `leave`. Raises as `check`."""
        self.check(remaining_s)
        self.in_flight += 1

    def leave(self) -> None:
        self.in_flight -= 1
        if not self.in_flight:
            self.on_idle()

    def scored(self, num_answered: int, since_s: float) -> None:
        """A pass gave so many answers, the first of which was waited for since `since_s`. What gave none says nothing."""
        now_s = self.now_s()
        took_s = now_s - max(since_s, self._done_s)
        if num_answered:
            before_s = max(RECENT_S, _NEWEST * self.service_s) if self.service_s else 0.0
            num_before = before_s / self.service_s if before_s else 0.0
            self.service_s = (before_s + took_s) / (num_before + num_answered)
        self._done_s = now_s


def overloaded(why: str) -> RequestError:
    """What a gate refuses with."""
    return RequestError(429, why, retry_after_s=RETRY_AFTER_S)
