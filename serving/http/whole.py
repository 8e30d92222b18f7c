"""A rank request that came whole, answered without a task: parsed as its bytes are read, scored with what came beside it, and
answered in one write.

The usual way (uvicorn's cycle, a task and its time-outs, an ASGI application's messages) is for what comes in pieces, and for all
other routes. Both share everything between the body and the answer: admission, deadline, queue, log, metrics, refusals.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

from starlette.types import Scope

from roostream.runtime.program import CURRENT_CALL
from serving.http.body import JSON, PROTOBUF, media_of
from serving.http.call_names import HEADER, names_of
from serving.http.query import deadline_ms_of, options_of
from serving.http.routes import RankEndpoint, too_late
from serving.rank import Ranked

PATH = b"/v1/rank"


class AskingConnection(Protocol):
    """The connection that a request came on."""

    def answer_whole(self, status: int, body: bytes, headers: list[tuple[bytes, bytes]]) -> None:
        """Write it, if anybody still listens."""


class WholeRanks:
    """Used by one event loop."""

    def __init__(self, endpoint: RankEndpoint) -> None:
        self.endpoint = endpoint

    @property
    def is_open(self) -> bool:
        """Else the next one takes the usual way, whose costs don't show beside its own."""
        return self.endpoint.queue.is_quick

    def take(self, scope: Scope, body: bytes, asking: AskingConnection) -> None:
        """`asking` is answered now or later, whatever happens. `scope` has headers and query_string."""
        _WholeRank(self.endpoint, scope, asking).begin(body)


class _WholeRank:
    """One of them; the queue's `ScoreTaker`."""

    __slots__ = ("_asking", "_begin_s", "_endpoint", "_is_done", "_names", "_scope", "_stamp_ms", "_timer")

    def __init__(self, endpoint: RankEndpoint, scope: Scope, asking: AskingConnection) -> None:
        self._begin_s = time.perf_counter()
        self._endpoint, self._scope, self._asking = endpoint, scope, asking
        self._names = names_of(scope["headers"])
        self._is_done = False
        self._stamp_ms: int | None = None  # of its place at the gate
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, body: bytes) -> None:
        """Into the queue, or answered with what is wrong with it."""
        token = CURRENT_CALL.set(self._names)
        try:
            self._put(body)
        except Exception as error:
            self.set_exception(error)
        finally:
            CURRENT_CALL.reset(token)

    def _put(self, body: bytes) -> None:
        """Raises RequestError 400, 413, 415, 429, 503."""
        endpoint, scope, loop = self._endpoint, self._scope, asyncio.get_running_loop()
        until_s = loop.time() + deadline_ms_of(scope, endpoint.parts.config.deadline_ms) / 1000
        endpoint.gate.check(endpoint.left_s(until_s))
        options, media = options_of(scope["query_string"]), media_of(scope, (JSON, PROTOBUF))
        body = endpoint.intake.take(scope, body)
        request = endpoint.request_of(scope, body, media, options)
        endpoint.prepare(request, len(body))
        endpoint.gate.enter(endpoint.left_s(until_s))
        self._stamp_ms = endpoint.parts.stamps.open()
        self._timer = loop.call_at(until_s, self._late)
        endpoint.queue.put(request, self._stamp_ms, self)

    def done(self) -> bool:
        return self._is_done

    def set_result(self, ranked: Ranked) -> None:
        """Logged, then answered."""
        token = CURRENT_CALL.set(self._names)
        try:
            answer = self._endpoint.logged(ranked)
            self._leave()
            body, media, headers = self._endpoint.form(self._scope, answer)
        except Exception as error:
            self.set_exception(error)
        else:
            self._tell(200, body, media, headers)
        finally:
            CURRENT_CALL.reset(token)

    def set_exception(self, error: Exception) -> None:
        status, fault, headers = self._endpoint.told(error)
        self._leave()
        body, media, own = self._endpoint.form(self._scope, fault)
        self._tell(status, body, media, headers | own)

    def _late(self) -> None:
        if not self._is_done:
            self.set_exception(too_late())

    def _leave(self) -> None:
        """Its place at the gate; what it logged carries its stamp."""
        if self._timer is not None:
            self._timer.cancel()
        if self._stamp_ms is not None:
            self._endpoint.parts.stamps.close(self._stamp_ms)
            self._endpoint.gate.leave()
            self._stamp_ms = None

    def _tell(self, status: int, body: bytes, media: str, headers: dict[str, str]) -> None:
        self._is_done = True
        own = [(name.encode(), value.encode()) for name, value in headers.items()]
        named = [(b"content-type", media.encode()), *own, (HEADER, self._names.call_id.encode())]
        self._endpoint.parts.metrics.answered(
            self._endpoint.route, status, time.perf_counter() - self._begin_s
        )
        self._asking.answer_whole(status, body, named)
