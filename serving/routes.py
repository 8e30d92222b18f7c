"""The two routes that carry traffic, straight on ASGI: no validation framework between the socket and the model."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import Any

from starlette.types import Receive, Scope, Send

from roo.errors import WireError
from serving.answer import RankAnswer
from serving.binary import parse_impression
from serving.body import JSON, PROTOBUF, ClientGoneError, accepts_protobuf, encoded, read_body, respond
from serving.build import Parts
from serving.engage import parse_engagements
from serving.errors import RequestError
from serving.feature_log.format import LogRecord
from serving.feature_log.log import LogFullError
from serving.parse import JsonParser
from serving.rank import Ranked
from serving.request import RankRequest

log = logging.getLogger("roostream.serving")

RETRY_AFTER_S = 1


class Gate:
    """What is beyond capacity is refused at once, so that what is admitted keeps its deadline (G7). Used by one event loop."""

    def __init__(self, max_in_flight: int) -> None:
        self.max_in_flight, self.in_flight = max_in_flight, 0

    @contextmanager
    def admit(self) -> Iterator[None]:
        """Raises RequestError 429 with Retry-After."""
        if self.in_flight >= self.max_in_flight:
            raise RequestError(429, f"{self.in_flight} requests are in work, the most that this process takes; try again", "", 1)
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1


class _Endpoint:
    """Admission, errors, metrics and the answer, the same for both routes."""

    route = ""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.gate = Gate(parts.config.max_in_flight)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, answered whatever happens in it; only to a client that hung up nothing is said."""
        begin_s = time.perf_counter()
        headers: dict[str, str] = {}
        answer: object
        try:
            with self.gate.admit():
                status, answer = 200, await self.answer(scope, receive)
        except ClientGoneError:
            return
        except RequestError as error:
            status, answer, headers = error.status, error.body(), error.headers()
        except Exception:
            log.exception("a %s request failed: this is a defect of Roostream", self.route)
            defect = RequestError(500, "this request could not be answered; the cause is in serving's log")
            status, answer = 500, defect.body()
        body, media = encoded(answer, accepts_protobuf(scope))
        self.parts.metrics.answered(self.route, status, time.perf_counter() - begin_s)
        await respond(send, status, body, media, headers)

    async def answer(self, scope: Scope, receive: Receive) -> object:
        """What a 200 says; `body.encoded` gives it its form. Raises RequestError, ClientGoneError."""
        raise NotImplementedError

    def append(self, records: list[LogRecord]) -> None:
        """From the loop's thread: after it the answer goes out, whatever becomes of the deadline."""
        try:
            for record in records:
                self.parts.log.append(record)
        except LogFullError as error:
            raise RequestError(503, str(error), "", RETRY_AFTER_S) from None
        except WireError as error:
            raise RequestError(413, str(error)) from None


class RankEndpoint(_Endpoint):
    """`POST /v1/rank`: parse → score in the scoring thread → log → answer."""

    route = "rank"

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self.json = JsonParser(parts.schema)

    async def answer(self, scope: Scope, receive: Receive) -> RankAnswer:
        """Once the log has its impression.

        Raises:
            RequestError: 400, 404, 413, 415, 500; 503: the log is full; 504: the deadline passed. Nothing is logged then.
            ClientGoneError: nothing is logged.
        """
        config, stamps = self.parts.config, self.parts.stamps
        stamp_ms = stamps.open()
        try:
            async with asyncio.timeout(config.deadline_ms / 1000):
                body, media = await read_body(scope, receive, config.max_body_bytes)
                request = self._parse(body, media, scope)
                self._check_room(len(body))
                ranked = await self._score(request, stamp_ms)
            self.append([ranked.record])
        except TimeoutError:
            raise RequestError(504, f"not scored within {config.deadline_ms} ms; nothing was logged", "", RETRY_AFTER_S) from None
        finally:
            stamps.close(stamp_ms)
        self.parts.metrics.candidates.inc(len(request.item_ids))
        if ranked.answer.degraded:
            self.parts.metrics.degraded.inc()
        return ranked.answer

    def _parse(self, body: bytes, media: str, scope: Scope) -> RankRequest:
        if media == JSON:
            return self.json.parse(body)
        if media == PROTOBUF:
            return parse_impression(self.parts.schema, body, append=scope["query_string"] == b"append=true")
        raise RequestError(415, f"expected content-type {JSON} or {PROTOBUF}, got {media!r}")

    def _check_room(self, num_bytes: int) -> None:
        """Refuse before scoring what could not be logged after it."""
        if not self.parts.log.has_room(num_bytes):
            raise RequestError(503, "the feature log is full: Kafka has not taken its records; try again", "", RETRY_AFTER_S)

    def _score(self, request: RankRequest, stamp_ms: int) -> Awaitable[Ranked]:
        """Cancelling it (the deadline) takes it out of the queue if it hasn't begun."""
        loop = asyncio.get_running_loop()
        return loop.run_in_executor(self.parts.executor, self.parts.service.rank, request, stamp_ms)


class EngagementsEndpoint(_Endpoint):
    """`POST /v1/engagements`: answered once the log has them."""

    route = "engagements"

    async def answer(self, scope: Scope, receive: Receive) -> dict[str, Any]:
        """Raises RequestError 400, 413, 415: nothing is logged; 503: of a list, what came before the log was full is."""
        body, media = await read_body(scope, receive, self.parts.config.max_body_bytes)
        if media != JSON:
            raise RequestError(415, f"expected content-type {JSON}, got {media!r}")
        stamp_ms = self.parts.stamps.open()
        try:
            records, event_ids = parse_engagements(self.parts.schema, body, stamp_ms)
            self.append(records)
        finally:
            self.parts.stamps.close(stamp_ms)
        self.parts.metrics.engagements.inc(len(records))
        return {"accepted": len(records), "event_ids": event_ids}
