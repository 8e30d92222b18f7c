"""What does the framework around a model cost a request?

A rank request through a framework, with a model that costs nothing: ours, FastAPI with Pydantic, and a bare
route.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import fastapi
import msgspec
import numpy as np
import pydantic

from benchmarks.common.http_interface import (
    MEDIA,
    NOW_MS,
    Application,
    asgi_requests,
    http_interface,
    scores_of,
)
from benchmarks.harness.benchmark import Benchmark, Row, Subject, Work
from param_server.replica.replica import Replica
from roostream.models.config import RankerConfig
from roostream.schema.schema import Schema
from roostream.schema.schema_file import schema_from_dict
from roostream.wire import roo_pb2 as pb
from roostream.wire.block import encode_nro, encode_ro
from serving.answer import Scores
from serving.feature_log.format import LogRecord
from serving.rank import RankResult, RankService
from serving.request import RankRequest
from serving.scorer import first_version
from serving.types import RankAnswer
from serving.versions.loaded_versions import LoadedVersions

CANDIDATES, RO, NRO = 50, 20, 8
RO_NAME, NRO_NAME = "of_the_request_{}", "of_a_candidate_{}"
_SCORES_NT, _ORDER = np.linspace(0.01, 0.2, CANDIDATES, dtype=np.float32)[:, None], list(range(CANDIDATES))
_RECORD = LogRecord("impressions", -1, NOW_MS, bytes(8), bytes(64))


class InstantRanker(RankService):
    """Returns constant scores."""

    def rank_all(self, requests: Sequence[tuple[RankRequest, int]]) -> list[RankResult | Exception]:
        return [RankResult(answer_of(request.request_id), _RECORD) for request, _ in requests]


@contextlib.contextmanager
def ours(form: str) -> Iterator[Work]:
    """`form`: json, protobuf."""
    schema = schema_of()
    versions = LoadedVersions(first_version(schema, RankerConfig(), 0))
    with http_interface(schema, InstantRanker(schema, versions, Replica(schema, 0))) as app:
        yield from _posted(app, form)


@contextlib.contextmanager
def fastapi_pydantic(form: str) -> Iterator[Work]:
    """A typed body and a typed answer, as in FastAPI's tutorial."""
    make: Any = pydantic.create_model
    number, an_id = Annotated[float, pydantic.Field(allow_inf_nan=False)] | None, (int | str, 0)
    features: Any = make("Features", **{RO_NAME.format(i): (number, None) for i in range(RO)})
    candidate: Any = make(
        "Candidate", item_id=(int | str, ...), **{NRO_NAME.format(i): (number, None) for i in range(NRO)}
    )
    ids = {"request_id": (str, ""), "user_id": an_id, "session_id": an_id}
    body: Any = make("Body", **ids, ro=(features, ...), candidates=(list[candidate], ...))
    scores: Any = make("Scores", click=(float, ...))
    fields = {
        "request_id": str,
        "model_version": str,
        "scores": list[scores],
        "order": list[int],
        "degraded": bool,
    }
    answer: Any = make("Answer", **{name: (kind, ...) for name, kind in fields.items()})
    app = fastapi.FastAPI()

    async def rank(request: Any) -> Any:
        return plain_answer(request.request_id)

    rank.__annotations__["request"] = body
    app.post("/v1/rank", response_model=answer)(rank)
    yield from _posted(app, form)


@contextlib.contextmanager
def raw_msgspec(form: str) -> Iterator[Work]:
    """A bare ASGI route: msgspec decodes typed bodies and encodes answers."""
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
        answer = msgspec.json.encode(plain_answer(request.request_id))
        head = [(b"content-type", MEDIA[form]), (b"content-length", str(len(answer)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        await send({"type": "http.response.body", "body": answer})

    yield from _posted(route, form)


def _posted(app: Application, form: str) -> Iterator[Work]:
    """One request after another; the answer must have all scores."""
    with asgi_requests(app, body_of(form), form) as post:
        answer = post()
        assert len(scores_of(answer, form)) == CANDIDATES, answer[:200]
        yield Work(post)


def schema_of() -> Schema:
    """Only float features, so that all three programs check the same types."""
    features = {
        "ro": [{"name": RO_NAME.format(i)} for i in range(RO)],
        "nro": [{"name": NRO_NAME.format(i)} for i in range(NRO)],
    }
    return schema_from_dict({**features, "label": [{"name": "click", "action": "click"}]})


def body_of(form: str) -> bytes:
    """A body with all digits of float64 values: about 16 KB in JSON."""
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
    ro_values = {RO_NAME.format(i): x for i, x in enumerate(ro.tolist())}
    return msgspec.json.encode(
        {"request_id": "r-1", "user_id": 17, "session_id": 4, "ro": ro_values, "candidates": rows}
    )


def answer_of(request_id: str) -> RankAnswer[Any]:
    return RankAnswer(
        request_id=request_id,
        model_version="1-1",
        scores=Scores(("click",), _SCORES_NT),
        order=_ORDER,
        degraded=False,
    )


def plain_answer(request_id: str) -> dict[str, Any]:
    """The same answer as a dictionary."""
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
The figure covers a body's bytes to its answer's bytes, with a model that returns constant scores. Ours does
routing, deadline, checks of names, types and finite numbers, columns in arrays, admission, the scoring
queue (run in place) and a small log record. FastAPI with Pydantic gets the same body, checks and answer,
without admission, deadline, arrays and log. The limit is a bare ASGI route in which msgspec decodes and
encodes. All are called without a socket; uvicorn would add the same to each.""",
)
