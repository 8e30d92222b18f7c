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
from benchmarks.workloads.open_load import rank_request
from benchmarks.workloads.serving.overload import DEADLINE_MS, Load, Served
from benchmarks.workloads.serving.peer_program import peer_program
from benchmarks.workloads.serving.program import ServingProgram, bodies_of, serving_program
from roo import roo_pb2 as pb
from serving.client.said import PROTOBUF, impression_of

_TOLERANCE = 1e-4


class CountedLoad(Load):
    """Counted by the CPU time that the program took, so that a busy machine costs less of the figure."""

    def __init__(self, served: Served, times: float, seconds: float) -> None:
        super().__init__(served, times, seconds)
        self._cpu_s = 0.0

    def took_s(self) -> float:
        return self._cpu_s

    def figures(self) -> dict[str, float]:
        named = super().figures()
        return {name: named[name] for name in _FIGURES}


_FIGURES = ("asked a second", "p50 of 200, ms", "p99 of 200, ms", "late or failed %", "most that a request was sent late, ms")


@contextlib.contextmanager
def under_load(kind: str, form: str, times: float, seconds: float, candidates: int) -> Iterator[Work]:
    """`kind`: ours, fastapi, litserve. Units: requests answered 200 within the deadline. AssertionError: scores aren't ours."""
    program = serving_program(deadline_ms=DEADLINE_MS) if kind == "ours" else peer_program(kind)
    with program as running:
        _check_scores(running, form, candidates)
        served = Served(running, [rank_request(body, media_of(form)) for body in sent(form, candidates)])
        load = CountedLoad(served, times, seconds)
        try:
            yield Work(load.step, load.units, load.figures, load.took_s)
        finally:
            served.clients.close()


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
