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
from benchmarks.common.open_load import Answered, rank_request
from benchmarks.common.peer_ranking import peer_program
from benchmarks.common.serving_program import ServingProgram, bodies_of, serving_program
from benchmarks.common.shared_setup import SharedSetup
from benchmarks.harness.benchmark import Benchmark, Role, Row, Subject, Work
from benchmarks.serving_overload import DEADLINE_MS, Load, Served
from roostream.wire import roo_pb2 as pb
from serving.client.messages import PROTOBUF, encode_impression

_TOLERANCE = 1e-4


class CountedLoad(Load):
    """Counted by the CPU time that the program took, so that a busy machine costs less of the figure."""

    def figures(self) -> dict[str, float]:
        named = super().figures()
        return {name: named[name] for name in _FIGURES}


class OneConnection(CountedLoad):
    """It asks again as soon as it is answered."""

    def ask(self, seconds: float) -> list[Answered]:
        return self.served.clients.closed_loop(1, seconds)


_FIGURES = (
    "asked a second",
    "p50 of 200, ms",
    "p99 of 200, ms",
    "late or failed %",
    "most that a request was sent late, ms",
)


class Programs:
    """Each is started and warmed when it is first asked for, and stands still while it is not its turn."""

    def __init__(self, all_: contextlib.ExitStack) -> None:
        self._all = all_
        self._running: dict[str, ServingProgram] = {}
        self._served: dict[tuple[str, str, int], Served] = {}

    def served(self, kind: str, form: str, candidates: int) -> Served:
        """AssertionError: its scores aren't ours."""
        known = kind, form, candidates
        if known not in self._served:
            with self.turn_of(kind) as program:
                _check_scores(program, form, candidates)
                served = Served(
                    program, [rank_request(body, request_media_type(form)) for body in sent(form, candidates)]
                )
                self._all.callback(served.clients.close)
                self._served[known] = served
        return self._served[known]

    @contextlib.contextmanager
    def turn_of(self, kind: str) -> Iterator[ServingProgram]:
        if kind in self._running:
            self._running[kind].go_on()
        else:
            program = serving_program(deadline_ms=DEADLINE_MS) if kind == "ours" else peer_program(kind)
            self._running[kind] = self._all.enter_context(program)
            self._all.callback(self._running[kind].go_on)  # so that it can end
        try:
            yield self._running[kind]
        finally:
            self._running[kind].pause()


@contextlib.contextmanager
def _open() -> Iterator[Programs]:
    with contextlib.ExitStack() as all_:
        yield Programs(all_)


_programs = SharedSetup(_open)


def programs() -> contextlib.AbstractContextManager[Programs]:
    """Of a whole run."""
    return _programs.open()


@contextlib.contextmanager
def under_load(kind: str, form: str, times: float, seconds: float, candidates: int) -> Iterator[Work]:
    """`kind`: ours, fastapi, litserve; `times` the capacity, or 0: one connection. Units: requests answered
    200 within the deadline. AssertionError: scores aren't ours."""
    with _programs.open() as running:
        served = running.served(kind, form, candidates)
        load = CountedLoad(served, times, seconds) if times else OneConnection(served, 1.0, seconds)

        def step() -> None:
            with running.turn_of(kind):
                served.clients.begin_anew()
                load.step()

        yield Work(step, load.units, load.figures, lambda: load.cpu_s)


def sent(form: str, candidates: int) -> list[bytes]:
    """Bodies of as many users."""
    bodies = bodies_of(candidates)
    if form == "json":
        return bodies
    schema = data.demo_schema()
    return [encode_impression(msgspec.json.decode(body), schema) for body in bodies]


def request_media_type(form: str) -> str:
    return PROTOBUF if form == "protobuf" else "application/json"


def _check_scores(program: ServingProgram, form: str, candidates: int) -> None:
    """Of one request, against those of the ranker in this process."""
    from benchmarks.common.peer_ranking import DemoRank, Scoring

    body = sent(form, candidates)[0]
    url = "http://{}:{}/v1/rank".format(*program.address)
    headers = {"content-type": request_media_type(form), "accept": request_media_type(form)}
    with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=60) as answer:
        told = _scores(answer.read(), form)
    expected = Scoring().rank(DemoRank.model_validate_json(bodies_of(candidates)[0]))["scores"]
    np.testing.assert_allclose(told, [list(row.values()) for row in expected], rtol=0, atol=_TOLERANCE)


def _scores(answer: bytes, form: str) -> Any:
    """[n][T]."""
    if form == "json":
        return [list(row.values()) for row in msgspec.json.decode(answer)["scores"]]
    told = pb.RankAnswer.FromString(answer)
    return np.array(told.scores).reshape(-1, len(told.tasks))


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
    run_setup=f"{_HERE}:programs",
    interpretation="""\
Requests answered 200 within a second, divided by the CPU time that the program took for them (of LitServe: of all its processes).
The targets: 1,000 in JSON, 1,500 in protobuf; p50 at most 2 ms and p99 at most 8 ms at half load. What is short of them, where
it goes and what the next factor would take: docs/decisions/0051.

Programs of their own on loopback: `roostream serving`, and the same ranker behind FastAPI with Pydantic and behind LitServe, each
as its tutorial has it, one worker. They type the same body, complete it, score it by the same code and pack the same record, one
request at a time; ours also admits, keeps deadlines, scores together what waited together, and writes the record to its log.
Before anything is timed one answer's scores are compared with those of the ranker in process.

The demo schema, initial rows; Kafka, Redis and the shards are away. One connection asks again as soon as it is answered. The
other loads don't wait: requests at random times (Poisson) over kept connections, encoded beforehand; times count from when a
request was due. What each can answer is what four connections get that ask again as soon as they are answered. With two cores a
program has one and the load the other; LitServe's processes share theirs. Programs that are not timed stand still.""",
    slice_s=_SECONDS,
    rounds=3,
)
