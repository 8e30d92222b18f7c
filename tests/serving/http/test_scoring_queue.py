"""The scoring queue: waiting requests are scored together in one pass, in their order. Each has its own
answer, error and deadline."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch

from roostream.wire import records as wire
from serving.answer import ENCODER
from serving.errors import RequestError
from serving.http.admission import AdmissionGate
from serving.http.app import HttpInterface
from serving.http.scoring_queue import LOOP_S, MAX_TURNS, PassTimeEstimate, PassTimer, ScoringQueue
from serving.rank import RankResult, RankService
from serving.rank_json import JsonParser
from serving.request import RankRequest
from serving.scorer import Version, build_version, first_version
from serving.versions.loaded_versions import LoadedVersions
from tests.serving.serving_cases import BODY, MODEL, SCHEMA, build_serving
from tests.serving.serving_fakes import FakeRows

SERVICE = RankService(SCHEMA, LoadedVersions(first_version(SCHEMA, MODEL, 0)), FakeRows(SCHEMA))
PARSER = JsonParser(SCHEMA)


def request(name: str, candidates: int = 2) -> RankRequest:
    body = {"request_id": name, "candidates": {"item_id": list(range(candidates))}}
    return PARSER.parse(json.dumps(body).encode())


class RecordingRankService:
    """A rank service that records the requests of each pass. The first pass waits until `go` is set."""

    def __init__(self) -> None:
        self.go, self.begun = threading.Event(), threading.Event()
        self.seen: list[list[str]] = []

    def __call__(self, requests: Sequence[tuple[RankRequest, int]]) -> list[RankResult | Exception]:
        self.seen.append([r.request_id for r, _ in requests])
        self.begun.set()
        assert self.go.wait(30)
        return [
            ZeroDivisionError(r.request_id) if r.request_id == "bad" else SERVICE.rank(r, t)
            for r, t in requests
        ]


def run(
    requests: list[RankRequest], cancelled: Sequence[str] = (), limits: tuple[int, int] = (3, 100)
) -> tuple[list[Any], RecordingRankService, AdmissionGate]:
    """Return the outcomes of `requests`. The others arrive while the first is being scored, and `cancelled`
    requests are cancelled before that ends.
    """
    recorder, gate = RecordingRankService(), AdmissionGate(100)

    async def main() -> list[Any]:
        queue = ScoringQueue(executor, recorder, gate, *limits, row_reads_wait=True)
        first = asyncio.create_task(queue.score(requests[0], 0))
        await asyncio.to_thread(recorder.begun.wait)
        tasks = [first, *(asyncio.create_task(queue.score(r, 0)) for r in requests[1:])]
        await asyncio.sleep(0)
        for task, r in zip(tasks, requests, strict=True):
            if r.request_id in cancelled:
                task.cancel()
        recorder.go.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    with ThreadPoolExecutor(1) as executor:
        return asyncio.run(main()), recorder, gate


def names(outcomes: list[Any]) -> list[str]:
    return [o.answer.request_id if isinstance(o, RankResult) else type(o).__name__ for o in outcomes]


def test_waiting_requests_are_scored_together_in_order_of_arrival() -> None:
    outcomes, recorder, gate = run([request(n) for n in "abcdef"])
    assert recorder.seen == [["a"], ["b", "c", "d"], ["e", "f"]], (
        "the first request does not wait for others, and a pass has at most three"
    )
    assert names(outcomes) == list("abcdef") and gate.service_s > 0


def test_a_pass_has_a_bounded_number_of_candidates() -> None:
    requests = [request("a"), request("b", 6), request("c", 5), request("d", 20), request("e")]
    outcomes, recorder, _ = run(requests, limits=(16, 10))
    assert recorder.seen == [["a"], ["b"], ["c"], ["d"], ["e"]] and names(outcomes) == list("abcde")


def test_a_failing_request_fails_alone() -> None:
    outcomes, recorder, _ = run([request(n) for n in ("a", "b", "bad", "c")])
    assert recorder.seen[1] == ["b", "bad", "c"] and names(outcomes) == ["a", "b", "ZeroDivisionError", "c"]


def test_an_expired_request_is_not_scored_or_not_answered() -> None:
    outcomes, recorder, _ = run([request(n) for n in "abcd"], cancelled="ac")
    assert recorder.seen == [["a"], ["b", "d"]]
    assert names(outcomes) == ["CancelledError", "b", "CancelledError", "d"]


def test_a_failed_pass_fails_its_requests_and_the_next_pass_starts() -> None:
    calls: list[int] = []

    def broken(requests: Sequence[tuple[RankRequest, int]]) -> list[RankResult | Exception]:
        calls.append(len(requests))
        raise RequestError(500, "no")

    async def main() -> list[Any]:
        queue = ScoringQueue(executor, broken, AdmissionGate(9), 2, 100)
        return await asyncio.gather(*(queue.score(request(n), 0) for n in "abc"), return_exceptions=True)

    with ThreadPoolExecutor(1) as executor:
        assert names(asyncio.run(main())) == ["RequestError"] * 3
    assert calls == [1, 2]


def test_batched_requests_are_answered_logged_and_refused_as_single_ones(tmp_path: Path) -> None:
    serving = build_serving(tmp_path, FakeRows(SCHEMA), max_pass_requests=4)
    bodies = [
        {**BODY, "request_id": f"r{i}", "candidates": BODY["candidates"][: 1 + i % 3]} for i in range(9)
    ]
    bodies[4] = {**bodies[4], "model_version": "9-9"}

    async def main() -> list[Any]:
        transport = httpx2.ASGITransport(HttpInterface(serving.context))
        async with httpx2.AsyncClient(transport=transport, base_url="http://serving") as http:
            return list(await asyncio.gather(*(http.post("/v1/rank", json=body) for body in bodies)))

    answers = asyncio.run(main())
    assert [a.status_code for a in answers] == [200] * 4 + [404] + [200] * 4
    for body, answer in zip(bodies, answers, strict=True):
        if answer.status_code == 404:
            continue
        alone = SERVICE.rank(PARSER.parse(json.dumps(body).encode()), 0).answer
        for mine, other in zip(
            answer.json()["scores"], json.loads(ENCODER.encode(alone))["scores"], strict=True
        ):
            assert mine == pytest.approx(other, abs=1e-5)
    logged = [wire.decode(r.value)[1].header.request_id for r in serving.records()]  # type: ignore[attr-defined]
    assert sorted(logged) == [f"r{i}" for i in range(9) if i != 4]
    serving.close()


def test_only_requests_of_one_version_share_a_pass() -> None:
    versions = LoadedVersions(first_version(SCHEMA, MODEL, 0))
    versions.install(dataclasses.replace(first_version(SCHEMA, MODEL, 1), name="1-1"))
    service = RankService(SCHEMA, versions, FakeRows(SCHEMA))
    requests = [
        dataclasses.replace(request(n), model_version=v)
        for n, v in (("a", "0-0"), ("b", ""), ("c", "0-0"), ("d", "7-7"))
    ]
    outcomes = service.rank_all([(r, 0) for r in requests])
    assert [o.answer.model_version for o in outcomes if isinstance(o, RankResult)] == ["0-0", "1-1", "0-0"]
    assert isinstance(outcomes[3], RequestError) and outcomes[3].status == 404


class TimedRankService:
    """A rank service that takes `unit_s` per request. It records the requests of each pass, and whether the
    pass ran in the event loop's thread.
    """

    def __init__(self, unit_s: float = 0.0) -> None:
        self.unit_s, self.seen = unit_s, list[tuple[list[str], bool]]()
        self.loop_thread = threading.current_thread()

    def __call__(self, requests: Sequence[tuple[RankRequest, int]]) -> list[RankResult | Exception]:
        self.seen.append(
            ([r.request_id for r, _ in requests], threading.current_thread() is self.loop_thread)
        )
        time.sleep(self.unit_s * len(requests))
        return [SERVICE.rank(r, t) for r, t in requests]


def score_groups(
    groups: Sequence[str],
    rank_service: TimedRankService,
    limits: tuple[int, int] = (16, 100),
    row_reads_wait: bool = False,
    unit_s: float | None = None,
) -> list[tuple[list[str], bool]]:
    """Score groups of requests that arrive together, each group after the answers of the one before. Return
    the requests of each pass, and whether it ran in the event loop. `unit_s` overrides the measured time per
    request.
    """

    async def main() -> None:
        queue = ScoringQueue(
            executor, rank_service, AdmissionGate(100), *limits, row_reads_wait=row_reads_wait
        )
        await queue.score(request("first"), 0)
        for group in groups:
            queue.pass_time.unit_s = queue.pass_time.unit_s if unit_s is None else unit_s
            outcomes = await asyncio.gather(*(queue.score(request(n), 0) for n in group))
            assert names(outcomes) == list(group)

    with ThreadPoolExecutor(1) as executor:
        asyncio.run(main())
    assert rank_service.seen[0] == (["first"], False), (
        "the first pass runs in the thread, because its time is not known"
    )
    return rank_service.seen[1:]


def test_a_short_pass_runs_in_the_event_loop() -> None:
    assert score_groups(["a", "bc", "d"], TimedRankService(), unit_s=LOOP_S / 3) == [
        (["a"], True),
        (["b", "c"], True),
        (["d"], True),
    ]


def test_more_than_fits_into_the_event_loop_is_scored_in_one_pass_in_the_thread() -> None:
    seen = score_groups(["a", "bc", "d"], TimedRankService(), unit_s=LOOP_S / 1.5)
    assert seen == [(["a"], True), (["b", "c"], False), (["d"], True)]
    assert score_groups(["abc"], TimedRankService(), limits=(2, 100), unit_s=1e-6)[0] == (["a", "b"], True)
    assert score_groups(["abc"], TimedRankService(), limits=(9, 4), unit_s=1e-6)[0] == (["a", "b"], True)


def test_a_request_that_comes_before_the_pass_in_the_event_loop_moves_it_to_the_thread() -> None:
    rank_service = TimedRankService()

    async def main() -> None:
        queue = ScoringQueue(executor, rank_service, AdmissionGate(100), 16, 100)
        await queue.score(request("first"), 0)
        queue.pass_time.unit_s = LOOP_S / 1.5
        await asyncio.gather(queue.score(request("a"), 0), queue.score(request("b"), 0))

    with ThreadPoolExecutor(1) as executor:
        asyncio.run(main())
    assert rank_service.seen[1:] == [(["a", "b"], False)]


class ShortPasses(PassTimeEstimate):
    """Expects every pass to be short, however long the machine delays it."""

    def __init__(self) -> None:
        self.unit_s = 1e-6

    def record(self, seconds: float, num_requests: int, num_candidates: int) -> None:
        pass


def test_the_event_loop_runs_between_two_passes() -> None:
    rank_service, turns = TimedRankService(), list[int]()

    async def beside() -> None:
        while len(rank_service.seen) < 4:
            turns.append(len(rank_service.seen))
            await asyncio.sleep(0)

    async def main() -> None:
        queue = ScoringQueue(executor, rank_service, AdmissionGate(100), 1, 100)
        queue.pass_time = ShortPasses()
        await queue.score(request("first"), 0)
        await asyncio.gather(beside(), *(queue.score(request(n), 0) for n in "abc"))

    with ThreadPoolExecutor(1) as executor:
        asyncio.run(main())
    assert {1, 2, 3} <= set(turns)


@pytest.mark.parametrize("num_coming", [0, 5, 1000])
def test_new_connections_get_some_turns_before_the_next_pass(num_coming: int) -> None:
    rank_service, turns = TimedRankService(), list[int]()

    async def main() -> None:
        queue, connection_counts = (
            ScoringQueue(executor, rank_service, AdmissionGate(100), 1, 100),
            iter(range(1, num_coming + 1)),
        )
        await queue.score(request("first"), 0)
        queue.pass_time.unit_s = 1e-6
        queue.num_connections = lambda: next(connection_counts, num_coming)
        requests = asyncio.ensure_future(queue.score(request("a"), 0))
        while not requests.done():
            turns.append(len(rank_service.seen))
            await asyncio.sleep(0)

    with ThreadPoolExecutor(1) as executor:
        asyncio.run(main())
    assert abs(turns.count(1) - min(num_coming, MAX_TURNS)) <= 2 and turns.count(1) < MAX_TURNS + 3


def test_passes_that_may_wait_for_a_shard_run_in_the_thread() -> None:
    seen = score_groups(["a", "bc"], TimedRankService(), row_reads_wait=True, unit_s=1e-6)
    assert not any(in_loop for _, in_loop in seen)


def test_slow_passes_move_to_the_thread_and_fast_ones_return() -> None:
    rank_service = TimedRankService(unit_s=2 * LOOP_S)
    assert [in_loop_values for _, in_loop_values in score_groups("abc", rank_service)] == [False] * 3
    estimate = PassTimeEstimate()
    assert estimate.expected_s(1, 1) > LOOP_S, "without a measurement, a pass is assumed to be slow"
    estimate.record(1e-4, 1, 0)
    assert estimate.expected_s(2, 64) == pytest.approx(3e-4)
    estimate.record(1.0, 1, 0)
    assert estimate.expected_s(1, 0) > LOOP_S, "one slow pass is enough"
    for _ in range(100):
        estimate.record(1e-4, 1, 0)
    assert estimate.expected_s(1, 0) < LOOP_S


def test_a_preempted_pass_is_not_slow_and_a_waiting_one_is() -> None:
    ticks = itertools.count(0.0, 10.0)

    def measured(work: Callable[[], object]) -> float:
        stopwatch = PassTimer(lambda: next(ticks))
        work()
        return stopwatch.read_s()

    assert min(measured(lambda: sum(range(100_000))) for _ in range(20)) < 1, (
        "CPU-bound work is not counted as waiting while the process is preempted"
    )
    assert measured(lambda: time.sleep(0.001)) == 10.0


@pytest.mark.parametrize("installs", [False, True], ids=["one version", "a swap between"])
def test_g1_g9_event_loop_and_thread_score_log_and_answer_equal_bytes(installs: bool) -> None:
    """Guarantees G1 and G9 (docs/architecture.md, Guarantees): every request gives the same bytes whether it
    is scored in the event loop or in the thread, also if another version is installed between two requests.
    """

    def values(unit_s: float) -> tuple[list[tuple[bytes, bytes]], bool]:
        versions = LoadedVersions(make_version("1-8", 1))
        service, seen, thread_ids = (
            RankService(SCHEMA, versions, FakeRows(SCHEMA)),
            list[tuple[bytes, bytes]](),
            set[int](),
        )

        def rank_all(requests: Sequence[tuple[RankRequest, int]]) -> list[RankResult | Exception]:
            thread_ids.add(threading.get_ident())
            return service.rank_all(requests)

        async def main() -> None:
            queue = ScoringQueue(executor, rank_all, AdmissionGate(100), 16, 100)
            for number, body in enumerate([BODY, BODY, {**BODY, "ro": {}}, BODY]):
                queue.pass_time.unit_s = unit_s
                if installs and number == 2:
                    versions.install(make_version("1-9", 2))
                ranked = await queue.score(PARSER.parse(json.dumps(body).encode()), number)
                seen.append((ranked.record.value, ENCODER.encode(ranked.answer)))

        with ThreadPoolExecutor(1) as executor:
            asyncio.run(main())
        return seen, thread_ids == {threading.get_ident()}

    (in_loop_values, in_loop), (thread_values, not_in_loop) = values(0.0), values(1.0)
    assert in_loop and not not_in_loop
    assert in_loop_values == thread_values and len({answer for _, answer in in_loop_values}) == 2 + installs
    assert (b"1-9" in in_loop_values[2][1]) == installs


def make_version(name: str, seed: int) -> Version:
    """Return a version with random weights. The initial weights give every candidate the same score."""
    torch.manual_seed(seed)
    weights = {
        n: torch.randn_like(t) * 0.3 for n, t in first_version(SCHEMA, MODEL, 0).model.state_dict().items()
    }
    return build_version(name, SCHEMA, MODEL, 0, weights)
