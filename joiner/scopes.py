"""Which request is the next one: the times of a session's or a user's requests, in order.

A request that came behind the watermark stands in no scope and so ends nobody's window: engagements that are already here would
fall out of it. Closed ones stand in theirs until they are forgotten.
"""

from __future__ import annotations

import bisect
import struct

from joiner.state import NEVER, JoinState, Request, Scope

_time = struct.Struct("=q")


def next_after(state: JoinState, scope_id: int, time_ms: int) -> int:
    """The smallest time of a request of the scope that is greater than `time_ms`; NEVER if there is none."""
    scope = state.scopes.get(scope_id)
    return NEVER if scope is None else _next(scope, time_ms)


def enter(state: JoinState, scope_id: int, request_id: str, request: Request) -> list[str]:
    """An open request stands at its time. Returns the open requests whose next one this may be."""
    scope = state.scopes.get(scope_id) or Scope()
    at = _place(scope, request.time_ms)
    scope.times[8 * at : 8 * at] = _time.pack(request.time_ms)
    bisect.insort(scope.open, (request.time_ms, request_id))
    request.scope = scope_id
    state.scopes[scope_id] = scope
    return _before(scope, request.time_ms)


def close(state: JoinState, request_id: str, request: Request) -> None:
    """A request of a scope is no longer open."""
    scope = state.scopes.get(request.scope or 0) if request.scope is not None else None
    if scope is not None:
        scope.open.remove((request.time_ms, request_id))
        state.scopes[request.scope or 0] = scope


def leave(state: JoinState, request_id: str, request: Request) -> list[str]:
    """A request is gone from its scope, if it stands in one. Returns the open requests whose next one it may have been."""
    scope_id, request.scope = request.scope, None
    scope = None if scope_id is None else state.scopes.get(scope_id)
    if scope is None or scope_id is None:
        return []
    at = _place(scope, request.time_ms)
    del scope.times[8 * at : 8 * at + 8]
    if (request.time_ms, request_id) in scope.open:
        scope.open.remove((request.time_ms, request_id))
    if scope.times:
        state.scopes[scope_id] = scope
    else:
        del state.scopes[scope_id]
    return _before(scope, request.time_ms)


def _before(scope: Scope, time_ms: int) -> list[str]:
    """The open requests with the greatest time below `time_ms`: those of smaller times have one in between."""
    at = bisect.bisect_left(scope.open, (time_ms, ""))
    nearest_ms = scope.open[at - 1][0] if at else None
    found = []
    while at and scope.open[at - 1][0] == nearest_ms:
        at -= 1
        found.append(scope.open[at][1])
    return found


def _next(scope: Scope, time_ms: int) -> int:
    with memoryview(scope.times).cast("q") as times:
        at = bisect.bisect_right(times, time_ms)
        return times[at] if at < len(times) else NEVER


def _place(scope: Scope, time_ms: int) -> int:
    """Of the first time that is not smaller."""
    with memoryview(scope.times).cast("q") as times:
        return bisect.bisect_left(times, time_ms)
