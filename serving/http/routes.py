"""The two routes that carry traffic, straight on ASGI: no validation framework between the socket and the model."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from starlette.types import Receive, Scope, Send

from roostream.errors import WireError
from roostream.runtime.program import CURRENT_CALL
from serving.answer import RankAnswer
from serving.build import Parts
from serving.errors import RequestError
from serving.feature_log.format import LogRecord
from serving.feature_log.log import LogFullError
from serving.http.admission import RETRY_AFTER_S, Gate
from serving.http.binary import parse_impression
from serving.http.body import (
    JSON,
    PROTOBUF,
    ClientGoneError,
    Intake,
    accepts_protobuf,
    encoded,
    media_of,
    respond,
    stopping,
)
from serving.http.engage import EngagementParser
from serving.http.parse import JsonParser
from serving.http.query import RankOptions, deadline_ms_of, options_of
from serving.http.scoring_queue import ScoringQueue
from serving.http.seldom import Seldom, kind_of
from serving.http.version_header import take_version
from serving.rank import Ranked
from serving.request import RankRequest

log = logging.getLogger("roostream.serving")


class _Endpoint:
    """Errors, metrics and the answer, the same for both routes."""

    route = ""

    def __init__(self, parts: Parts, intake: Intake, seldom: Seldom) -> None:
        self.parts, self.intake, self.seldom = parts, intake, seldom

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, answered whatever happens in it; only to a client that hung up nothing is said."""
        begin_s = time.perf_counter()
        headers: dict[str, str] = {}
        answer: object
        begun_s = asyncio.get_running_loop().time()
        try:
            until_s = begun_s + deadline_ms_of(scope, self.parts.config.deadline_ms) / 1000
            status, answer = 200, await self.answer(scope, receive, until_s)
        except ClientGoneError:
            return
        except (Exception, asyncio.CancelledError) as error:
            status, answer, headers = self.told(error)
        body, media, own = self.form(scope, answer)
        self.parts.metrics.answered(self.route, status, time.perf_counter() - begin_s)
        await respond(send, status, body, media, headers | own)

    def told(self, error: BaseException) -> tuple[int, object, dict[str, str]]:
        """(status, what it says, headers) of an answer that isn't 200. Raises what nobody is to be told."""
        if isinstance(error, RequestError | asyncio.CancelledError):
            refusal = self._refusal(error)
        else:
            self._complain(error)
            refusal = RequestError(500, "this request could not be answered; the cause is in serving's log")
        return refusal.status, self.fault(refusal), refusal.headers()

    def fault(self, error: RequestError) -> object:
        """What an answer that isn't 200 says."""
        return error.body()

    def form(self, scope: Scope, answer: object) -> tuple[bytes, str, dict[str, str]]:
        """(body, media type, headers of its own)."""
        return *encoded(answer, accepts_protobuf(scope)), {}

    async def answer(self, scope: Scope, receive: Receive, until_s: float) -> object:
        """What a 200 says; `form` gives it its bytes. `until_s`: its deadline. Raises RequestError, ClientGoneError."""
        raise NotImplementedError

    def append(self, records: list[LogRecord]) -> None:
        """From the loop's thread: after it the answer goes out, whatever becomes of the deadline."""
        try:
            for record in records:
                self.parts.log.append(record)
        except LogFullError as error:
            raise RequestError(503, str(error), retry_after_s=RETRY_AFTER_S) from None
        except WireError as error:
            raise RequestError(413, str(error)) from None

    def _refusal(self, error: RequestError | asyncio.CancelledError) -> RequestError:
        """At a stop the server cancels what has not ended in time."""
        if isinstance(error, RequestError):
            return error
        if not self.intake.is_stopping:
            raise error
        return stopping()

    def _complain(self, error: BaseException) -> None:
        left_out = self.seldom.due(kind_of(error))
        if left_out is not None:
            more = f" ({left_out} more since the last that was told)" if left_out else ""
            log.error(
                "a %s request failed: this is a defect of Roostream%s", self.route, more, exc_info=error
            )


