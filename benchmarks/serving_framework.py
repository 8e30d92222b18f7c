"""What does the framework around a model cost a request?

A rank request through a framework, with a model that costs nothing: ours, FastAPI with Pydantic, and a bare
route.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import fastapi
import msgspec
import numpy as np
import pydantic
from prometheus_client import CollectorRegistry

from benchmarks.harness.benchmark import Benchmark, Row, Subject, Work
from benchmarks.serving_request import NOW_MS, Inline
from param_server.replica.replica import Replica
from roostream.models.config import RankerConfig
from roostream.runtime.clock import FakeClock
from roostream.schema.schema import Schema
from roostream.schema.schema_file import schema_from_dict
from roostream.wire import roo_pb2 as pb
from roostream.wire.block import encode_nro, encode_ro
from serving.answer import RankAnswer
from serving.config import ServingConfig
from serving.context import ServingContext
from serving.feature_log.format import LogRecord
from serving.feature_log.log import FeatureLog
from serving.http.app import HttpInterface
from serving.inflight_watermark import InflightWatermark
from serving.metrics import ServingMetrics
from serving.rank import RankResult, RankService
from serving.request import RankRequest
from serving.scorer import first_version
from serving.versions.loaded_versions import LoadedVersions

CANDIDATES, RO, NRO = 50, 20, 8
RO_NAME, NRO_NAME = "of_the_request_{}", "of_a_candidate_{}"
_SCORES_NT, _ORDER = np.linspace(0.01, 0.2, CANDIDATES, dtype=np.float32)[:, None], list(range(CANDIDATES))
_RECORD = LogRecord("impressions", -1, NOW_MS, bytes(8), bytes(64))
Application = Callable[[Any, Any, Any], Awaitable[None]]
MEDIA = {"json": b"application/json", "protobuf": b"application/x-protobuf"}


class Instant(RankService):
    """Has the scores already."""

    def rank_all(self, asked: Sequence[tuple[RankRequest, int]]) -> list[RankResult | Exception]:
        return [RankResult(answer_of(request.request_id), _RECORD) for request, _ in asked]


@contextlib.contextmanager
def ours(form: str) -> Iterator[Work]:
    """`form`: json, protobuf."""
    with tempfile.TemporaryDirectory() as folder:
        home, schema = Path(folder), schema_of()
        settings = ServingConfig(
            schema="-",
            store=str(home / "store"),
            home=home,
            bootstrap="127.0.0.1:1",
            deadline_ms=60_000,
            max_log_bytes=1 << 30,
        )
        log = FeatureLog.open(home / "log", max_bytes=1 << 33, segment_bytes=8 << 20)
        parts = ServingContext(
            config=settings,
            schema=schema,
            service=Instant(
                schema, LoadedVersions(first_version(schema, RankerConfig(), 0)), Replica(schema, 0)
            ),
            log=log,
            watermark=InflightWatermark(FakeClock(NOW_MS)),
            metrics=ServingMetrics(CollectorRegistry(), schema.tasks),
            executor=Inline(),
            waiting_for=lambda: [],
        )
        try:
            yield from _asked(HttpInterface(parts), body_of(form), MEDIA[form])
        finally:
            log.close()


@contextlib.contextmanager
def fastapi_pydantic(form: str) -> Iterator[Work]:
    """As its tutorial has it: a typed body, a typed answer."""
    make: Any = pydantic.create_model
    number, an_id = Annotated[float, pydantic.Field(allow_inf_nan=False)] | None, (int | str, 0)
    features: Any = make("Features", **{RO_NAME.format(i): (number, None) for i in range(RO)})
    candidate: Any = make(
        "Candidate", item_id=(int | str, ...), **{NRO_NAME.format(i): (number, None) for i in range(NRO)}
    )
    ids = {"request_id": (str, ""), "user_id": an_id, "session_id": an_id}
    body: Any = make("Body", **ids, ro=(features, ...), candidates=(list[candidate], ...))
    scores: Any = make("Scores", click=(float, ...))
    said = {
        "request_id": str,
        "model_version": str,
        "scores": list[scores],
        "order": list[int],
        "degraded": bool,
    }
    answer: Any = make("Answer", **{name: (kind, ...) for name, kind in said.items()})
    app = fastapi.FastAPI()

    async def rank(request: Any) -> Any:
        return plain_answer(request.request_id)

    rank.__annotations__["request"] = body
    app.post("/v1/rank", response_model=answer)(rank)
    yield from _asked(app, body_of(form), MEDIA[form])


@contextlib.contextmanager
def raw_msgspec(form: str) -> Iterator[Work]:
    """A route without a framework: types alone."""
    features: Any = msgspec.defstruct(
        "Features", [(RO_NAME.format(i), float | None, None) for i in range(RO)]
    )
    floats: list[Any] = [(NRO_NAME.format(i), float | None, None) for i in range(NRO)]
    candidate: Any = msgspec.defstruct("Candidate", [("item_id", int | str), *floats])
    ids: list[Any] = [("request_id", str, ""), ("user_id", int | str, 0), ("session_id", int | str, 0)]
    body = msgspec.defstruct("Body", [("ro", features), ("candidates", list[candidate]), *ids])
    decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(body)

    async def route(scope: Any, receive: Any, send: Any) -> None:
        request = decoder.decode((await receive())["body"])
        said = msgspec.json.encode(plain_answer(request.request_id))
        head = [(b"content-type", MEDIA[form]), (b"content-length", str(len(said)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        await send({"type": "http.response.body", "body": said})

    yield from _asked(route, body_of(form), MEDIA[form])


def _asked(app: Application, body: bytes, media: bytes) -> Iterator[Work]:
    """One request after another, in one event loop; each answer is there and has all scores."""
    sent: list[Any] = []
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": "/v1/rank",
        "raw_path": b"/v1/rank",
        "root_path": "",
        "query_string": b"",
        "headers": [
            (b"content-type", media),
            (b"accept", media),
            (b"content-length", str(len(body)).encode()),
        ],
        "server": ("127.0.0.1", 80),
        "client": ("127.0.0.1", 1),
    }

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    async def one() -> None:
        sent.clear()
        await app(dict(scope), receive, send)

    with contextlib.closing(asyncio.new_event_loop()) as loop:
        loop.run_until_complete(one())
        said = b"".join(message.get("body", b"") for message in sent[1:])
        assert sent[0]["status"] == 200 and _num_scores(said, media) == CANDIDATES, said[:200]
        yield Work(lambda: loop.run_until_complete(one()))


def _num_scores(said: bytes, media: bytes) -> int:
    is_protobuf = media == MEDIA["protobuf"]
    return len(pb.RankAnswer.FromString(said).scores if is_protobuf else msgspec.json.decode(said)["scores"])


def schema_of() -> Schema:
    """Floats alone, so that all three check the same."""
    features = {
        "ro": [{"name": RO_NAME.format(i)} for i in range(RO)],
        "nro": [{"name": NRO_NAME.format(i)} for i in range(NRO)],
    }
    return schema_from_dict({**features, "label": [{"name": "click", "action": "click"}]})


def body_of(form: str) -> bytes:
    """All digits of a float64, as most clients write them: in JSON about 16 KB."""
    rng = np.random.default_rng(1)
    items_n, ro, nro_BF = (
        rng.integers(1 << 40, 1 << 50, CANDIDATES),
        rng.exponential(2.0, RO),
        rng.exponential(2.0, (CANDIDATES, NRO)),
    )
    if form == "protobuf":
        schema = schema_of()
        message = pb.Impression(
            header=pb.Header(request_id="r-1", user_id=17, session_id=4),
            item_ids=items_n.tolist(),
            ro=encode_ro(schema, {RO_NAME.format(i): x for i, x in enumerate(ro.tolist())}),
            nro=encode_nro(schema, {NRO_NAME.format(i): nro_BF[:, i] for i in range(NRO)}, CANDIDATES),
        )
        return message.SerializeToString()
    rows = [
        {"item_id": int(item), **{NRO_NAME.format(i): x for i, x in enumerate(row)}}
        for item, row in zip(items_n, nro_BF.tolist(), strict=True)
    ]
    given = {RO_NAME.format(i): x for i, x in enumerate(ro.tolist())}
    return msgspec.json.encode(
        {"request_id": "r-1", "user_id": 17, "session_id": 4, "ro": given, "candidates": rows}
    )


def answer_of(request_id: str) -> RankAnswer:
    return RankAnswer(
        request_id=request_id,
        model_version="1-1",
        tasks=("click",),
        scores_nT=_SCORES_NT,
        order=_ORDER,
        degraded=False,
    )


def plain_answer(request_id: str) -> dict[str, Any]:
    """The same, as a program without our answer's type has it."""
    scores = [{"click": x} for x in _SCORES_NT[:, 0].tolist()]
    return {
        "request_id": request_id,
        "model_version": "1-1",
        "scores": scores,
        "order": _ORDER,
        "degraded": False,
    }


