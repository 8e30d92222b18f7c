"""The ASGI application. `/v1/*` and `/v2` are plain ASGI endpoints; pages, probes and metrics are FastAPI
routes."""

from __future__ import annotations

import functools
import importlib.metadata
import time
from collections.abc import Awaitable, Collection
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive, Scope, Send

from roostream.errors import nearest
from roostream.runtime.histograms import RecentQuantiles
from roostream.runtime.metrics_collector import MetricsCollector
from roostream.runtime.metrics_server import PAGE_HEADERS
from roostream.runtime.program import CURRENT_CALL
from serving.access.bearer_keys import Keyring
from serving.access.route_scopes import required_scope
from serving.context import ServingContext
from serving.errors import RequestError, shown
from serving.http.body import JSON, BodyReader, send_error
from serving.http.docs_page import interface_page
from serving.http.explain_route import ExplainEndpoint
from serving.http.fast_path import PATH as RANK_PATH
from serving.http.fast_path import WholeRanks, is_whole_post, overload_answer
from serving.http.inference_routes import InferenceProtocol, send_inference_error
from serving.http.log_rate_limit import LogRateLimit, LogRateLimitFilter
from serving.http.openapi import describe
from serving.http.retrieval_routes import RecommendEndpoint, RetrieveEndpoint
from serving.http.routes import EngagementsEndpoint, RankEndpoint
from serving.http.tracing import HEADER, SpanFactory, open_tracing, parse_call_names
from serving.metrics import METRICS
from serving.page import front_page
from serving.page.live import LivePage

LINKS = {
    "rank": "/v1/rank",
    "explain": "/v1/explain",
    "engagements": "/v1/engagements",
    "inference": "/v2",
    "interface": "/docs",
    "openapi": "/openapi.json",
    "alive": "/healthz",
    "ready": "/readyz",
    "metrics": "/metrics",
}


