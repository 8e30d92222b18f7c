"""Work lanes: engagements and retrievals get a share of the time beside rank requests, are refused early
under overload, and do not block rank requests. Time is simulated by the event loop."""

from __future__ import annotations

import asyncio
import selectors
import threading
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest

from serving.errors import RequestError
from serving.http.admission import AdmissionGate, WorkLane
from serving.http.app import HttpInterface
from tests.serving.retrieval_cases import make_retrieval
from tests.serving.serving_cases import BODY, SCHEMA, build_serving
from tests.serving.serving_fakes import FakeRows

DEADLINE_S = 1.0
SECONDS = 20


class SimulatedTimeLoop(asyncio.SelectorEventLoop):
    """An event loop that does not wait: its clock jumps to the next timer."""

    def __init__(self) -> None:
        self.now_s = 0.0
        loop = self

        class Selector(selectors.SelectSelector):
            def select(self, timeout: float | None = None) -> Any:
                loop.now_s += timeout or 0.0
                return super().select(0)

        super().__init__(Selector())

    def time(self) -> float:
        return self.now_s


def simulate(main: Callable[[SimulatedTimeLoop], Coroutine[Any, Any, None]]) -> None:
    loop = SimulatedTimeLoop()
    try:
        loop.run_until_complete(main(loop))
    finally:
        loop.close()


def test_a_lane_takes_its_share_of_the_time_while_rank_requests_come() -> None:
    async def main(loop: SimulatedTimeLoop) -> None:
        gate = AdmissionGate(100, loop.time)
        lane = WorkLane(gate, 0.25, work_s=loop.time)
        async with lane.turn(60.0):
            for _ in range(200):
                with gate.admit(DEADLINE_S):
                    loop.now_s += 0.001
                await lane.pause()
        assert 0.7 < loop.now_s <= 0.8, "200 ms of work at a quarter of the time"

    simulate(main)


def test_a_lane_takes_all_of_the_time_without_rank_requests() -> None:
    async def main(loop: SimulatedTimeLoop) -> None:
        lane = WorkLane(AdmissionGate(100, loop.time), 0.25, work_s=loop.time)
        async with lane.turn(60.0):
            for _ in range(200):
                loop.now_s += 0.001
                await lane.pause()
        assert loop.now_s == pytest.approx(0.2)

    simulate(main)


def test_short_work_is_not_delayed() -> None:
    async def main(loop: SimulatedTimeLoop) -> None:
        gate = AdmissionGate(100, loop.time)
        lane = WorkLane(gate, 0.25, work_s=loop.time)
        gate.enter(DEADLINE_S)
        for _ in range(10):
            async with lane.turn(60.0):
                loop.now_s += 0.0001
        assert loop.now_s == pytest.approx(0.001)

    simulate(main)


@pytest.mark.parametrize("share", [0.25, 1.0])
@pytest.mark.parametrize("service_s", [0.01, 0.03])
def test_three_times_the_capacity_is_refused_early_and_the_rest_is_answered_in_time(
    service_s: float, share: float
) -> None:
    counts: Counter[str] = Counter()

    async def submit(loop: SimulatedTimeLoop, lane: WorkLane) -> None:
        arrival_s = loop.now_s
        try:
            lane.check(arrival_s + DEADLINE_S)
            since_s = await lane.begin(arrival_s + DEADLINE_S)
        except RequestError as error:
            assert error.status == 429 and error.retry_after_s == 1
            counts["refused at once" if loop.now_s == arrival_s else "refused late"] += 1
            return
        if share < 1:
            loop.now_s += service_s  # in the event loop
        else:
            await asyncio.sleep(service_s)  # in the scoring thread
        lane.end(since_s)
        counts["in time" if loop.now_s <= arrival_s + DEADLINE_S else "late"] += 1

    async def main(loop: SimulatedTimeLoop) -> None:
        gate = AdmissionGate(256, loop.time)
        lane = WorkLane(gate, share, work_s=loop.time)
        async with asyncio.TaskGroup() as tasks:
            for n in range(int(SECONDS * 3 * share / service_s)):
                with gate.admit(DEADLINE_S):
                    tasks.create_task(submit(loop, lane))
                await asyncio.sleep(n * service_s / share / 3 - loop.now_s)

    simulate(main)
    possible = SECONDS * share / service_s
    assert counts["in time"] >= 0.9 * possible and counts["refused at once"] > possible, counts
    assert counts["late"] + counts["refused late"] <= 0.02 * possible + 4, counts


