"""Requests that waited together are scored in one pass, in their order; each has its own answer, error and
deadline."""

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
from tests.serving.serving_cases import BODY, MODEL, SCHEMA, build
from tests.serving.serving_fakes import FakeRows

SERVICE = RankService(SCHEMA, LoadedVersions(first_version(SCHEMA, MODEL, 0)), FakeRows(SCHEMA))
PARSER = JsonParser(SCHEMA)


def request(name: str, candidates: int = 2) -> RankRequest:
    body = {"request_id": name, "candidates": {"item_id": list(range(candidates))}}
    return PARSER.parse(json.dumps(body).encode())


class Passes:
    """A service that notes what came together; the first pass waits for `go`."""

    def __init__(self) -> None:
        self.go, self.begun = threading.Event(), threading.Event()
        self.seen: list[list[str]] = []

    def __call__(self, asked: Sequence[tuple[RankRequest, int]]) -> list[RankResult | Exception]:
        self.seen.append([r.request_id for r, _ in asked])
        self.begun.set()
        assert self.go.wait(30)
        return [
            ZeroDivisionError(r.request_id) if r.request_id == "bad" else SERVICE.rank(r, t) for r, t in asked
        ]


def run(
    asked: list[RankRequest], gone: Sequence[str] = (), most: tuple[int, int] = (3, 100)
) -> tuple[list[Any], Passes, AdmissionGate]:
    """Outcomes of `asked`, of which the first is being scored while the others come; `gone` are cancelled
    before it is done."""
    passes, gate = Passes(), AdmissionGate(100)

    async def go() -> list[Any]:
        queue = ScoringQueue(executor, passes, gate, *most, row_reads_wait=True)
        first = asyncio.create_task(queue.score(asked[0], 0))
        await asyncio.to_thread(passes.begun.wait)
        tasks = [first, *(asyncio.create_task(queue.score(r, 0)) for r in asked[1:])]
        await asyncio.sleep(0)
        for task, r in zip(tasks, asked, strict=True):
            if r.request_id in gone:
                task.cancel()
        passes.go.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    with ThreadPoolExecutor(1) as executor:
        return asyncio.run(go()), passes, gate


def names(outcomes: list[Any]) -> list[str]:
    return [o.answer.request_id if isinstance(o, RankResult) else type(o).__name__ for o in outcomes]


def test_waiting_requests_are_scored_together_in_order_of_arrival() -> None:
    outcomes, passes, gate = run([request(n) for n in "abcdef"])
    assert passes.seen == [["a"], ["b", "c", "d"], ["e", "f"]], (
        "the first waits for nobody; three are the most of a pass"
    )
    assert names(outcomes) == list("abcdef") and gate.service_s > 0


def test_a_pass_has_a_bounded_number_of_candidates() -> None:
    asked = [request("a"), request("b", 6), request("c", 5), request("d", 20), request("e")]
    outcomes, passes, _ = run(asked, most=(16, 10))
    assert passes.seen == [["a"], ["b"], ["c"], ["d"], ["e"]] and names(outcomes) == list("abcde")


def test_a_failing_request_fails_alone() -> None:
    outcomes, passes, _ = run([request(n) for n in ("a", "b", "bad", "c")])
    assert passes.seen[1] == ["b", "bad", "c"] and names(outcomes) == ["a", "b", "ZeroDivisionError", "c"]


def test_an_expired_request_is_not_scored_or_not_answered() -> None:
    outcomes, passes, _ = run([request(n) for n in "abcd"], gone="ac")
    assert passes.seen == [["a"], ["b", "d"]]
    assert names(outcomes) == ["CancelledError", "b", "CancelledError", "d"]


def test_a_failed_pass_fails_its_requests_and_the_next_pass_starts() -> None:
    calls: list[int] = []

    def broken(asked: Sequence[tuple[RankRequest, int]]) -> list[RankResult | Exception]:
        calls.append(len(asked))
        raise RequestError(500, "no")

    async def go() -> list[Any]:
        queue = ScoringQueue(executor, broken, AdmissionGate(9), 2, 100)
        return await asyncio.gather(*(queue.score(request(n), 0) for n in "abc"), return_exceptions=True)

    with ThreadPoolExecutor(1) as executor:
        assert names(asyncio.run(go())) == ["RequestError"] * 3
    assert calls == [1, 2]


