"""The HTTP interface: traffic on raw routes (serving/routes.py), everything else on FastAPI."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.routing import Route

from runtime.exports import Exports
from serving.build import Parts
from serving.openapi import describe
from serving.routes import EngagementsEndpoint, RankEndpoint


def build_app(parts: Parts) -> FastAPI:
    """The ASGI application over `parts`; it starts nothing and owns nothing."""
    app = FastAPI(title="Roostream serving", version="1", openapi_url="/openapi.json", docs_url="/docs", redoc_url=None)
    rank, engagements = RankEndpoint(parts), EngagementsEndpoint(parts)
    app.router.routes[:0] = [
        Route("/v1/rank", rank, methods=["POST"]),
        Route("/v1/engagements", engagements, methods=["POST"]),
    ]
    helps = {"in_flight": "rank requests in work"}
    Exports("serving", lambda: {"in_flight": rank.gate.in_flight}, {}, helps=helps).register(parts.metrics.registry)

    @app.get("/healthz", summary="The process is up")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/readyz", summary="Rows are here: 200; still waiting for something: 503", responses={503: {}})
    async def readyz() -> Response:
        waiting_for = parts.waiting_for()
        body = {"ready": not waiting_for, "waiting_for": waiting_for, "model_version": parts.service.versions.newest.name}
        return JSONResponse(body, 503 if waiting_for else 200, {"retry-after": "1"} if waiting_for else None)

    @app.get("/metrics", summary="Prometheus metrics", response_class=Response)
    async def metrics() -> Response:
        return Response(generate_latest(parts.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    own = app.openapi

    def openapi() -> dict[str, Any]:
        return describe(own(), parts.schema)

    app.openapi = openapi  # type: ignore[method-assign]
    return app
