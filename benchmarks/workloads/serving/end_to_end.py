"""Programs that rank, each under a load that doesn't wait: ours in both encodings, and our ranker behind other servers."""

from __future__ import annotations

import contextlib
import urllib.request
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from benchmarks.question import Work
from benchmarks.workloads import data
from benchmarks.workloads.open_load import Answered, rank_request
from benchmarks.workloads.serving.overload import DEADLINE_MS, Load, Served
from benchmarks.workloads.serving.peer_program import peer_program
from benchmarks.workloads.serving.program import ServingProgram, bodies_of, serving_program
from benchmarks.workloads.shared import Shared
from roostream.wire import roo_pb2 as pb
from serving.client.messages import PROTOBUF, impression_of

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
                    program, [rank_request(body, media_of(form)) for body in sent(form, candidates)]
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


_programs = Shared(_open)


def programs() -> contextlib.AbstractContextManager[Programs]:
    """Of a whole run."""
    return _programs.of()


@contextlib.contextmanager
def under_load(kind: str, form: str, times: float, seconds: float, candidates: int) -> Iterator[Work]:
    """`kind`: ours, fastapi, litserve; `times` the capacity, or 0: one connection. Units: requests answered 200 within the
    deadline. AssertionError: scores aren't ours."""
    with _programs.of() as running:
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
    return [impression_of(msgspec.json.decode(body), schema) for body in bodies]


def media_of(form: str) -> str:
    return PROTOBUF if form == "protobuf" else "application/json"


def _check_scores(program: ServingProgram, form: str, candidates: int) -> None:
    """Of one request, against those of the ranker in this process."""
    from benchmarks.workloads.serving.peer_program import DemoRank, Scoring

    body = sent(form, candidates)[0]
    url = "http://{}:{}/v1/rank".format(*program.address)
    headers = {"content-type": media_of(form), "accept": media_of(form)}
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
