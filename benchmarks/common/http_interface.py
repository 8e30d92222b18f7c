"""Serving's HTTP interface in this process, called as an ASGI application without a socket."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry

from benchmarks.common import samples as data
from roostream.runtime.clock import FakeClock
from roostream.schema.schema import Schema
from roostream.wire import roo_pb2 as pb
from serving.config import ServingConfig
from serving.context import ServingContext
from serving.feature_log.log import FeatureLog
from serving.heartbeat import InflightWatermark
from serving.http.app import HttpInterface
from serving.metrics import ServingMetrics
from serving.rank import RankService

NOW_MS = data.T0_MS + 1_000
MEDIA = {"json": b"application/json", "protobuf": b"application/x-protobuf"}
Application = Callable[[Any, Any, Any], Awaitable[None]]


class _InlineExecutor(Executor):
    """Runs a call at once, in the caller's thread."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


@contextlib.contextmanager
def http_interface(schema: Schema, service: RankService) -> Iterator[HttpInterface]:
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        config = ServingConfig(
            schema="-",
            store=str(home / "store"),
            home=home,
            bootstrap="127.0.0.1:1",
            deadline_ms=60_000,
            max_log_bytes=1 << 30,
        )
        log = FeatureLog.open(home / "log", max_bytes=1 << 33, segment_bytes=8 << 20)
        try:
            yield HttpInterface(
                ServingContext(
                    config=config,
                    schema=schema,
                    service=service,
                    log=log,
                    watermark=InflightWatermark(FakeClock(NOW_MS)),
                    metrics=ServingMetrics(CollectorRegistry(), schema.tasks),
                    executor=_InlineExecutor(),
                    waiting_for=lambda: [],
                )
            )
        finally:
            log.close()


@contextlib.contextmanager
def asgi_requests(app: Application, body: bytes, form: str) -> Iterator[Callable[[], bytes]]:
    """Yields a call that posts a rank request to `app` in one event loop and returns the answer's body.

    `form`: json, protobuf. Raises AssertionError if the first answer is not a 200 with scores.
    """
    sent: list[Any] = []
    media = MEDIA[form]
    length = str(len(body)).encode()
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
        "headers": [(b"content-type", media), (b"accept", media), (b"content-length", length)],
        "server": ("127.0.0.1", 80),
        "client": ("127.0.0.1", 1),
    }

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    async def post() -> None:
        sent.clear()
        await app(dict(scope), receive, send)

    with contextlib.closing(asyncio.new_event_loop()) as loop:

        def call() -> bytes:
            loop.run_until_complete(post())
            return b"".join(message.get("body", b"") for message in sent[1:])

        answer = call()
        assert sent[0]["status"] == 200 and scores_of(answer, form), answer[:200]
        yield call


def scores_of(answer: bytes, form: str) -> Any:
    if form == "protobuf":
        return pb.RankAnswer.FromString(answer).scores
    return msgspec.json.decode(answer)["scores"]
