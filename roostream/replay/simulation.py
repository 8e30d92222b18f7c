"""The closed loop: simulated users request a ranking, react to it, and the ranking is evaluated under the
hidden model.

visit ─► POST /v1/rank ─► served order ─► expected clicks (ExpectedClickRates)
           ▲                   └─► reactions, after real delays ─► POST /v1/engagements (some twice)
           └─ another page of the same request, sometimes
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Coroutine
from typing import Any

import numpy as np

from roostream.replay.config import SimulateConfig
from roostream.replay.http_client import HttpClient
from roostream.replay.report_files import write_report
from roostream.replay.visitors import Reaction, Visit, Visitors
from roostream.replay.world import ExpectedClicks, World, WorldConfig, expected_clicks
from roostream.runtime.clock import Clock
from roostream.schema.ids import hash64

log = logging.getLogger("roostream.simulator")
_RANK_TIMEOUT_S = 10.0
_ENGAGEMENT_TIMEOUT_S = 120.0
_DRAIN_S = 20.0
_REPORT_S = 10.0
_STOP_CHECK_S = 0.2


class Simulation:
    """One simulation; call `run` once."""

    def __init__(
        self, config: SimulateConfig, client: HttpClient, clock: Clock, *, delay_scale: float = 1.0
    ) -> None:
        """`delay_scale` shortens all delays of the users in tests."""
        self.config, self.client, self.clock, self.delay_scale = config, client, clock, delay_scale
        self.world = World(
            WorldConfig(
                seed=config.seed,
                num_users=config.users,
                num_items=config.items,
                item_life_ms=config.item_life_ms,
                mean_candidates=config.candidates,
            )
        )
        self.click_rates = ExpectedClickRates()
        self.num_requests = self.num_engagements = self.num_clicks = self.num_dropped = self.num_cut_off = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._in_flight = 0
        self._start_s = clock.monotonic_s()

    async def run(self, stop: threading.Event) -> None:
        """Run until `stop` is set or `seconds` have passed.

        Without `stop` it then waits up to 20 s for pending reactions. The others are counted as cut off.
        """
        visitors = Visitors(self.world, self.config.seed, f"{self.clock.now_ms():x}")
        self._start_s = self.clock.monotonic_s()
        next_s, report_s = self._elapsed_s(), _REPORT_S
        while not self._is_over(stop):
            next_s = max(next_s + visitors.gap_s(self.config.rate), self._elapsed_s() - 1.0)
            await asyncio.sleep(0)  # also without a pause, the others go on
            while (left_s := next_s - self._elapsed_s()) > 0 and not self._is_over(stop):
                await asyncio.sleep(min(left_s, _STOP_CHECK_S))
            if left_s > 0:
                break
            self._arrive(visitors)
            if self._elapsed_s() >= report_s:
                report_s += _REPORT_S
                self.write_report()
        await self._drain(0.0 if stop.is_set() else _DRAIN_S)
        self.write_report()

    def report(self) -> dict[str, object]:
        """The JSON report of docs/protocols.md, section Reports."""
        return {
            "counts": {
                "requests": self.num_requests,
                "candidates": self.click_rates.total.shown,
                "engagements": self.num_engagements,
                "clicks": self.num_clicks,
                "dropped": self.num_dropped,
                "cut_off": self.num_cut_off,
                "http": dict(self.client.outcomes),
            },
            "click_rate": self.click_rates.total.rates(),
            "click_rate_recent": self.click_rates.recent.rates(),
            "click_rate_by_minute": self.click_rates.by_minute(),
            "wall_s": self._elapsed_s(),
        }

    def write_report(self) -> None:
        if self.config.report:
            write_report(self.config.report, self.report())

    def _is_over(self, stop: threading.Event) -> bool:
        return stop.is_set() or 0 < self.config.seconds <= self._elapsed_s()

    def _elapsed_s(self) -> float:
        return self.clock.monotonic_s() - self._start_s

    def _arrive(self, visitors: Visitors) -> None:
        """Start one visit, or drop it if too many requests wait for serving."""
        if self._in_flight >= self.config.max_in_flight:
            self.num_dropped += 1
            return
        visit = visitors.next(self.clock.now_ms())
        self._spawn(self._visit(visitors, visit))

    async def _visit(self, visitors: Visitors, visit: Visit) -> None:
        shown = await self._show(visitors, visit, visit.items_n, 0)
        for _ in range(visit.pages if shown else 0):
            await self._sleep(0.5 + float(visitors.rng.exponential(0.5)))
            items_n = visitors.more(visit, self.clock.now_ms())
            if len(items_n) >= 2:
                await self._show(visitors, visit, items_n, shown)

    async def _show(self, visitors: Visitors, visit: Visit, items_n: np.ndarray, first: int) -> int:
        """Request the order of one page, evaluate it, and start the reactions. Returns the number of items
        shown."""
        self._in_flight += 1
        try:
            body = self._rank_body(visit, items_n, first)
            answer = await self.client.post("/v1/rank", body, _RANK_TIMEOUT_S)
        finally:
            self._in_flight -= 1
        if answer is None:
            return 0
        order = np.array(answer.get("order", ()), dtype=np.int64)
        if not np.array_equal(np.sort(order), np.arange(len(items_n))):
            log.error("expected a permutation of %d candidates, got %s", len(items_n), order.tolist())
            return 0
        served_n, now_ms = items_n[order], self.clock.now_ms()
        self.num_requests += first == 0
        attraction_n = self.world.attraction(visit.user_id, served_n, now_ms)
        expected = expected_clicks(attraction_n, self.world.examination(len(served_n), first))
        self.click_rates.add(expected, self._elapsed_s())
        for reaction in visitors.react(visit, served_n, now_ms, first):
            self._spawn(self._engage(visit, reaction))
        return len(served_n)

    async def _engage(self, visit: Visit, reaction: Reaction) -> None:
        """Send a reaction after its delay; duplicates have the same event id."""
        await self._sleep(reaction.delay_s)
        body = {
            "request_id": visit.request_id,
            "user_id": visit.user_id,
            "session_id": visit.session_id,
            "event_id": reaction.event_id,
            "item_id": reaction.item_id,
            "action": reaction.action,
            "value": reaction.value,
        }
        for _ in range(1 + reaction.repeats):
            sent = await self.client.post("/v1/engagements", body, _ENGAGEMENT_TIMEOUT_S)
        if sent is not None:
            self.num_engagements += 1
            self.num_clicks += reaction.action == "click"

    def _rank_body(self, visit: Visit, items_n: np.ndarray, first: int) -> dict[str, object]:
        """A further page only adds candidates; it repeats the request features for scoring, and they are not
        logged again."""
        items = items_n.tolist()
        category = [hash64(f"category/{self.world.category_of(i)}") for i in items]
        body: dict[str, object] = {
            "request_id": visit.request_id,
            "user_id": visit.user_id,
            "session_id": visit.session_id,
            "candidates": {"item_id": items, "category": category},
        }
        ro = {"user": [visit.user_id], "device": [visit.device_id]}
        return {**body, "append": True, "first_position": first, "ro": ro} if first else {**body, "ro": ro}

    async def _sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds * self.delay_scale)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a simulated user failed: %r", task.exception())

    async def _drain(self, limit_s: float) -> None:
        until_s = self._elapsed_s() + limit_s
        while self._tasks and self._elapsed_s() < until_s:
            await asyncio.wait(set(self._tasks), timeout=until_s - self._elapsed_s())
        self.num_cut_off = len(self._tasks)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


ORDERS = ("served", "random", "best")


class ExpectedClickRates:
    """Expected clicks per shown candidate under the hidden model, in total, recently and per minute.

    They have no sampling noise, so that small differences are visible.
    """

    def __init__(self, window: int = 1000) -> None:
        self.total = _Sum()
        self.recent = _Sum()
        self._window: deque[ExpectedClicks] = deque()
        self._size = window
        self._minutes: dict[int, _Sum] = {}

    def add(self, expected: ExpectedClicks, elapsed_s: float) -> None:
        """Add one request, `elapsed_s` after the start. At most 1,440 minutes are kept."""
        self.total.add(expected)
        self.recent.add(expected)
        self._window.append(expected)
        if len(self._window) > self._size:
            self.recent.add(self._window.popleft(), -1)
        self._minutes.setdefault(int(elapsed_s // 60), _Sum()).add(expected)
        if len(self._minutes) > 1440:
            del self._minutes[next(iter(self._minutes))]

    def by_minute(self) -> list[dict[str, float]]:
        """The rates of each minute with requests, over the last day."""
        return [{"minute": minute, **sums.rates()} for minute, sums in self._minutes.items()]


class _Sum:
    def __init__(self) -> None:
        self.clicks = dict.fromkeys(ORDERS, 0.0)
        self.shown = 0

    def add(self, expected: ExpectedClicks, sign: int = 1) -> None:
        for order in ORDERS:
            self.clicks[order] += sign * getattr(expected, order)
        self.shown += sign * expected.shown

    def rates(self) -> dict[str, float]:
        return {order: self.clicks[order] / self.shown if self.shown else 0.0 for order in ORDERS}
