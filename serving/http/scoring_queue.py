"""Requests on their way to the scoring thread: whoever waits when it gets free is scored with the others, in one pass.

Nobody waits for company: while the thread is free a request goes there alone, at once. So passes grow with the load and no
further, and the fixed part of a pass is paid once for all that came in the meantime.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import NamedTuple

from serving.http.admission import Gate
from serving.rank import Ranked
from serving.request import RankRequest

RankAll = Callable[[list[tuple[RankRequest, int]]], "list[Ranked | Exception]"]


class _QueuedRank(NamedTuple):
    request: RankRequest
    time_ms: int
    since_s: float
    outcome: asyncio.Future[Ranked]


class ScoringQueue:
    """First come, first scored. Used by one event loop; `rank_all` runs in the one thread of `executor`."""

    def __init__(
        self,
        executor: Executor,
        rank_all: RankAll,
        gate: Gate,
        most: tuple[int, int],
        waited: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        """`most`: requests and candidates of a pass; a request with more candidates goes alone. `waited` is told for each
        request how long it was in the queue."""
        self.executor, self.rank_all, self.gate, self.waited = executor, rank_all, gate, waited
        self.max_requests, self.max_candidates = most
        self._waiting: deque[_QueuedRank] = deque()
        self._is_busy = False

    async def score(self, request: RankRequest, time_ms: int) -> Ranked:
        """What `RankService.rank` gives. Cancelled (by the deadline), it leaves the queue if it hasn't begun.

        Raises:
            Whatever `RankService.rank` does.
        """
        outcome: asyncio.Future[Ranked] = asyncio.get_running_loop().create_future()
        self._waiting.append(_QueuedRank(request, time_ms, self.gate.now_s(), outcome))
        self._begin()
        return await outcome

    def _begin(self) -> None:
        """A pass, if the thread is free and somebody waits."""
        batch = [] if self._is_busy else self._taken()
        if not batch:
            return
        self._is_busy = True
        now_s = self.gate.now_s()
        for a in batch:
            self.waited(now_s - a.since_s)
        self.executor.submit(self._pass, batch, asyncio.get_running_loop())

    def _pass(self, batch: list[_QueuedRank], loop: asyncio.AbstractEventLoop) -> None:
        """In the scoring thread: straight back to the loop, without the futures of an executor's result."""
        outcomes: Sequence[Ranked | Exception]
        try:
            outcomes = self.rank_all([(a.request, a.time_ms) for a in batch])
        except Exception as error:
            outcomes = [error] * len(batch)
        loop.call_soon_threadsafe(self._deliver, batch, outcomes)

    def _taken(self) -> list[_QueuedRank]:
        """From the front, as many as go into one pass; nobody whose deadline has passed."""
        batch: list[_QueuedRank] = []
        candidates = 0
        while self._waiting and len(batch) < self.max_requests:
            if self._waiting[0].outcome.done():
                self._waiting.popleft()
                continue
            candidates += len(self._waiting[0].request.item_ids)
            if batch and candidates > self.max_candidates:
                break
            batch.append(self._waiting.popleft())
        return batch

    def _deliver(self, batch: list[_QueuedRank], outcomes: Sequence[Ranked | Exception]) -> None:
        """The next pass begins first, so that the thread has work while answers are written."""
        self._is_busy = False
        self._begin()
        self.gate.scored(sum(isinstance(outcome, Ranked) for outcome in outcomes), batch[0].since_s)
        for asked, outcome in zip(batch, outcomes, strict=True):
            if asked.outcome.done():
                continue
            if isinstance(outcome, Ranked):
                asked.outcome.set_result(outcome)
            else:
                asked.outcome.set_exception(outcome)
