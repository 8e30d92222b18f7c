"""The queue of parsed requests: all that wait when scoring becomes free are scored together in one pass.

No request waits for others: while nothing is being scored, a request is scored alone, at once. So passes grow
with the load only, and the fixed cost of a pass is shared by the requests that arrived during the previous
one.

If all that waits takes up to LOOP_S, as estimated from recent passes, the pass runs in the event loop's own
thread, since switching threads would cost more than the loop gains. The loop gets a turn before the next
pass; several turns while connections arrive, because uvloop accepts one per turn. If more waits, it is scored
in one pass in the scoring thread: several small passes in the loop would cost more. So are all passes if they
may wait for a shard.

A pass reads online features from Redis in one round trip, which the estimate includes: while Redis is slow,
passes run in the thread. A read that becomes slow suddenly holds the loop once, up to its limit of 50 ms.
"""

from __future__ import annotations

import asyncio
import math
import resource
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import NamedTuple

from serving.http.admission import AdmissionGate
from serving.rank import RankResult
from serving.request import RankRequest

RankAll = Callable[[list[tuple[RankRequest, int]]], "list[RankResult | Exception]"]

LOOP_S = 0.003
MAX_TURNS = 16  # turns of the event loop between two passes
_CANDIDATES = 64  # candidates that take about as long as the fixed part of a request
# Weight of the newest pass in the estimate: when it took longer than expected, and when it did not.
_WEIGHT_IF_LONGER, _WEIGHT_IF_SHORTER = 0.5, 0.1


class PassTimeEstimate:
    """Estimates the duration of a pass: one unit per request, and one more per _CANDIDATES candidates."""

    def __init__(self) -> None:
        self.unit_s = math.inf  # infinite until a pass was measured

    def expected_s(self, num_requests: int, num_candidates: int) -> float:
        """Return inf while nothing was measured."""
        return self.unit_s * (num_requests + num_candidates / _CANDIDATES)

    def record(self, seconds: float, num_requests: int, num_candidates: int) -> None:
        """Record a pass that gave answers; `seconds` is from a `PassTimer`."""
        unit_s = seconds / (num_requests + num_candidates / _CANDIDATES)
        known_s = self.unit_s if self.unit_s < math.inf else unit_s
        self.unit_s = known_s + (unit_s - known_s) * (
            _WEIGHT_IF_LONGER if unit_s > known_s else _WEIGHT_IF_SHORTER
        )


class PassTimer:
    """Measures a pass in the current thread, from its construction on.

    A pass that was long because other programs had the processor would be as long in another thread. So if
    the thread did not block, its CPU time counts instead (in ticks of the kernel, about 4 ms).
    """

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s, self._begin_s = now_s, now_s()
        self._begin = resource.getrusage(resource.RUSAGE_THREAD)

    def read_s(self) -> float:
        """Seconds that the pass has taken so far, without the time of other programs."""
        seconds, begin = self._now_s() - self._begin_s, self._begin
        if seconds <= LOOP_S:
            return seconds
        end = resource.getrusage(resource.RUSAGE_THREAD)
        if end.ru_nvcsw > begin.ru_nvcsw:
            return seconds
        return min(seconds, end.ru_utime - begin.ru_utime + end.ru_stime - begin.ru_stime)


class _QueuedRank(NamedTuple):
    request: RankRequest
    time_ms: int
    since_s: float
    outcome: asyncio.Future[RankResult]

    @property
    def num_candidates(self) -> int:
        return len(self.request.item_ids)