_HERE = "benchmarks.serving_framework"

BENCHMARK = Benchmark(
    name="serving-framework",
    summary="What does the framework around a model cost a request?",
    rows=(
        Row(
            name="a body of 16 KB: 20 features of the request, 50 candidates of 8",
            unit="requests",
            shows="cost",
            clock="cpu",
            subjects=(
                Subject("ours, JSON", f"{_HERE}:ours", ("json",)),
                Subject("FastAPI + Pydantic, JSON", f"{_HERE}:fastapi_pydantic", ("json",), "peer"),
                Subject("raw route + msgspec, JSON", f"{_HERE}:raw_msgspec", ("json",), "limit"),
                Subject("ours, protobuf", f"{_HERE}:ours", ("protobuf",), "stage"),
            ),
        ),
    ),
    interpretation="""\
From a body to its answer's bytes, with a model that has the scores already: routing, reading the body under its deadline,
checking names, types and numbers, columns in arrays, admission, the queue to the scoring thread (whose work is done in place
here), a small record for the log, the answer. FastAPI and Pydantic are given the same body, the same checks of types and finite
numbers, and the same answer; no admission, no deadline, no arrays, no log. The limit is a bare ASGI route that has msgspec decode
and encode.

Called as an ASGI application, without a socket: what uvicorn adds is the same for all. What is logged of the features is left
out.""",
)
