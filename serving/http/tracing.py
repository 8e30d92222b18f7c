"""A span a call by OpenTelemetry's API, where the settings ask for it. Where spans go is OpenTelemetry's own matter: without its
SDK nowhere, with it as its `OTEL_…` variables say."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from starlette.types import Scope

from roostream.errors import SetupError
from roostream.runtime.program import CURRENT_CALL

Spanning = Callable[[Scope], AbstractContextManager[Callable[[int], None]]]
"""Around a call; what it gives is told the answer's status."""


def open_tracing(is_wanted: bool, paths: frozenset[str]) -> Spanning | None:
    """None where nobody wants spans: then nothing of OpenTelemetry is loaded. `paths` are those that may name a span.

    Raises:
        SetupError: the package isn't here.
    """
    if not is_wanted:
        return None
    try:
        from opentelemetry import propagate, trace
    except ImportError:
        raise SetupError(
            "tracing needs opentelemetry-api: pip install 'roostream[opentelemetry]', or set tracing = false"
        ) from None
    tracer = trace.get_tracer("roostream.serving")

    @contextmanager
    def spanning(scope: Scope) -> Iterator[Callable[[int], None]]:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        path, method = scope["path"] if scope["path"] in paths else "", scope["method"]
        asked: dict[str, Any] = {"http.request.method": method, "url.path": path}
        name = f"{method} {path}" if path else method
        with tracer.start_as_current_span(
            name, propagate.extract(headers), kind=trace.SpanKind.SERVER, attributes=asked
        ) as span:
            _carry(span.get_span_context())

            def answered(status: int) -> None:
                span.set_attribute("http.response.status_code", status)
                if status >= 500:
                    span.set_status(trace.StatusCode.ERROR)

            yield answered

    return spanning


def _carry(context: Any) -> None:
    """Into the call's names; whoever set them resets them."""
    names = CURRENT_CALL.get()
    if names is not None and context.is_valid and context.trace_flags.sampled:
        told = f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"
        CURRENT_CALL.set(dataclasses.replace(names, traceparent=told))
