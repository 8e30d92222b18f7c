"""ASGI middleware of serving, from the outside in: the names of a call, access, deadlines and overload.

Refused requests are answered before their bodies are read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from roostream.runtime.program import CURRENT_CALL
from serving.errors import RequestError, shown
from serving.http.admission import AdmissionGate
from serving.http.body import error_response
from serving.http.tracing import HEADER, SpanFactory, no_span, parse_call_names
from serving.metrics import ServingMetrics

DEADLINE = "x-deadline-ms"
UNTIL_S = "until_s"  # key of a request's deadline in the ASGI scope, a time of the event loop's clock
_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
_SAME_SITE = (b"same-origin", b"none")


class CallMiddleware:
    """Gives every call its id, which its answer and all log lines about it have, and its span."""

    def __init__(self, app: ASGIApp, spanning: SpanFactory = no_span) -> None:
        self.app, self.spanning = app, spanning

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        names = parse_call_names(scope["headers"])
        header = (HEADER, names.call_id.encode())
        token = CURRENT_CALL.set(names)
        try:
            with self.spanning(scope) as answered:

                def answer(message: Message) -> Awaitable[None]:
                    if message["type"] == "http.response.start":
                        message["headers"] = [*message["headers"], header]
                        answered(message["status"])
                    return send(message)

                await self.app(scope, receive, answer)
        finally:
            CURRENT_CALL.reset(token)


class AccessMiddleware:
    """Rejects unauthorized requests, and requests that a page of another site makes a browser send."""

    def __init__(self, app: ASGIApp, check: Callable[[Scope], None], count: Callable[[int], None]) -> None:
        """`check` raises RequestError for a request without a suitable key. `count` is called with the status
        of each rejection."""
        self.app, self.check, self.count = app, check, count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                if scope["method"] not in _SAFE_METHODS:
                    check_same_site(scope)
                self.check(scope)
                if scope["path"].endswith("\n"):  # Starlette's routes match it, scopes and gates do not
                    raise RequestError(404, f"nothing is at {shown(scope['path'])!r}")
            except RequestError as error:
                self.count(error.status)
                own = {"www-authenticate": "Bearer"} if error.status == 401 else {}
                await error_response(scope, error, **own)(scope, receive, send)
                return
        await self.app(scope, receive, send)


class AdmissionMiddleware:
    """Sets the deadline of each request, and refuses it while it could not be answered in time."""

    def __init__(
        self,
        app: ASGIApp,
        max_ms: int,
        gate_of: Callable[[str], tuple[str, AdmissionGate | None] | None],
        metrics: ServingMetrics,
    ) -> None:
        """`max_ms`: the deadline of a request that states none. `gate_of` returns, by path, the name of a
        traffic route and the gate that it has to pass, if it has one; None = no traffic."""
        self.app, self.max_ms, self.gate_of, self.metrics = app, max_ms, gate_of, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self.gate_of(scope["path"]) if scope["type"] == "http" else None
        if route is not None and scope["method"] == "POST":
            try:
                remaining_s = parse_deadline_ms(scope, self.max_ms) / 1000
                scope[UNTIL_S] = asyncio.get_running_loop().time() + remaining_s
                if route[1] is not None:
                    route[1].check(remaining_s)
            except RequestError as error:
                self.metrics.answered(route[0], error.status, 0.0)
                await error_response(scope, error)(scope, receive, send)
                return
        await self.app(scope, receive, send)


def check_same_site(scope: Scope) -> None:
    """Raises RequestError 403 for a request that a browser sends for a page of another origin.

    Browsers that do not send `Sec-Fetch-Site` send `Origin`, which has to name the host that the request is
    for. Other clients send neither.
    """
    site = origin = None
    host = b""
    for name, value in scope["headers"]:
        if name == b"sec-fetch-site":
            site = value
        elif name == b"origin":
            origin = value
        elif name == b"host":
            host = value.lower()
    if site is not None:
        is_ours = site in _SAME_SITE
    else:
        is_ours = origin is None or _host_of(origin) == host
    if not is_ours:
        got = shown((origin or site or b"").decode("latin-1"))
        raise RequestError(
            403, f"expected a request of this origin, got one of a page of {got!r}; use a gateway"
        )


def _host_of(origin: bytes) -> bytes:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return b""


def parse_deadline_ms(scope: Scope, max_ms: int) -> int:
    """Return the client's `x-deadline-ms`, at most `max_ms`. RequestError 400 if it is invalid."""
    stated = Headers(scope=scope).get(DEADLINE)
    if stated is None:
        return max_ms
    number = parse_positive(stated.strip())
    if not number:
        raise RequestError(400, f"expected {DEADLINE} as whole milliseconds from 1 on, got {shown(stated)!r}")
    return min(number, max_ms)


def parse_positive(text: str) -> int:
    """Return 0 if `text` is not a positive number."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 20 else 0
