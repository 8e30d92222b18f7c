"""FastAPI's exception handlers: all errors, also those of the framework, have one form."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route

from roostream.errors import nearest
from serving.errors import RequestError, shown
from serving.http.body import ClientGoneError, error_response


class NoResponse(Response):
    """For a client that is gone: nothing is sent."""

    async def __call__(self, *asgi: object) -> None:
        return


async def _request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return error_response(request.scope, error)


async def _client_gone(request: Request, error: Exception) -> Response:
    return NoResponse()


async def _http_error(request: Request, error: Exception) -> Response:
    """The framework's 404 and 405."""
    assert isinstance(error, HTTPException)
    path, method = shown(request.url.path), shown(request.method)
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    if error.status_code != 405:
        message = f"nothing is at {path!r}{nearest(path, [route.path for route in routes])}"
        return error_response(request.scope, RequestError(404, message))
    fitting = [r for r in routes if r.matches(dict(request.scope))[0] is not Match.NONE]
    allowed = sorted({name for route in fitting for name in route.methods or ()})
    refusal = RequestError(405, f"expected {' or '.join(allowed)}, got {method}")
    return error_response(request.scope, refusal, allow=", ".join(allowed))


async def _defect(request: Request, error: Exception) -> Response:
    refusal = RequestError(500, "this request could not be answered; the cause is in serving's log")
    return error_response(request.scope, refusal)


Handler = Callable[[Request, Any], Coroutine[Any, Any, Response]]
EXCEPTION_HANDLERS: dict[int | type[Exception], Handler] = {
    RequestError: _request_error,
    ClientGoneError: _client_gone,
    HTTPException: _http_error,
    Exception: _defect,
}