def test_batched_requests_are_answered_logged_and_refused_as_single_ones(tmp_path: Path) -> None:
    built = build(tmp_path, FakeRows(SCHEMA), max_pass_requests=4)
    bodies = [
        {**BODY, "request_id": f"r{i}", "candidates": BODY["candidates"][: 1 + i % 3]} for i in range(9)
    ]
    bodies[4] = {**bodies[4], "model_version": "9-9"}

    async def go() -> list[Any]:
        transport = httpx2.ASGITransport(HttpInterface(built.context))
        async with httpx2.AsyncClient(transport=transport, base_url="http://serving") as http:
            return list(await asyncio.gather(*(http.post("/v1/rank", json=body) for body in bodies)))

    answers = asyncio.run(go())
    assert [a.status_code for a in answers] == [200] * 4 + [404] + [200] * 4
    for body, answer in zip(bodies, answers, strict=True):
        if answer.status_code == 404:
            continue
        alone = SERVICE.rank(PARSER.parse(json.dumps(body).encode()), 0).answer
        for mine, other in zip(
            answer.json()["scores"], json.loads(ENCODER.encode(alone))["scores"], strict=True
        ):
            assert mine == pytest.approx(other, abs=1e-5)
    logged = [wire.decode(r.value)[1].header.request_id for r in built.records()]  # type: ignore[attr-defined]
    assert sorted(logged) == [f"r{i}" for i in range(9) if i != 4]
    built.close()


def test_only_requests_of_one_version_share_a_pass() -> None:
    versions = LoadedVersions(first_version(SCHEMA, MODEL, 0))
    versions.install(dataclasses.replace(first_version(SCHEMA, MODEL, 1), name="1-1"))
    service = RankService(SCHEMA, versions, FakeRows(SCHEMA))
    asked = [
        dataclasses.replace(request(n), model_version=v)
        for n, v in (("a", "0-0"), ("b", ""), ("c", "0-0"), ("d", "7-7"))
    ]
    outcomes = service.rank_all([(r, 0) for r in asked])
    assert [o.answer.model_version for o in outcomes if isinstance(o, RankResult)] == ["0-0", "1-1", "0-0"]
    assert isinstance(outcomes[3], RequestError) and outcomes[3].status == 404


class Paced:
    """A service that takes `unit_s` for each turn of a pass, and notes who was scored together, and whether
    in the loop."""

    def __init__(self, unit_s: float = 0.0) -> None:
        self.unit_s, self.seen = unit_s, list[tuple[list[str], bool]]()
        self.loops = threading.current_thread()

    def __call__(self, asked: Sequence[tuple[RankRequest, int]]) -> list[RankResult | Exception]:
        self.seen.append(([r.request_id for r, _ in asked], threading.current_thread() is self.loops))
        time.sleep(self.unit_s * len(asked))
        return [SERVICE.rank(r, t) for r, t in asked]


def together(
    groups: Sequence[str],
    paced: Paced,
    most: tuple[int, int] = (16, 100),
    row_reads_wait: bool = False,
    unit_s: float | None = None,
) -> list[tuple[list[str], bool]]:
    """What was scored where, of groups that come at once, each when the one before is answered; behind one
    that is measured. `unit_s`: what is known of a turn then, else what it took."""

    async def go() -> None:
        queue = ScoringQueue(executor, paced, AdmissionGate(100), *most, row_reads_wait=row_reads_wait)
        await queue.score(request("first"), 0)
        for group in groups:
            queue.pass_time.unit_s = queue.pass_time.unit_s if unit_s is None else unit_s
            outcomes = await asyncio.gather(*(queue.score(request(n), 0) for n in group))
            assert names(outcomes) == list(group)

    with ThreadPoolExecutor(1) as executor:
        asyncio.run(go())
    assert paced.seen[0] == (["first"], False), "how long it takes is known of none yet"
    return paced.seen[1:]


def test_a_short_pass_runs_in_the_event_loop() -> None:
    assert together(["a", "bc", "d"], Paced(), unit_s=LOOP_S / 3) == [
        (["a"], True),
        (["b", "c"], True),
        (["d"], True),
    ]


def test_a_pass_in_the_event_loop_is_bounded_in_time() -> None:
    seen = together(["a", "bc", "d"], Paced(), unit_s=LOOP_S / 1.5)
    assert seen[:2] == [(["a"], True), (["b"], True)] and ["b", "c"] not in [group for group, _ in seen]
    assert together(["abc"], Paced(), most=(2, 100), unit_s=1e-6)[0] == (["a", "b"], True)
    assert together(["abc"], Paced(), most=(9, 4), unit_s=1e-6)[0] == (["a", "b"], True)


def test_the_event_loop_runs_between_two_passes() -> None:
    paced, turns = Paced(), list[int]()

    async def beside() -> None:
        while len(paced.seen) < 4:
            turns.append(len(paced.seen))
            await asyncio.sleep(0)

    async def go() -> None:
        queue = ScoringQueue(executor, paced, AdmissionGate(100), 1, 100)
        await queue.score(request("first"), 0)
        queue.pass_time.unit_s = 1e-6
        await asyncio.gather(beside(), *(queue.score(request(n), 0) for n in "abc"))

    with ThreadPoolExecutor(1) as executor:
        asyncio.run(go())
    assert {1, 2, 3} <= set(turns)


