"""The fast path of `/v1/rank`, for requests that arrive complete in one piece while keys and tracing are off.

While nothing can be admitted, a complete request is refused before it is parsed: a refusal by the usual path
costs a good part of an answer, and at three times the capacity refusals took a third of the CPU time
(docs/decisions/0035-admission-control.md). Otherwise it is parsed, scored and answered without uvicorn's
request cycle and without a task. Everything else takes the usual path. Both share admission, deadline, queue,
log, metrics and errors.
"""

from __future__ import annotations

import asyncio
import functools
import time
from typing import Protocol

import msgspec
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from roostream.runtime.program import CURRENT_CALL
from serving.http.admission import overload_error
from serving.http.body import JSON, PROTOBUF, request_media_type
from serving.http.routes import RankEndpoint, deadline_error, parse_deadline_ms, parse_rank_options
from serving.http.tracing import HEADER, parse_call_names
from serving.rank import RankResult

_END = b"\r\n\r\n"
_ODD = (b"\ntransfer-encoding", b"\nexpect", b"\nupgrade", b"\n ", b"\n\t")
_MAX_KEPT = 1024  # cached answers and headers
_MAX_HEAD = 1024  # longer headers are not cached
_LENGTH = b"\ncontent-length: "


def is_whole_post(data: bytes, path: bytes) -> bool:
    """Whether `data` is exactly one complete HTTP/1.1 request with one length, on a connection that stays
    open."""
    end = data.find(_END)
    if end < 0:
        return False
    length_of = _kept_length if end <= _MAX_HEAD else _length
    length = length_of(data[:end], path)
    return length is not None and end + len(_END) + length == len(data)


def _length(head: bytes, path: bytes) -> int | None:
    """The length of the body, from the headers; None if only a parser can tell."""
    line = b"POST " + path
    if not head.startswith(line) or head[len(line) : len(line) + 1] not in (b" ", b"?"):
        return None
    head = (head + b"\r\n").lower()
    first, _, headers = head.partition(b"\r\n")
    if not first.endswith(b" http/1.1") or any(word in head for word in _ODD):
        return None
    at = headers.find(_LENGTH[1:]) if headers.startswith(_LENGTH[1:]) else headers.find(_LENGTH) + 1
    if head.count(b"content-length") != 1 or head.count(b"\nconnection:") != head.count(
        b"\nconnection: keep-alive\r\n"
    ):
        return None
    length = headers[at + len(_LENGTH) - 1 : headers.find(b"\r", at)]
    return int(length) if length.isdigit() and len(length) < 12 else None


_kept_length = functools.lru_cache(_MAX_KEPT)(_length)
"""The headers of a client differ in little but the length."""


@functools.lru_cache(_MAX_KEPT)
def overload_answer(why: str) -> bytes:
    """The 429 answer; the connection stays open."""
    error = overload_error(why)
    body = msgspec.json.encode(error.body())
    headers = {"content-type": JSON, "content-length": str(len(body)), **error.headers()}
    return (
        STATUS_LINE[error.status]
        + b"".join(f"{n}: {v}\r\n".encode() for n, v in headers.items())
        + b"\r\n"
        + body
    )


PATH = b"/v1/rank"


class AskingConnection(Protocol):
    """The connection of a request."""

    def answer_whole(self, status: int, body: bytes, headers: list[tuple[bytes, bytes]]) -> None:
        """Send the answer if the client is still connected."""


class WholeRanks:
    """Used by one event loop."""

    def __init__(self, endpoint: RankEndpoint) -> None:
        self.endpoint = endpoint

    @property
    def is_open(self) -> bool:
        """Whether the fast path pays off: passes are short."""
        return self.endpoint.queue.is_fast

    def take(self, scope: Scope, body: bytes, asking: AskingConnection) -> None:
        """Answer `asking` now or later, whatever happens. `scope` has headers and query_string."""
        _WholeRank(self.endpoint, scope, asking).begin(body)


class _WholeRank:
    """One request; receives its result from the scoring queue."""

    __slots__ = ("_asking", "_begin_s", "_endpoint", "_is_done", "_names", "_scope", "_stamp_ms", "_timer")

    def __init__(self, endpoint: RankEndpoint, scope: Scope, asking: AskingConnection) -> None:
        self._begin_s = time.perf_counter()
        self._endpoint, self._scope, self._asking = endpoint, scope, asking
        self._names = parse_call_names(scope["headers"])
        self._is_done = False
        self._stamp_ms: int | None = None  # taken when admitted
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, body: bytes) -> None:
        """Queue the request, or answer with its error."""
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
        until_s = loop.time() + parse_deadline_ms(scope, endpoint.context.config.deadline_ms) / 1000
        endpoint.gate.check(endpoint.remaining_s(until_s))
        options, media = (
            parse_rank_options(scope["query_string"]),
            request_media_type(scope, (JSON, PROTOBUF)),
        )
        body = endpoint.body_reader.take(scope, body)
        request = endpoint.parse_request(scope, body, media, options)
        endpoint.check_log_space(request, len(body))
        endpoint.gate.enter(endpoint.remaining_s(until_s))
        self._stamp_ms = endpoint.context.watermark.open()
        self._timer = loop.call_at(until_s, self._late)
        endpoint.queue.submit(request, self._stamp_ms, self)

    def done(self) -> bool:
        return self._is_done

    def set_result(self, ranked: RankResult) -> None:
        """Log, then answer."""
        token = CURRENT_CALL.set(self._names)
        try:
            answer = self._endpoint.log_impression(ranked)
            self._leave()
            body, media, headers = self._endpoint.encode(self._scope, answer)
        except Exception as error:
            self.set_exception(error)
        else:
            self._tell(200, body, media, headers)
        finally:
            CURRENT_CALL.reset(token)

    def set_exception(self, error: Exception) -> None:
        status, fault, headers = self._endpoint.error_response(error)
        self._leave()
        body, media, own = self._endpoint.encode(self._scope, fault)
        self._tell(status, body, media, headers | own)

    def _late(self) -> None:
        if not self._is_done:
            self.set_exception(deadline_error())

    def _leave(self) -> None:
        """Leave the admission gate; the log record has the timestamp."""
        if self._timer is not None:
            self._timer.cancel()
        if self._stamp_ms is not None:
            self._endpoint.context.watermark.close(self._stamp_ms)
            self._endpoint.gate.leave()
            self._stamp_ms = None

    def _tell(self, status: int, body: bytes, media: str, headers: dict[str, str]) -> None:
        self._is_done = True
        own = [(name.encode(), value.encode()) for name, value in headers.items()]
        named = [(b"content-type", media.encode()), *own, (HEADER, self._names.call_id.encode())]
        self._endpoint.context.metrics.answered(
            self._endpoint.route, status, time.perf_counter() - self._begin_s
        )
        self._asking.answer_whole(status, body, named)
