"""Our ranker behind other servers, written as in their tutorials: FastAPI with Pydantic, and LitServe.

Started as a module with the server's name, it prints its address and ends with its stdin. Pydantic parses a
request, and our scoring service scores it; there is no feature log, no admission control and no limit.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import psutil
import pydantic

from benchmarks.common import samples as data
from benchmarks.common.peer_process import start_peer
from benchmarks.common.serving_program import CORES, ServingProgram
from param_server.replica.replica import Replica
from roostream.models.config import RankerConfig
from roostream.schema.ids import item_id
from serving.rank import RankService
from serving.request import RankRequest
from serving.scorer import first_version
from serving.versions.loaded_versions import LoadedVersions

PATH = "/v1/rank"
_HERE = "benchmarks.common.peer_ranking"
Id = int | str
Ids = int | list[int] | None


class DemoUser(pydantic.BaseModel):
    """What a client of the demo sends of a request."""

    user: Ids = None
    device: Ids = None


class DemoArticle(pydantic.BaseModel):
    """And of a candidate."""

    category: Ids = None


class DemoCandidate(pydantic.BaseModel):
    item_id: Id
    nro: DemoArticle


class DemoRank(pydantic.BaseModel):
    request_id: str
    user_id: Id = 0
    session_id: Id = 0
    ro: DemoUser
    candidates: list[DemoCandidate]


class DemoRanking(pydantic.BaseModel):
    """The answer, with the same fields as ours."""

    request_id: str
    model_version: str
    scores: list[dict[str, float]]
    order: list[int]
    degraded: bool


class Scoring:
    """From a typed request to its answer."""

    def __init__(self) -> None:
        import torch

        torch.set_num_threads(1)
        schema = data.demo_schema()
        self.tasks = schema.tasks
        self.service = RankService(
            schema, LoadedVersions(first_version(schema, RankerConfig(), 0)), Replica(schema, 0)
        )

    def rank(self, asked: DemoRank) -> dict[str, Any]:
        ids = [c.item_id for c in asked.candidates]
        request = RankRequest(
            request_id=asked.request_id,
            user_id=item_id(asked.user_id),
            session_id=item_id(asked.session_id),
            surface="",
            item_ids=np.array([item_id(i) for i in ids], np.uint64).view(np.int64),
            client_item_ids=ids,
            ro={
                name: value
                for name, value in (("user", asked.ro.user), ("device", asked.ro.device))
                if value is not None
            },
            nro={"category": [c.nro.category for c in asked.candidates]},
            append=False,
            first_position=0,
            model_version="",
        )
        ranked = self.service.rank(request, time.time_ns() // 1_000_000)
        answer = ranked.answer
        return {
            "request_id": answer.request_id,
            "model_version": answer.model_version,
            "scores": [dict(zip(self.tasks, row, strict=True)) for row in ranked.scores_nT.tolist()],
            "order": answer.order,
            "degraded": answer.degraded,
        }


@contextlib.contextmanager
def peer_program(kind: str) -> Iterator[ServingProgram]:
    """Listening, on the core that a program of ours would have. `kind`: fastapi, litserve."""
    os.sched_setaffinity(0, CORES[:1])
    try:
        with start_peer(_HERE, kind) as peer:
            os.sched_setaffinity(0, CORES[-1:])
            host, _, port = peer.address.rpartition(":")
            yield ServingProgram((host, int(port)), Path(), peer.pid)
    finally:
        os.sched_setaffinity(0, CORES)


def _fastapi(port: int) -> None:
    import fastapi
    import uvicorn

    scoring, app = Scoring(), fastapi.FastAPI()

    async def rank(asked: DemoRank) -> Any:
        return scoring.rank(asked)

    rank.__annotations__["asked"] = DemoRank
    app.post(PATH, response_model=DemoRanking)(rank)
    app.get("/health")(lambda: {"ok": True})
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning", access_log=False)


def _litserve(port: int) -> None:
    from benchmarks.common import litserve_ranking as lit_ranking

    lit_ranking.run(port)


SERVERS: dict[str, Callable[[int], None]] = {"fastapi": _fastapi, "litserve": _litserve}


def main(kind: str) -> NoReturn:
    """Serve until stdin ends, then kill all child processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    address_out = os.dup(1)
    os.dup2(2, 1)  # what a server prints at its start is not its address

    def watch() -> None:
        while not _answers(port):
            time.sleep(0.1)
        os.write(address_out, f"127.0.0.1:{port}\n".encode())
        sys.stdin.read()
        for child in psutil.Process().children(recursive=True):
            child.kill()
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()
    SERVERS[kind](port)
    os._exit(1)


def _answers(port: int) -> bool:
    with (
        contextlib.suppress(OSError),
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1) as answer,
    ):
        return bool(answer.status == 200)
    return False


if __name__ == "__main__":
    main(sys.argv[1])