class ScoringQueue:
    """First come, first served. Used by one event loop; `rank_all` runs in its thread or in the single thread
    of `executor`, never in both at once.
    """

    def __init__(
        self,
        executor: Executor,
        rank_all: RankAll,
        gate: AdmissionGate,
        max_requests: int,
        max_candidates: int,
        waited: Callable[[float], None] = lambda seconds: None,
        row_reads_wait: bool = False,
    ) -> None:
        """`max_requests`, `max_candidates`: limits of a pass; a request with more candidates is scored alone.
        `waited` is called with the queueing time of each request. `row_reads_wait`: whether a pass may wait
        for a shard; it then always runs in the thread.
        """
        self.executor, self.rank_all, self.gate, self.waited = executor, rank_all, gate, waited
        self.row_reads_wait = row_reads_wait
        self.max_requests, self.max_candidates = max_requests, max_candidates
        self.pass_time = PassTimeEstimate()
        # Number of open connections. While it changes, more are waiting to be accepted.
        self.num_connections: Callable[[], int] = lambda: 0
        self._num_seen = self._turns = 0
        self._waiting: deque[_QueuedRank] = deque()
        self._is_busy = self._is_due = False  # a pass is running; a pass in the loop is scheduled

    async def score(self, request: RankRequest, time_ms: int) -> RankResult:
        """Return what `RankService.rank` returns or raises. If cancelled by the deadline before its pass, the
        request leaves the queue."""
        outcome: asyncio.Future[RankResult] = asyncio.get_running_loop().create_future()
        self._waiting.append(_QueuedRank(request, time_ms, self.gate.now_s(), outcome))
        self._start_pass()
        return await outcome

    def _start_pass(self) -> None:
        """Start a pass if none is running and requests wait. A pass in the loop starts after the loop has
        read its other input."""
        if self._is_busy or self._is_due or not self._waiting:
            return
        if self._fits_in_loop():
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._run_in_loop)
        elif batch := self._take_batch():
            self._is_busy = True
            self.executor.submit(self._run_in_thread, batch, asyncio.get_running_loop())

    def _fits_in_loop(self) -> bool:
        """Whether all waiting requests can be scored within LOOP_S, without a wait for a shard."""
        candidates = sum(queued.num_candidates for queued in self._waiting)
        expected_s = self.pass_time.expected_s(len(self._waiting), candidates)
        return expected_s <= LOOP_S and not self.row_reads_wait

    def _run_in_thread(self, batch: list[_QueuedRank], loop: asyncio.AbstractEventLoop) -> None:
        """In the scoring thread. The result goes straight to the loop, without an executor's futures."""
        outcomes, took_s = self._rank_batch(batch)
        loop.call_soon_threadsafe(self._deliver, batch, outcomes, took_s)

    def _run_in_loop(self) -> None:
        """In the event loop, unless more requests have come meanwhile than fit."""
        if self._connections_changing():
            asyncio.get_running_loop().call_soon(self._run_in_loop)
            return
        self._is_due = False
        if self._fits_in_loop() and (batch := self._take_batch()):
            self._deliver(batch, *self._rank_batch(batch))
        else:
            self._start_pass()

    def _connections_changing(self) -> bool:
        """Whether the loop should get one more turn first."""
        num = self.num_connections()
        is_still = num == self._num_seen or self._turns >= MAX_TURNS
        self._num_seen, self._turns = num, 0 if is_still else self._turns + 1
        return not is_still

    def _rank_batch(self, batch: list[_QueuedRank]) -> tuple[Sequence[RankResult | Exception], float]:
        """Return (outcome of each request, duration in s)."""
        timer = PassTimer(self.gate.now_s)
        outcomes: Sequence[RankResult | Exception]
        try:
            outcomes = self.rank_all([(a.request, a.time_ms) for a in batch])
        except Exception as error:
            outcomes = [error] * len(batch)
        return outcomes, timer.read_s()

    def _take_batch(self) -> list[_QueuedRank]:
        """Take the requests of one pass from the front of the queue, without those whose deadline has
        passed."""
        batch: list[_QueuedRank] = []
        candidates, now_s = 0, self.gate.now_s()
        while self._waiting and len(batch) < self.max_requests:
            first = self._waiting[0]
            if not first.outcome.done():
                if batch and candidates + first.num_candidates > self.max_candidates:
                    break
                candidates += first.num_candidates
                batch.append(first)
                self.waited(now_s - first.since_s)
            self._waiting.popleft()
        return batch

    def _deliver(
        self, batch: list[_QueuedRank], outcomes: Sequence[RankResult | Exception], took_s: float
    ) -> None:
        """Start the next pass before answering, so that the scoring thread has work meanwhile."""
        num_answered = sum(isinstance(outcome, RankResult) for outcome in outcomes)
        if num_answered:
            self.pass_time.record(took_s, len(batch), sum(a.num_candidates for a in batch))
        self._is_busy = False
        self._start_pass()
        self.gate.scored(num_answered, batch[0].since_s)
        for queued, outcome in zip(batch, outcomes, strict=True):
            if queued.outcome.done():
                continue
            if isinstance(outcome, RankResult):
                queued.outcome.set_result(outcome)
            else:
                queued.outcome.set_exception(outcome)