class HttpInterface:
    """The ASGI application of a serving process. It starts no threads and owns nothing in `context`."""

    def __init__(self, context: ServingContext) -> None:
        self.context = context
        log_rate_limit = LogRateLimit()
        self.log_filter = LogRateLimitFilter(log_rate_limit)
        self.body_reader = BodyReader(context.config.max_body_bytes, context.config.max_reading_bytes)
        rank = RankEndpoint(context, self.body_reader, log_rate_limit)
        self.gate, self._max_s = rank.gate, context.config.deadline_ms / 1000
        is_plain = context.keys is None and not context.config.tracing
        self.whole = WholeRanks(rank) if is_plain else None
        self.endpoints: dict[str, RankEndpoint | EngagementsEndpoint] = {
            "/v1/rank": rank,
            "/v1/engagements": EngagementsEndpoint(context, rank, log_rate_limit),
            "/v1/explain": ExplainEndpoint(context, rank, log_rate_limit),
        }
        if context.items is not None:
            self.endpoints["/v1/retrieve"] = RetrieveEndpoint(
                context, rank, context.items.retriever, log_rate_limit
            )
            self.endpoints["/v1/recommend"] = RecommendEndpoint(
                context, rank, context.items.retriever, log_rate_limit
            )
        self.connections: Collection[object] = ()  # open connections of the server that runs this application
        rank.queue.num_connections = lambda: len(self.connections)
        self._inference = InferenceProtocol(context, rank, log_rate_limit, _version())
        self._framework_app = _framework_app(context)
        self._open_files = frozenset(front_page.FILES) - {"/"}
        self._spanning = open_tracing(context.config.tracing, frozenset(("/", *LINKS.values())))
        context.metrics.registry.register(
            MetricsCollector(
                lambda: {
                    "roostream_serving_in_flight": rank.gate.in_flight,
                    "roostream_serving_connections": len(self.connections),
                    "roostream_serving_reading_bytes": self.body_reader.num_bytes,
                    "roostream_serving_service_time_seconds": rank.gate.service_s,
                    "roostream_serving_keys": None if context.keys is None else len(context.keys.keys),
                    "roostream_serving_keys_file_refused": None
                    if context.keys is None
                    else bool(context.keys.refused),
                },
                METRICS,
            )
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP call. The answer and all log lines about it have the call id."""
        if scope["type"] != "http":
            await self._framework_app(scope, receive, send)
            return
        names = parse_call_names(scope["headers"])
        header = (HEADER, names.call_id.encode())

        def answer(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], header]
            return send(message)

        token = CURRENT_CALL.set(names)
        try:
            if self._spanning is None:
                await self._dispatch(scope, receive, answer)
            else:
                await self._traced(self._spanning, scope, receive, answer)
        finally:
            CURRENT_CALL.reset(token)

    async def _dispatch(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Unauthorized requests are rejected before the body is read; then the endpoint of the path
        answers."""
        if self.context.keys is not None and (refusal := self._refusal(self.context.keys, scope)) is not None:
            self.context.metrics.answered("access", refusal.status, 0.0)
            send_refusal = send_inference_error if scope["path"].startswith("/v2") else send_error
            await send_refusal(
                send, refusal, **({"www-authenticate": "Bearer"} if refusal.status == 401 else {})
            )
            return
        endpoint = self.endpoints.get(scope["path"])
        if endpoint is None:
            others = self._inference if scope["path"].startswith("/v2") else self._framework_app
            await others(scope, receive, send)
        elif scope["method"] == "POST":
            await endpoint(scope, receive, send)
        else:
            await send_error(
                send, RequestError(405, f"expected POST, got {shown(scope['method'])}"), allow="POST"
            )

    def _refusal(self, keys: Keyring, scope: Scope) -> RequestError | None:
        wanted = required_scope(scope["path"], self._open_files)
        if wanted is None or (scope["path"] == "/" and wants_page(scope)):
            return None
        try:
            keys.check(
                next((value for name, value in scope["headers"] if name == b"authorization"), b""), wanted
            )
        except RequestError as error:
            return error
        return None

    async def _traced(self, spanning: SpanFactory, scope: Scope, receive: Receive, send: Send) -> None:
        with spanning(scope) as answered:

            def answer(message: Message) -> Awaitable[None]:
                if message["type"] == "http.response.start":
                    answered(message["status"])
                return send(message)

            await self._dispatch(scope, receive, answer)

    def refuses(self, data: bytes) -> bytes | None:
        """Return the 429 answer to a complete rank request on an idle connection, if none can be admitted
        now; None otherwise."""
        begin_s = time.perf_counter()
        why = self.gate.refusal_reason(self._max_s)
        if not why or not is_whole_post(data, RANK_PATH):
            return None
        self.context.metrics.answered("rank", 429, time.perf_counter() - begin_s)
        return overload_answer(why)

    def stop(self) -> None:
        """Stop waiting for incomplete bodies. Call from the event loop, before connections are closed."""
        self.body_reader.stop()


def _framework_app(context: ServingContext) -> FastAPI:
    """FastAPI routes for everything else. All routes answer HEAD too, and none redirects to the client's Host
    header."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    links = {**LINKS, **({"status_page": context.config.status_page} if context.config.status_page else {})}
    fresh = RecentQuantiles()
    document = functools.cache(
        lambda: describe(context.schema, _version(), retrieves=context.items is not None)
    )

    async def root(request: Request) -> Response:
        about = {**_about(context), "links": links}
        return page_file("/") if wants_page(request.scope) else JSONResponse(about)

    async def page(request: Request) -> Response:
        return page_file(request.url.path)

    async def page_document(request: Request) -> Response:
        return JSONResponse(front_page.page_document(context, _version(), fresh), headers=dict(PAGE_HEADERS))

    async def healthz(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def readyz(request: Request) -> Response:
        waiting_for = context.waiting_for()
        about = _about(context)
        body = {
            "waiting_for": waiting_for,
            **{name: about[name] for name in ("ready", "model_version", "rows_age_s")},
        }
        return JSONResponse(body, 503 if waiting_for else 200, {"retry-after": "1"} if waiting_for else None)

    async def metrics(request: Request) -> Response:
        return Response(generate_latest(context.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def openapi(request: Request) -> Response:
        return Response(msgspec.json.encode(document()), media_type=JSON)

    async def docs(request: Request) -> Response:
        return HTMLResponse(interface_page(document()))

    routes = {
        "/": root,
        "/healthz": healthz,
        "/readyz": readyz,
        "/metrics": metrics,
        "/openapi.json": openapi,
        "/docs": docs,
    }
    routes |= {
        front_page.DOCUMENT: page_document,
        **dict.fromkeys([path for path in front_page.FILES if path != "/"], page),
        **LivePage(context).routes,
    }
    for path, answer in routes.items():
        app.add_route(path, answer, methods=["GET"])  # HEAD is added
    app.add_exception_handler(HTTPException, _framework_error)
    app.add_exception_handler(Exception, _defect)
    return app


def _about(context: ServingContext) -> dict[str, Any]:
    waiting_for = context.waiting_for()
    return {
        "name": "Roostream serving",
        "version": _version(),
        "schema": context.schema.name,
        "model_version": context.service.versions.named("").name,
        "ready": not waiting_for,
        "rows_age_s": None if (age_s := context.rows_age_s()) is None else round(age_s, 3),
    }


def wants_page(scope: Scope) -> bool:
    """Whether the client is a browser."""
    return any(name == b"accept" and b"text/html" in value for name, value in scope["headers"])


def page_file(path: str) -> Response:
    return Response(
        front_page.file_content(path),
        headers={"content-type": front_page.FILES[path][1], **dict(PAGE_HEADERS)},
    )


async def _framework_error(request: Request, error: Exception) -> Response:
    """Format the framework's 404 and 405 like all other errors."""
    assert isinstance(error, HTTPException)
    path, method = shown(request.url.path), shown(request.method)
    if error.status_code == 405:
        refusal = RequestError(405, f"expected GET or HEAD, got {method}")
    else:
        refusal = RequestError(404, f"nothing is at {path!r}{nearest(path, ('/', *LINKS.values()))}")
    return JSONResponse(refusal.body(), refusal.status, {**(error.headers or {}), **refusal.headers()})


async def _defect(request: Request, error: Exception) -> Response:
    refusal = RequestError(500, "this request could not be answered; the cause is in serving's log")
    return JSONResponse(refusal.body(), 500)


@functools.cache
def _version() -> str:
    try:
        return importlib.metadata.version("roostream")
    except importlib.metadata.PackageNotFoundError:
        return "0"
