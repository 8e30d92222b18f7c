"""The FastAPI application of a serving process: middleware, routes, pages, and the form of errors."""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Collection
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.middleware import Middleware
from starlette.types import Scope

from roostream.runtime.log_rate_limit import LogRateLimit, LogRateLimitFilter
from roostream.runtime.metrics_collector import MetricsCollector
from serving.access.route_scopes import required_scope, traffic_route
from serving.context import ServingContext
from serving.http.admission import AdmissionGate
from serving.http.body import BodyReader
from serving.http.error_handlers import EXCEPTION_HANDLERS
from serving.http.explain_route import add_explain_route
from serving.http.inference_routes import add_inference_routes
from serving.http.middleware import AccessMiddleware, AdmissionMiddleware, CallMiddleware
from serving.http.openapi import TypeComponents
from serving.http.pages import LINKS, add_pages, wants_page
from serving.http.retrieval_routes import add_retrieval_routes
from serving.http.routes import Ranking, Traffic, TrafficRoute, add_engagements_route, add_rank_route
from serving.http.tracing import open_tracing
from serving.metrics import METRICS
from serving.page import front_page

_OPEN_FILES = frozenset(front_page.FILES) - {"/"}
_ROUTES = frozenset(("/", *LINKS.values()))


class HttpInterface(FastAPI):
    """The application. It starts no threads and owns nothing in `context`."""

    def __init__(self, context: ServingContext) -> None:
        self.context = context
        log_rate_limit = LogRateLimit()
        self.log_filter = LogRateLimitFilter(log_rate_limit)
        self.body_reader = BodyReader(context.config.max_body_bytes, context.config.max_reading_bytes)
        self.connections: Collection[object] = ()  # open connections of the server that runs this application
        self.ranking = ranking = Ranking(context)
        self.gate = ranking.gate
        ranking.queue.num_connections = lambda: len(self.connections)
        self.types = TypeComponents(context.schema)
        super().__init__(
            title="Roostream serving",
            version=_version(),
            description="Rank the candidates of a request, and send engagements. Pages with examples: "
            "docs/http.md.",
            openapi_tags=[
                {"name": "traffic", "description": "for clients"},
                {"name": "health", "description": "for operators"},
            ],
            openapi_url=None,
            docs_url=None,
            redoc_url=None,
            redirect_slashes=False,  # nobody is sent to what a Host header says
            telemetry={"tracing": False, "metrics": False, "logs": False},
            middleware=self._middleware(),
            exception_handlers=EXCEPTION_HANDLERS,
        )
        router = APIRouter(route_class=TrafficRoute)
        traffic = Traffic(
            context=context,
            ranking=ranking,
            bodies=self.body_reader,
            log_rate_limit=log_rate_limit,
            types=self.types,
            router=router,
        )
        self.state.traffic = traffic
        add_rank_route(traffic)
        add_engagements_route(traffic)
        self.explainer = add_explain_route(traffic)
        if context.items is not None:
            add_retrieval_routes(traffic, context.items.retriever)
        add_inference_routes(self, traffic)
        # Not `include_router`, which would look up each request's route again.
        self.router.routes[:0] = router.routes
        add_pages(self, context, self.types)
        context.metrics.registry.register(MetricsCollector(self._metrics, METRICS))

    def openapi(self) -> dict[str, Any]:
        """The OpenAPI document."""
        if not self.openapi_schema:
            self.openapi_schema = self.types.document(self)
        return self.openapi_schema

    def stop(self) -> None:
        """Stop waiting for incomplete bodies. Call from the event loop, before connections are closed."""
        self.body_reader.stop()

    def _check_key(self, scope: Scope) -> None:
        """Raises RequestError 401, 403 for a request without a key that opens its path."""
        if self.context.keys is None:
            return
        wanted = required_scope(scope["path"], _OPEN_FILES)
        if wanted is not None and not (scope["path"] == "/" and wants_page(scope)):
            given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
            self.context.keys.check(given, wanted)

    def _middleware(self) -> list[Middleware]:
        """From the outside in. A refused request goes no further, and its body is not read."""
        context, metrics, ranking = self.context, self.context.metrics, self.ranking
        gates = {
            **dict.fromkeys(("rank", "infer", "explain"), ranking.gate),
            **dict.fromkeys(("retrieve", "recommend"), ranking.retrieval_lane.gate),
            "engagements": ranking.engagement_lane.gate,
        }

        def gate_of(path: str) -> tuple[str, AdmissionGate | None] | None:
            route = traffic_route(path)
            return None if route is None else (route, gates.get(route))

        return [
            Middleware(CallMiddleware, open_tracing(context.config.tracing, _ROUTES)),
            Middleware(
                AccessMiddleware, self._check_key, lambda status: metrics.answered("access", status, 0.0)
            ),
            Middleware(AdmissionMiddleware, context.config.deadline_ms, gate_of, metrics),
        ]

    def _metrics(self) -> dict[str, Any]:
        keys = self.context.keys
        return {
            "roostream_serving_in_flight": self.gate.in_flight,
            "roostream_serving_connections": len(self.connections),
            "roostream_serving_reading_bytes": self.body_reader.num_bytes,
            "roostream_serving_service_time_seconds": self.gate.service_s,
            "roostream_serving_keys": None if keys is None else len(keys.keys),
            "roostream_serving_keys_file_refused": None if keys is None else bool(keys.refused),
        }


@functools.cache
def _version() -> str:
    try:
        return importlib.metadata.version("roostream")
    except importlib.metadata.PackageNotFoundError:
        return "0"