class RankEndpoint(_Endpoint):
    """`POST /v1/rank`: body → parse → a place at the gate → the queue's turn → log → answer."""

    route = "rank"

    def __init__(self, parts: Parts, intake: Intake, seldom: Seldom) -> None:
        super().__init__(parts, intake, seldom)
        self.gate = Gate(parts.config.max_in_flight)
        self.json = JsonParser(parts.schema)
        most = (parts.config.pass_requests, parts.config.pass_candidates)
        service, waited = parts.service, parts.metrics.stages.queue.observe
        self.queue = ScoringQueue(parts.executor, service.rank_all, self.gate, most, waited, service.may_wait)

    async def answer(self, scope: Scope, receive: Receive, until_s: float) -> object:
        """Once the log has its impression.

        Raises:
            RequestError: 400, 404, 408, 413, 415, 429, 500; 503: the log is full; 504: the deadline passed. Nothing is logged
                then.
            ClientGoneError: nothing is logged.
        """
        self.gate.check(self.left_s(until_s))  # before a body is read and parsed for nothing
        options = options_of(scope["query_string"])
        media = media_of(scope, (JSON, PROTOBUF))
        body = await self.intake.read(scope, receive, until_s)
        request = self.request_of(scope, body, media, options)
        return await self.ranked(request, len(body), until_s)

    def request_of(self, scope: Scope, body: bytes, media: str, options: RankOptions) -> RankRequest:
        """Raises RequestError 400, 413."""
        begin_s = time.perf_counter()
        request = self._parse(body, media, options)
        self.parts.metrics.stages.parse.observe(time.perf_counter() - begin_s)
        take_version(scope, request)
        return request

    async def ranked(self, request: RankRequest, num_bytes: int, until_s: float) -> RankAnswer:
        """The way of every rank from here on, however it was spelt. Raises RequestError 404, 413, 429, 500, 503, 504."""
        self.prepare(request, num_bytes)
        with self.gate.admit(self.left_s(until_s)):
            return await self._scored(request, until_s)

    def prepare(self, request: RankRequest, num_bytes: int) -> None:
        """Before it is let in. Raises RequestError 503 for what could not be logged once it is scored."""
        if not self.parts.log.has_room(num_bytes):
            message = "the feature log is full: Kafka has not taken its records; try again"
            raise RequestError(503, message, retry_after_s=RETRY_AFTER_S)
        names = CURRENT_CALL.get()
        request.traceparent = names.traceparent if names else ""

    def logged(self, ranked: Ranked) -> RankAnswer:
        """What may be answered now. Raises RequestError 413, 503."""
        begin_s, answer = time.perf_counter(), ranked.answer
        self.append([ranked.record])
        self.parts.metrics.stages.log.observe(time.perf_counter() - begin_s)
        self.parts.metrics.candidates.inc(len(answer.order))
        if answer.degraded:
            self.parts.metrics.degraded.inc()
        return answer

    async def _scored(self, request: RankRequest, until_s: float) -> RankAnswer:
        """Stamped only now: a body that comes slowly holds no heartbeat back."""
        stamp_ms = self.parts.stamps.open()
        try:
            async with asyncio.timeout_at(until_s):
                ranked = await self.queue.score(request, stamp_ms)
            return self.logged(ranked)
        except TimeoutError:
            raise too_late() from None
        finally:
            self.parts.stamps.close(stamp_ms)

    def _parse(self, body: bytes, media: str, options: RankOptions) -> RankRequest:
        if media == PROTOBUF:
            request = parse_impression(self.parts.schema, body)
        else:
            request = self.json.parse(body)
        request.append |= options.append
        request.wants_ranked, request.top = options.ranked, options.top
        return request

    def left_s(self, until_s: float) -> float:
        return until_s - asyncio.get_running_loop().time()


def too_late() -> RequestError:
    return RequestError(
        504, "not scored within its deadline; nothing was logged", retry_after_s=RETRY_AFTER_S
    )


class EngagementsEndpoint(_Endpoint):
    """`POST /v1/engagements`: answered once the log has them."""

    route = "engagements"

    def __init__(self, parts: Parts, intake: Intake, seldom: Seldom) -> None:
        super().__init__(parts, intake, seldom)
        self.json = EngagementParser(parts.schema, strict=parts.config.strict_actions)

    async def answer(self, scope: Scope, receive: Receive, until_s: float) -> dict[str, Any]:
        """Raises RequestError 400, 408, 413, 415, 429: nothing is logged; 503: what came before the log was full is."""
        media_of(scope, (JSON,))
        body = await self.intake.read(scope, receive, until_s)
        stamp_ms = self.parts.stamps.open()
        try:
            told = self.json.parse(body, stamp_ms)
            self.append(told.records)
            self.parts.service.credits.take(told.records)
        finally:
            self.parts.stamps.close(stamp_ms)
        metrics, unused = self.parts.metrics, self.json.unused(told.actions)
        metrics.engagements.inc(len(told.records))
        for action in unused:
            metrics.unused_action(action, told.actions.count(action))
        return {
            "accepted": len(told.records),
            "event_ids": [str(e) for e in told.event_ids],
            "unused_actions": unused,
        }
