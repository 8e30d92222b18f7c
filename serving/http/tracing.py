"""Call ids (`X-Request-Id`), W3C trace context, and OpenTelemetry spans.

A call is one HTTP exchange; its id is for logs. The `request_id` in a rank's body is something else: it
identifies the request that engagements are joined with, across retries and pages.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from starlette.types import Scope

from roostream.errors import SetupError
from roostream.runtime.program import CURRENT_CALL, CallContext

HEADER = b"x-request-id"
CALL_ID_PATTERN = "^[A-Za-z0-9][A-Za-z0-9._:/+=@-]{0,127}$"
TRACEPARENT_PATTERN = "^[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-[ -~]*)?$"

_HELPS = {
    "X-Request-Id": (
        "name of this call in logs; made here when missing, and in every answer",
        CALL_ID_PATTERN,
    ),
    "traceparent": ("W3C Trace Context: logs name the trace, spans continue it", TRACEPARENT_PATTERN),
}
DOCUMENTED: list[dict[str, Any]] = [
    {
        "name": name,
        "in": "header",
        "description": text,
        "required": False,
        "schema": {"type": "string", "pattern": pattern},
    }
    for name, (text, pattern) in _HELPS.items()
]

_CALL_ID = re.compile(CALL_ID_PATTERN.rstrip("$").encode())
_TRACE = re.compile(rb"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-[0-9a-f]{2}(-.*)?")
_OWN, _NUMBERS = os.urandom(8).hex(), itertools.count(1)


def parse_call_names(headers: Iterable[tuple[bytes, bytes]]) -> CallContext:
    """Read call id and trace context from headers with lower-case names. Invalid values are ignored."""
    call_id = trace = b""
    for name, value in headers:
        if name == HEADER:
            call_id = call_id or value
        elif name == b"traceparent":
            trace = value
    known = call_id.decode() if call_id and _CALL_ID.fullmatch(call_id) else f"{_OWN}-{next(_NUMBERS):x}"
    return _traced(known, trace) if trace else CallContext(known)


def _traced(call_id: str, trace: bytes) -> CallContext:
    """Version 00 has exactly four parts; later versions may have more."""
    found = _TRACE.fullmatch(trace)
    if found is None or (found[3] and trace.startswith(b"00")):
        return CallContext(call_id)
    return CallContext(call_id, found[1].decode(), found[2].decode())


SpanFactory = Callable[[Scope], AbstractContextManager[Callable[[int], None]]]
"""Context manager around a call; it yields a function that takes the status of the answer."""


def no_span(scope: Scope) -> AbstractContextManager[Callable[[int], None]]:
    """Trace nothing."""
    return nullcontext(lambda status: None)


def open_tracing(is_wanted: bool, paths: frozenset[str]) -> SpanFactory:
    """Return `no_span` if tracing is off; then OpenTelemetry is not imported. Only `paths` may become span
    names. Spans go nowhere without OpenTelemetry's SDK, and where its `OTEL_…` variables say with it.

    Raises:
        SetupError: OpenTelemetry is not installed.
    """
    if not is_wanted:
        return no_span
    try:
        from opentelemetry import propagate, trace
    except ImportError:
        raise SetupError(
            "tracing needs opentelemetry-api: pip install 'roostream[opentelemetry]', or set tracing = false"
        ) from None
    tracer = trace.get_tracer("roostream.serving")

    @contextmanager
    def span_factory(scope: Scope) -> Iterator[Callable[[int], None]]:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        path, method = scope["path"] if scope["path"] in paths else "", scope["method"]
        attributes: dict[str, Any] = {"http.request.method": method, "url.path": path}
        name = f"{method} {path}" if path else method
        with tracer.start_as_current_span(
            name, propagate.extract(headers), kind=trace.SpanKind.SERVER, attributes=attributes
        ) as span:
            _carry(span.get_span_context())

            def answered(status: int) -> None:
                span.set_attribute("http.response.status_code", status)
                if status >= 500:
                    span.set_status(trace.StatusCode.ERROR)

            yield answered

    return span_factory


def _carry(context: Any) -> None:
    """Store the span in the current call context; the caller resets it."""
    names = CURRENT_CALL.get()
    if names is not None and context.is_valid and context.trace_flags.sampled:
        traceparent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"
        CURRENT_CALL.set(dataclasses.replace(names, traceparent=traceparent))
