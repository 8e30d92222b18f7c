"""Finds the next request of the same session or user: the request times of a scope, in order.

A request that opened behind the watermark is in no scope and closes no other request: engagements that have
already joined would otherwise fall out of that request's window. Closed requests stay in their scope until
they are forgotten.
"""

from __future__ import annotations

import bisect
import struct

from joiner.state import NEVER, JoinState, Request, RequestScope

_time = struct.Struct("=q")


def next_time(state: JoinState, scope_id: int, time_ms: int) -> int:
    """The smallest request time of the scope after `time_ms`; NEVER if there is none."""
    scope = state.scopes.get(scope_id)
    if scope is None:
        return NEVER
    with memoryview(scope.times).cast("q") as times:
        at = bisect.bisect_right(times, time_ms)
        return times[at] if at < len(times) else NEVER


def enter(state: JoinState, scope_id: int, request_id: str, request: Request) -> list[str]:
    """Add an open request. Returns the open requests whose next request this may be."""
    scope = state.scopes.get(scope_id) or RequestScope()
    at = _first_at_or_after(scope, request.time_ms)
    scope.times[8 * at : 8 * at] = _time.pack(request.time_ms)
    bisect.insort(scope.open, (request.time_ms, request_id))
    request.scope = scope_id
    state.scopes[scope_id] = scope
    return _open_before(scope, request.time_ms)


def close(state: JoinState, request_id: str, request: Request) -> None:
    """A request of a scope was closed."""
    if request.scope is None:
        return
    scope = state.scopes.get(request.scope)
    if scope is not None:
        scope.open.remove((request.time_ms, request_id))
        state.scopes[request.scope] = scope


def leave(state: JoinState, request_id: str, request: Request) -> list[str]:
    """Remove a request from its scope, if it is in one. Returns the open requests whose next request it may
    have been."""
    scope_id, request.scope = request.scope, None
    scope = None if scope_id is None else state.scopes.get(scope_id)
    if scope is None or scope_id is None:
        return []
    at = _first_at_or_after(scope, request.time_ms)
    del scope.times[8 * at : 8 * at + 8]
    if (request.time_ms, request_id) in scope.open:
        scope.open.remove((request.time_ms, request_id))
    if scope.times:
        state.scopes[scope_id] = scope
    else:
        del state.scopes[scope_id]
    return _open_before(scope, request.time_ms)


def _open_before(scope: RequestScope, time_ms: int) -> list[str]:
    """The open requests with the greatest time below `time_ms`; earlier ones have another request in
    between."""
    at = bisect.bisect_left(scope.open, (time_ms, ""))
    nearest_ms = scope.open[at - 1][0] if at else None
    found = []
    while at and scope.open[at - 1][0] == nearest_ms:
        at -= 1
        found.append(scope.open[at][1])
    return found


def _first_at_or_after(scope: RequestScope, time_ms: int) -> int:
    with memoryview(scope.times).cast("q") as times:
        return bisect.bisect_left(times, time_ms)
