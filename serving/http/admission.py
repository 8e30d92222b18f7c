"""Admission control: a request that would miss its deadline is refused at once, so that admitted requests
meet theirs (guarantee G7).

Rank requests have an `AdmissionGate`. Engagements and retrieval have a `WorkLane` each: a gate of their own,
and a share of the time beside the rank requests.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from serving.errors import RequestError

RETRY_AFTER_S = 1
# A new answer is averaged with this many earlier answers, or with RECENT_S of work, whichever is more
_NEWEST = 9
RECENT_S = 0.25
BURST_S = 0.005  # work of a lane that needs no pause
QUIET_S = 1.0  # without a rank request for so long, a lane takes all of the time
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
        self.entered_s = -math.inf  # when the last request was admitted
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
        """Admit a request while the context is open. Raises as `check`."""
        self.enter(remaining_s)
        try:
            yield
        finally:
            self.leave()

    def enter(self, remaining_s: float) -> None:
        """Admit a request. The caller must call `leave` when it ends. Raises what `check` raises."""
        self.check(remaining_s)
        self.in_flight += 1
        self.entered_s = self.now_s()

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


class WorkLane:
    """Admission of one kind of requests that share the event loop or the scoring thread with rank requests:
    engagements, retrieval. Used by one event loop.

    Its requests have an admission gate of their own, so their number does not refuse rank requests. They are
    worked on one at a time, first come, first served, so a rank request never waits for more than one piece
    of their work. While rank requests come, work takes `share` of the time at most: a piece of 1 ms with a
    share of 0.25 is followed by a pause of 3 ms. BURST_S of work needs no pause, so that single engagements
    are not delayed. Pauses count as service time, therefore the gate refuses what would not get its turn.
    """

    def __init__(
        self,
        ranking: AdmissionGate,
        share: float = 1.0,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        work_s: Callable[[], float] = time.thread_time,
    ) -> None:
        """`ranking`: the gate of the rank requests; its maximum in flight applies to the lane too. `work_s`:
        processor time of the event loop, so that a piece that other programs interrupted needs no longer
        pause."""
        self.gate = AdmissionGate(ranking.max_in_flight, ranking.now_s)
        self._ranking, self._share, self._sleep, self._work_s = ranking, share, sleep, work_s
        self._turn = asyncio.Lock()
        self._due_s = -math.inf  # until then, earlier work has used the lane's share of the time
        self._piece_s = 0.0  # `work_s` when the piece that is being worked on began

    def check(self, until_s: float) -> None:
        """Raises RequestError 429: a request with this deadline (time of the event loop) cannot be
        admitted."""
        self.gate.check(remaining_s(until_s))

    async def begin(self, until_s: float) -> float:
        """Admit a request and wait for its turn; return the time since which it waited. `end` must follow.

        Raises:
            RequestError: 429: it was not admitted, or its turn did not come before `until_s`. Nothing was
            done.
        """
        self.gate.enter(remaining_s(until_s))
        since_s = self.gate.now_s()
        try:
            async with asyncio.timeout_at(until_s):
                await self._turn.acquire()
                try:
                    await self._wait_for_share()
                except BaseException:
                    self._turn.release()
                    raise
        except BaseException as error:
            self.gate.leave()
            if isinstance(error, TimeoutError):
                raise overload_error(
                    "other requests of its kind took until its deadline; try again"
                ) from None
            raise
        self._piece_s = self._work_s()
        return since_s

    def end(self, since_s: float, is_answered: bool = True) -> None:
        """The request that `begin` admitted is no longer worked on."""
        self._charge()
        self._turn.release()
        self.gate.scored(int(is_answered), since_s)
        self.gate.leave()

    @asynccontextmanager
    async def turn(self, until_s: float) -> AsyncIterator[None]:
        """`begin`, then `end`. Raises as `begin`."""
        since_s = await self.begin(until_s)
        is_answered = False
        try:
            yield
            is_answered = True
        finally:
            self.end(since_s, is_answered)

    async def pause(self) -> None:
        """Call between two pieces of work in the event loop: other requests get their turns."""
        self._charge()
        if not await self._wait_for_share():
            await self._sleep(0.0)
        self._piece_s = self._work_s()

    def _charge(self) -> None:
        worked_s = self._work_s() - self._piece_s
        self._due_s = max(self._due_s, self.gate.now_s() - worked_s) + worked_s / self._share

    async def _wait_for_share(self) -> bool:
        """Return whether it waited."""
        now_s = self.gate.now_s()
        wait_s = self._due_s - BURST_S - now_s
        if wait_s <= 0 or now_s - self._ranking.entered_s > QUIET_S:
            return False
        await self._sleep(wait_s)
        return True


def remaining_s(until_s: float) -> float:
    """Seconds until a deadline, which is a time of the running event loop's clock."""
    return until_s - asyncio.get_running_loop().time()


def overload_error(why: str) -> RequestError:
    """The answer to a request that is not admitted."""
    return RequestError(429, why, retry_after_s=RETRY_AFTER_S)
