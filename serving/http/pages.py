"""Probes, metrics, the front page, and the pages that document the interface."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Sequence
from importlib import resources
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.openapi.docs import get_redoc_html, get_swagger_ui_html
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.types import Scope

from roostream.runtime.histograms import RecentQuantiles
from roostream.runtime.metrics_server import PAGE_HEADERS
from serving import examples
from serving.context import ServingContext
from serving.http.body import JSON, json_response, prefers
from serving.http.openapi import TypeComponents
from serving.page import front_page
from serving.page.live import LivePage
from serving.types import About, Alive, Error, Readiness

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
_ASSETS = {
    "swagger-ui-bundle.js": "text/javascript; charset=utf-8",
    "swagger-ui.css": "text/css; charset=utf-8",
    "redoc.standalone.js": "text/javascript; charset=utf-8",
    "favicon.png": "image/png",
}
# Both pages start with an inline script and style themselves; Redoc searches in a worker.
_DOCS_POLICY = (
    "default-src 'none'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; "
    "connect-src 'self'; img-src 'self' data:; font-src 'self' data:; worker-src blob:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
_DOCS_HEADERS = {**dict(PAGE_HEADERS), "Content-Security-Policy": _DOCS_POLICY}
Endpoint = Callable[[Request], Awaitable[Response]]


def add_pages(app: FastAPI, context: ServingContext, types: TypeComponents) -> None:
    """Add the front page and the pages about the state of the process."""
    links = {**LINKS, **({"status_page": context.config.status_page} if context.config.status_page else {})}
    fresh = RecentQuantiles()

    def about() -> About:
        waiting_for, age_s = context.waiting_for(), context.rows_age_s()
        return About(
            name=app.title,
            version=app.version,
            schema=context.schema.name,
            model_version=context.service.versions.named("").name,
            ready=not waiting_for,
            rows_age_s=None if age_s is None else round(age_s, 3),
            links=links,
        )

    async def healthz(request: Request) -> Response:
        return json_response(Alive("ok"))

    async def readyz(request: Request) -> Response:
        now, waiting_for = about(), context.waiting_for()
        body = Readiness(not waiting_for, waiting_for, now.model_version, now.rows_age_s)
        return json_response(body, 503 if waiting_for else 200, {"retry-after": "1"} if waiting_for else {})

    async def metrics(request: Request) -> Response:
        return Response(generate_latest(context.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def root(request: Request) -> Response:
        return page_file("/") if wants_page(request.scope) else json_response(about())

    def probe(
        path: str,
        endpoint: Endpoint,
        operation: str,
        summary: str,
        answer: dict[str, Any],
        unavailable: Sequence[Any] = (Error,),
        refusals: Sequence[int] = (),
    ) -> None:
        app.get(path, **types.probe(operation, summary, answer, unavailable, refusals))(endpoint)
        app.add_route(path, endpoint, methods=["HEAD"])

    probe("/healthz", healthz, "alive", "The process is up", types.json(Alive, example=Alive("ok")))
    readiness = types.json(Readiness, example=examples.READY)
    summary = "Whether answers are complete; 503 with the same fields while they are not"
    probe("/readyz", readyz, "ready", summary, readiness, (Readiness, Error))
    text = {"schema": {"type": "string"}}
    content = {"text/plain": text}
    probe("/metrics", metrics, "metrics", "Prometheus metrics", content, refusals=(401, 403))
    summary = "Which process this is; an HTML page for browsers"
    probe(
        "/",
        root,
        "about",
        summary,
        {**types.json(About, example=examples.about_example(context.schema, links)), "text/html": text},
        refusals=(401,),
    )

    async def page(request: Request) -> Response:
        return page_file(request.url.path)

    async def page_document(request: Request) -> Response:
        return json_response(
            front_page.page_document(context, app.version, fresh), headers=dict(PAGE_HEADERS)
        )

    for path in front_page.FILES:
        if path != "/":
            app.add_route(path, page, methods=["GET"])
    app.add_route(front_page.DOCUMENT, page_document, methods=["GET"])
    for path, data in LivePage(context).routes.items():
        app.add_route(path, data, methods=["GET"])
    _add_documentation(app)


def _add_documentation(app: FastAPI) -> None:
    """The pages are FastAPI's own; what they load comes from a package and not from another host. Their links
    are relative, so that they also work behind a proxy that removes a prefix of the path."""

    async def openapi(request: Request) -> Response:
        return Response(msgspec.json.encode(app.openapi()), media_type=JSON)

    async def asset(request: Request) -> Response:
        name = request.url.path.rpartition("/")[2]
        return Response(_asset(name), media_type=_ASSETS[name], headers={"cache-control": "max-age=3600"})

    swagger = get_swagger_ui_html(
        openapi_url="openapi.json",
        title=app.title,
        swagger_js_url="docs/swagger-ui-bundle.js",
        swagger_css_url="docs/swagger-ui.css",
        swagger_favicon_url="docs/favicon.png",
    ).body
    redoc = get_redoc_html(
        openapi_url="openapi.json",
        title=app.title,
        redoc_js_url="docs/redoc.standalone.js",
        redoc_favicon_url="docs/favicon.png",
        with_google_fonts=False,
    ).body

    async def docs(request: Request) -> Response:
        body = swagger if request.url.path == "/docs" else redoc
        return Response(body, headers=_DOCS_HEADERS, media_type="text/html")

    endpoints = {"/openapi.json": openapi, "/docs": docs, "/redoc": docs}
    for path, endpoint in (endpoints | {f"/docs/{name}": asset for name in _ASSETS}).items():
        app.add_route(path, endpoint, methods=["GET"])


@functools.cache
def _asset(name: str) -> bytes:
    return resources.files("fastapi_offline").joinpath("static", name).read_bytes()


def wants_page(scope: Scope) -> bool:
    """Whether the client is a browser."""
    return prefers(scope, "text/html")


def page_file(path: str) -> Response:
    """A file of the front page."""
    headers = {"content-type": front_page.FILES[path][1], **dict(PAGE_HEADERS)}
    return Response(front_page.file_content(path), headers=headers)