@pytest.mark.parametrize("num_coming", [0, 5, 1000])
def test_new_connections_get_some_turns_before_the_next_pass(num_coming: int) -> None:
    paced, turns = Paced(), list[int]()

    async def go() -> None:
        queue, coming = (
            ScoringQueue(executor, paced, AdmissionGate(100), 1, 100),
            iter(range(1, num_coming + 1)),
        )
        await queue.score(request("first"), 0)
        queue.pass_time.unit_s = 1e-6
        queue.num_connections = lambda: next(coming, num_coming)
        asked = asyncio.ensure_future(queue.score(request("a"), 0))
        while not asked.done():
            turns.append(len(paced.seen))
            await asyncio.sleep(0)

    with ThreadPoolExecutor(1) as executor:
        asyncio.run(go())
    assert abs(turns.count(1) - min(num_coming, MAX_TURNS)) <= 2 and turns.count(1) < MAX_TURNS + 3


def test_passes_that_may_wait_for_a_shard_run_in_the_thread() -> None:
    seen = together(["a", "bc"], Paced(), row_reads_wait=True, unit_s=1e-6)
    assert not any(in_loop for _, in_loop in seen)


def test_slow_passes_move_to_the_thread_and_fast_ones_return() -> None:
    paced = Paced(unit_s=2 * LOOP_S)
    assert [here for _, here in together("abc", paced)] == [False] * 3
    pace = PassTimeEstimate()
    assert pace.expected_s(1, 1) > LOOP_S, "nothing is known"
    pace.record(1e-4, 1, 0)
    assert pace.expected_s(2, 64) == pytest.approx(3e-4)
    pace.record(1.0, 1, 0)
    assert pace.expected_s(1, 0) > LOOP_S, "one is enough"
    for _ in range(100):
        pace.record(1e-4, 1, 0)
    assert pace.expected_s(1, 0) < LOOP_S


def test_a_preempted_pass_is_not_slow_and_a_waiting_one_is() -> None:
    ticks = itertools.count(0.0, 10.0)

    def measured(work: Callable[[], object]) -> float:
        stopwatch = PassTimer(lambda: next(ticks))
        work()
        return stopwatch.read_s()

    assert min(measured(lambda: sum(range(100_000))) for _ in range(20)) < 1, (
        "who had to wait for nobody in those ten seconds"
    )
    assert measured(lambda: time.sleep(0.001)) == 10.0


@pytest.mark.parametrize("installs", [False, True], ids=["one version", "a swap between"])
def test_g1_g9_event_loop_and_thread_score_log_and_answer_equal_bytes(installs: bool) -> None:
    """Each request in both places, and a swap between two of them."""

    def values(unit_s: float) -> tuple[list[tuple[bytes, bytes]], bool]:
        versions = LoadedVersions(learned("1-8", 1))
        service, seen, places = (
            RankService(SCHEMA, versions, FakeRows(SCHEMA)),
            list[tuple[bytes, bytes]](),
            set[int](),
        )

        def rank_all(asked: Sequence[tuple[RankRequest, int]]) -> list[RankResult | Exception]:
            places.add(threading.get_ident())
            return service.rank_all(asked)

        async def go() -> None:
            queue = ScoringQueue(executor, rank_all, AdmissionGate(100), 16, 100)
            for number, body in enumerate([BODY, BODY, {**BODY, "ro": {}}, BODY]):
                queue.pass_time.unit_s = unit_s
                if installs and number == 2:
                    versions.install(learned("1-9", 2))
                ranked = await queue.score(PARSER.parse(json.dumps(body).encode()), number)
                seen.append((ranked.record.value, ENCODER.encode(ranked.answer)))

        with ThreadPoolExecutor(1) as executor:
            asyncio.run(go())
        return seen, places == {threading.get_ident()}

    (here, in_loop), (there, not_in_loop) = values(0.0), values(1.0)
    assert in_loop and not not_in_loop
    assert here == there and len({answer for _, answer in here}) == 2 + installs
    assert (b"1-9" in here[2][1]) == installs


def learned(name: str, seed: int) -> Version:
    """Of other weights than the initial ones, which score everything alike."""
    torch.manual_seed(seed)
    weights = {
        n: torch.randn_like(t) * 0.3 for n, t in first_version(SCHEMA, MODEL, 0).model.state_dict().items()
    }
    return build_version(name, SCHEMA, MODEL, 0, weights)
