"""How many ranks does a second of CPU time answer, and how long does one take?

Serving programs under open-loop load: ours in both encodings, and our ranker behind other servers.
"""

from __future__ import annotations

import contextlib
import urllib.request
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from benchmarks.common import samples as data
from benchmarks.common.open_load import Answer, rank_request
from benchmarks.common.peer_ranking import peer_program
from benchmarks.common.serving_program import ServingProgram, bodies_of, serving_program
from benchmarks.common.shared_setup import SharedSetup, opened_with
from benchmarks.harness.benchmark import Benchmark, Role, Row, Subject, TurnResult, WholeTurn
from benchmarks.serving_overload import DEADLINE_MS, Load, Served
from roostream.wire import roo_pb2 as pb
from serving.client.messages import PROTOBUF, encode_impression

_TOLERANCE = 1e-4


_FIGURES = (
    "asked a second",
    "p50 of 200, ms",
    "p99 of 200, ms",
    "late or failed %",
    "most that a request was sent late, ms",
)


class OneConnection(Load):
    """A closed loop of one connection."""

    def send(self, seconds: float) -> list[Answer]:
        return self.served.clients.closed_loop(1, seconds)


class Programs:
    """Serving programs, each started and warmed on first use, and suspended while others are timed."""

    def __init__(self, opened: contextlib.ExitStack) -> None:
        self._opened = opened
        self._running: dict[str, ServingProgram] = {}
        self._served: dict[tuple[str, str, int], Served] = {}

    def served(self, kind: str, form: str, candidates: int) -> Served:
        """Raises AssertionError if the program's scores differ from those of our ranker."""
        key = kind, form, candidates
        if key not in self._served:
            with self.running(kind) as program:
                self.check(program, form, candidates)
                media = request_media_type(form)
                requests = [rank_request(body, media) for body in encoded_bodies(form, candidates)]
                self._served[key] = Served(program, requests)
                self._opened.callback(self._served[key].clients.close)
        return self._served[key]

    def check(self, program: ServingProgram, form: str, candidates: int) -> None:
        """Compare the scores of one request with those of the ranker in this process."""
        _check_scores(program, form, candidates)

    @contextlib.contextmanager
    def running(self, kind: str) -> Iterator[ServingProgram]:
        if kind in self._running:
            self._running[kind].resume()
        else:
            program = serving_program(deadline_ms=DEADLINE_MS) if kind == "ours" else peer_program(kind)
            self._running[kind] = self._opened.enter_context(program)
            self._opened.callback(self._running[kind].resume)  # so that it can end
        try:
            yield self._running[kind]
        finally:
            self._running[kind].suspend()


PROGRAMS = SharedSetup(opened_with(Programs))


@contextlib.contextmanager
def under_load(kind: str, form: str, times: float, seconds: float, candidates: int) -> Iterator[WholeTurn]:
    """`kind`: ours, fastapi, litserve; `times` the capacity, or 0: one connection. Units: requests answered
    200 within the deadline. Time: CPU time of the program."""
    with PROGRAMS.open() as running:
        served = running.served(kind, form, candidates)
        load = Load(served, times, seconds) if times else OneConnection(served, 1.0, seconds)

        def turn() -> TurnResult:
            with running.running(kind):
                served.clients.close_idle()
                result = load.turn()
            figures = {name: result.figures[name] for name in _FIGURES}
            return TurnResult(result.units, load.cpu_s, figures)

        def warm_up() -> None:
            with running.running(kind):
                served.clients.close_idle()
                load.warm_up()

        yield WholeTurn(turn, warm_up)


def encoded_bodies(form: str, candidates: int) -> list[bytes]:
    bodies = bodies_of(candidates)
    if form == "json":
        return bodies
    schema = data.demo_schema()
    return [encode_impression(msgspec.json.decode(body), schema) for body in bodies]


def request_media_type(form: str) -> str:
    return PROTOBUF if form == "protobuf" else "application/json"


def _check_scores(program: ServingProgram, form: str, candidates: int) -> None:
    from benchmarks.common.peer_ranking import DemoRank, Scoring

    body, media = encoded_bodies(form, candidates)[0], request_media_type(form)
    url = "http://{}:{}/v1/rank".format(*program.address)
    request = urllib.request.Request(url, body, {"content-type": media, "accept": media})
    with urllib.request.urlopen(request, timeout=60) as answer:
        scores = _scores(answer.read(), form)
    expected = Scoring().rank(DemoRank.model_validate_json(bodies_of(candidates)[0]))["scores"]
    np.testing.assert_allclose(scores, [list(row.values()) for row in expected], rtol=0, atol=_TOLERANCE)


def _scores(answer: bytes, form: str) -> Any:
    """[n][T]."""
    if form == "json":
        return [list(row.values()) for row in msgspec.json.decode(answer)["scores"]]
    message = pb.RankAnswer.FromString(answer)
    return np.array(message.scores).reshape(-1, len(message.tasks))


_HERE = "benchmarks.serving_e2e"
_LOADED = f"{_HERE}:under_load"
_SECONDS, _CANDIDATES = 3.0, 50


def _with(name: str, kind: str, form: str, role: Role, times: float) -> Subject:
    return Subject(name, _LOADED, (kind, form, times, _SECONDS, _CANDIDATES), role)


def _at(times: float, name: str) -> Row:
    return Row(
        name=f"requests a second of CPU time, {_CANDIDATES} candidates, {name}",
        unit="requests",
        time="CPU time of its programs",
        subjects=(
            _with("ours, JSON", "ours", "json", "ours", times),
            _with("FastAPI + Pydantic, JSON", "fastapi", "json", "peer", times),
            _with("LitServe, JSON", "litserve", "json", "peer", times),
            _with("ours, protobuf", "ours", "protobuf", "stage", times),
        ),
    )


BENCHMARK = Benchmark(
    name="serving-e2e",
    summary="How many ranks does a second of CPU time answer, and how long does one take?",
    rows=(_at(0.0, "one connection"), _at(0.5, "at half of what each can answer"), _at(1.0, "at all of it")),
    run_setup=f"{_HERE}:PROGRAMS.open",
    interpretation="""\
The figure is requests answered 200 within a second, divided by the CPU time of all processes of the
program. The targets are 1,000 in JSON and 1,500 in protobuf, and at half load p50 at most 2 ms and p99 at
most 8 ms; decision 0051 says what is missing. The peers run the same ranker behind FastAPI with Pydantic
and behind LitServe, one worker each, without admission, deadlines, batching and feature log; one answer of
each program is compared with the ranker's scores before the timing. The programs run on loopback with the
demo schema and initial rows, without Kafka, Redis and shards, and are suspended while others are timed. The
capacity is what four closed-loop connections get; the other loads are open-loop (Poisson), with latencies
from the due time.""",
    slice_s=_SECONDS,
    rounds=3,
)
