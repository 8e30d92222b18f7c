"""Admission control: a request that would miss its deadline is refused at once, so that admitted requests
meet theirs (G7)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from serving.errors import RequestError

RETRY_AFTER_S = 1
# A new answer is averaged with this many earlier answers, or with RECENT_S of work, whichever is more
_NEWEST = 9
RECENT_S = 0.25
_FEW = 8  # so few requests may take the whole deadline; a longer queue may take half of it


class AdmissionGate:
    """Estimates when a new request would be answered from the recent service time per request. Used by one
    event loop.

    Requests are scored in passes (serving/http/scoring_queue.py); the service time of a request is the
    duration of its pass divided by its requests. Recent is a share of time, not a number of answers: one pass
    that was delayed by 100 ms is 100 ms of lost time and no sign that all others take as long
    (docs/decisions/0035-admission-control.md).
    """

    def __init__(self, max_in_flight: int, now_s: Callable[[], float] = time.perf_counter) -> None:
        self.max_in_flight, self.now_s = max_in_flight, now_s
        self.in_flight = 0
        self.service_s = 0.0  # recent seconds per request, from the end of the previous one
        self._done_s = 0.0
        self.on_idle: Callable[[], None] = lambda: None  # called when the last request in flight ends

    def expected_s(self) -> float:
        """Time until a request that arrives now would be answered."""
        return (self.in_flight + 1) * self.service_s

    def refusal_reason(self, remaining_s: float) -> str:
        """Why a request that has `remaining_s` left cannot be admitted; "" = it can.

        It is refused if too many requests are in flight, if it would take longer than its deadline, or if a
        longer queue would leave less than half of its time as a reserve. If nothing is in flight it is always
        admitted: otherwise nothing would be measured again.
        """
        in_flight = self.in_flight
        if in_flight >= self.max_in_flight:
            return f"{in_flight} requests are in flight, the maximum of this process; try again"
        if in_flight and self.expected_s() > (remaining_s if in_flight < _FEW else remaining_s / 2):
            return f"{in_flight} requests are in flight and this one might miss its deadline; try again"
        return ""

    def check(self, remaining_s: float) -> None:
        """Raises RequestError 429 with Retry-After, see `refusal_reason`."""
        if why := self.refusal_reason(remaining_s):
            raise overload_error(why)

    @contextmanager
    def admit(self, remaining_s: float) -> Iterator[None]:
        """Raises as `check`."""
        self.enter(remaining_s)
        try:
            yield
        finally:
            self.leave()

    def enter(self, remaining_s: float) -> None:
        """Admit a request. The caller must call `leave` when it ends. Raises what `check` raises."""
        self.check(remaining_s)
        self.in_flight += 1

    def leave(self) -> None:
        self.in_flight -= 1
        if not self.in_flight:
            self.on_idle()

    def scored(self, num_answered: int, since_s: float) -> None:
        """Record a pass with this many answers, whose first request waited since `since_s`. A pass without
        answers is not counted."""
        now_s = self.now_s()
        took_s = now_s - max(since_s, self._done_s)
        if num_answered:
            before_s = max(RECENT_S, _NEWEST * self.service_s) if self.service_s else 0.0
            num_before = before_s / self.service_s if before_s else 0.0
            self.service_s = (before_s + took_s) / (num_before + num_answered)
        self._done_s = now_s


def overload_error(why: str) -> RequestError:
    """The answer to a request that is not admitted."""
    return RequestError(429, why, retry_after_s=RETRY_AFTER_S)
