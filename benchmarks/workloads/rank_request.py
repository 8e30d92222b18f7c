"""One rank request in process: the demo schema, 20 candidates, a history of 50; no socket, no Kafka, no Redis.

`build` makes the endpoint with everything that is ours behind it: the parser, the filler, the ranker, a row replica, a feature
log in a directory of its own. `stages` gives each stage of `serving.rank` as a call of its own, to be timed apart.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from prometheus_client import CollectorRegistry

import traffic
from models.build import load_model_config
from models.inputs import build_inputs
from param_server.replica import Replica
from roo.lookup import build_lookup
from roo.schema import Schema, load_schema
from runtime.clock import FakeClock
from serving.build import Parts
from serving.config import ServingConfig
from serving.feature_log.log import FeatureLog
from serving.metrics import ServingMetrics
from serving.rank import RankService
from serving.routes import RankEndpoint
from serving.scorer import Versions, first_version
from serving.stamps import Stamps

NOW_MS = 1_700_000_000_000
SCHEMA = Path(traffic.__file__).parent / "schemas" / "demo.toml"


class Inline(Executor):
    """Runs what it is given at once, in the caller's thread."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class FixedHydrator:
    """Redis' answer without Redis: the same values for everyone."""

    def __init__(self, schema: Schema, num_candidates: int, history: int) -> None:
        items = list(range(100, 100 + history))
        times = [NOW_MS - 60_000 * (i + 1) for i in range(history)]
        self.ro: dict[str, Any] = {
            "history": {"item": items, "action": [1] * history, "time": times},
            "history_len": float(history),
            "gap_s": 60.0,
        }
        own = ("position", "item_id")
        online = [f.online for f in schema.nro if f.online and f.online not in own]
        self.nro = {name: np.arange(num_candidates, dtype=np.float32) + i for i, name in enumerate(online)}

    def read(self, user_id: int, item_ids: np.ndarray, time_ms: int) -> tuple[dict[str, Any], dict[str, Any]]:
        return self.ro, self.nro


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankWorkload:
    schema: Schema
    parts: Parts
    endpoint: RankEndpoint
    body: bytes  # JSON

    def answer(self) -> bytes:
        """The whole of a request as the socket sees it; the answer's body."""
        return asyncio.run(self.answered())

    async def answered(self) -> bytes:
        """`answer`, inside a running loop."""
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": self.body}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "headers": [(b"content-type", b"application/json")], "query_string": b""}
        await self.endpoint(scope, receive, send)
        assert sent[0]["status"] == 200, sent
        return bytes(sent[1]["body"])

    def close(self) -> None:
        self.parts.log.close()


def build(home: Path, *, num_candidates: int = 20, history: int = 50) -> RankWorkload:
    """Everything up to the first answer, kernels compiled. `home`: an empty directory."""
    torch.set_num_threads(1)
    schema = load_schema(SCHEMA)
    versions = Versions(first_version(schema, load_model_config(), 0))
    hydrator = FixedHydrator(schema, num_candidates, history)
    parts = Parts(
        config=ServingConfig(
            schema=str(SCHEMA), store=str(home / "store"), home=home, bootstrap="127.0.0.1:1", deadline_ms=60_000
        ),
        schema=schema,
        service=RankService(schema, versions, Replica(schema, 0), hydrator),
        log=FeatureLog.open(home / "log"),
        stamps=Stamps(FakeClock(NOW_MS)),
        metrics=ServingMetrics(CollectorRegistry()),
        executor=Inline(),
        waiting_for=lambda: [],
    )
    candidates = [{"item_id": i + 1, "nro": {"category": i % 7}} for i in range(num_candidates)]
    body = {"request_id": "r-1", "user_id": 17, "session_id": 4, "ro": {"user": 17, "device": 2}, "candidates": candidates}
    workload = RankWorkload(schema=schema, parts=parts, endpoint=RankEndpoint(parts), body=msgspec.json.encode(body))
    workload.answer()
    return workload


def stages(workload: RankWorkload) -> dict[str, Callable[[], object]]:
    """Stage → a call that does only it, in the order of a request; `rank` is all from `complete` on, `http` is all."""
    service = workload.parts.service
    version, rows, hydrator = service.versions.newest, service.rows, service.hydrator
    assert hydrator is not None

    def complete() -> tuple[bytes, bytes]:
        request = workload.endpoint.json.parse(workload.body)
        service.filler.open(request)
        return service.filler.encode(request, NOW_MS, *hydrator.read(17, request.item_ids, NOW_MS))

    request = workload.endpoint.json.parse(workload.body)
    ro, nro = complete()
    batch = version.decoder.decode_request(ro, nro, request.item_ids, NOW_MS)
    lookup = build_lookup(batch)
    gathered = rows.gather(lookup)
    inputs = build_inputs(batch, lookup, gathered)

    def model() -> object:
        with torch.inference_mode():
            return version.model(inputs).numpy()

    return {
        "parse": lambda: workload.endpoint.json.parse(workload.body),
        "parse and complete": complete,
        "decode": lambda: version.decoder.decode_request(ro, nro, request.item_ids, NOW_MS),
        "lookup": lambda: build_lookup(batch),
        "rows": lambda: rows.gather(lookup),
        "inputs": lambda: build_inputs(batch, lookup, gathered),
        "model": model,
        "score": lambda: version.score(rows, ro, nro, request.item_ids, NOW_MS),
        "rank": lambda: service.rank(workload.endpoint.json.parse(workload.body), NOW_MS),
    }