def test_a_lane_continues_after_a_waiting_request_is_cancelled() -> None:
    async def main(loop: SimulatedTimeLoop) -> None:
        lane = WorkLane(AdmissionGate(100, loop.time))
        since_s = await lane.begin(60.0)
        waiting = asyncio.ensure_future(lane.begin(60.0))
        await asyncio.sleep(0.1)
        waiting.cancel()
        with pytest.raises(RequestError, match="deadline"):
            await lane.begin(loop.now_s + 0.2)
        lane.end(since_s)
        lane.end(await lane.begin(60.0))
        assert lane.gate.in_flight == 0

    simulate(main)


async def post(app: HttpInterface, path: str, body: object, deadline_ms: int = 30_000) -> tuple[int, Any]:
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": msgspec.json.encode(body)}

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"x-deadline-ms", str(deadline_ms).encode())]
    await app({"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b""},
              receive, send)  # fmt: skip
    return sent[0]["status"], msgspec.json.decode(sent[1]["body"])


CLICK = {"request_id": "r-1", "user_id": 17, "item_id": 8, "action": "click"}


def test_other_requests_run_while_a_list_of_engagements_is_parsed(tmp_path: Path) -> None:
    serving = build_serving(tmp_path, FakeRows(SCHEMA))
    app = HttpInterface(serving.context)

    async def main() -> int:
        turns, listed = 0, [CLICK | {"item_id": i} for i in range(1000)]
        answer = asyncio.ensure_future(post(app, "/v1/engagements", listed))
        while not answer.done():
            turns += 1
            await asyncio.sleep(0)
        assert answer.result()[0] == 200
        return turns

    assert asyncio.run(main()) >= 10 and len(serving.records()) == 1000
    serving.close()


def test_a_bad_engagement_at_the_end_of_a_list_leaves_nothing_in_the_log(tmp_path: Path) -> None:
    serving = build_serving(tmp_path, FakeRows(SCHEMA))
    app = HttpInterface(serving.context)
    body = [CLICK | {"item_id": i} for i in range(999)] + [CLICK | {"action": ""}]
    status, answer = asyncio.run(post(app, "/v1/engagements", body))
    assert status == 400 and answer["error"]["path"] == "$[999].action" and serving.records() == []
    serving.close()


def test_too_many_engagements_in_progress_are_429_and_ranks_are_answered(tmp_path: Path) -> None:
    serving = build_serving(tmp_path, FakeRows(SCHEMA), max_in_flight=1)
    app = HttpInterface(serving.context)

    async def main() -> None:
        lane = app.ranking.engagement_lane
        since_s = await lane.begin(asyncio.get_running_loop().time() + 60)
        status, answer = await post(app, "/v1/engagements", CLICK)
        assert (status, answer["error"]["code"]) == (429, "overloaded") and serving.records() == []
        assert (await post(app, "/v1/rank", BODY))[0] == 200
        lane.end(since_s)
        assert (await post(app, "/v1/engagements", CLICK))[0] == 200

    asyncio.run(main())
    serving.close()


def test_a_retrieval_that_misses_its_deadline_keeps_the_next_one_waiting_until_it_has_ended(
    tmp_path: Path,
) -> None:
    retrieval = make_retrieval(tmp_path / "home", FakeRows(SCHEMA), max_in_flight=2)
    retrieval.turn()
    lane, body = retrieval.app.ranking.retrieval_lane, {"request_id": "r-1", "user_id": 17}
    may_end = threading.Event()
    retrieval.serving.context.executor.submit(may_end.wait, 30)  # the scoring thread is busy

    async def main() -> None:
        status, _ = await post(retrieval.app, "/v1/retrieve", body, deadline_ms=20)
        assert status == 504
        may_end.set()
        assert (await post(retrieval.app, "/v1/retrieve", body))[0] == 200
        await asyncio.sleep(0)
        assert lane.gate.in_flight == 0 and lane.gate.service_s > 0

    asyncio.run(main())
    retrieval.serving.close()


def test_retrievals_in_progress_refuse_further_ones_and_no_ranks(tmp_path: Path) -> None:
    retrieval = make_retrieval(tmp_path / "home", FakeRows(SCHEMA), max_in_flight=1)
    retrieval.turn()
    body = {"request_id": "r-1", "user_id": 17}

    async def main() -> None:
        lane = retrieval.app.ranking.retrieval_lane
        since_s = await lane.begin(asyncio.get_running_loop().time() + 60)
        for path in ("/v1/retrieve",):
            status, answer = await post(retrieval.app, path, body)
            assert (status, answer["error"]["code"]) == (429, "overloaded")
        assert (await post(retrieval.app, "/v1/rank", BODY))[0] == 200
        lane.end(since_s)

    asyncio.run(main())
    retrieval.serving.close()
