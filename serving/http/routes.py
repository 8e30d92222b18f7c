"""The routes `/v1/rank` and `/v1/engagements`: parse, admit, score, log, answer; and what all endpoints
share."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

from starlette.types import Receive, Scope, Send

from roostream.errors import WireError, nearest
from roostream.runtime.program import CURRENT_CALL
from serving.answer import RankAnswer
from serving.context import ServingContext
from serving.errors import RequestError, shown
from serving.feature_log.format import LogRecord
from serving.feature_log.log import LogFullError
from serving.http.admission import RETRY_AFTER_S, AdmissionGate, WorkLane
from serving.http.body import (
    JSON,
    PROTOBUF,
    BodyReader,
    ClientGoneError,
    encode_body,
    request_media_type,
    send_answer,
    stopping_error,
    wants_protobuf,
)
from serving.http.engagements import SHARE, EngagementParser, ParsedEngagements
from serving.http.log_rate_limit import LogRateLimit, error_kind
from serving.http.scoring_queue import ScoringQueue
from serving.rank import RankResult
from serving.rank_json import RANK_QUERY, JsonParser
from serving.rank_protobuf import parse_impression
from serving.request import RankRequest

DEADLINE = "x-deadline-ms"


class RankOptions(NamedTuple):
    append: bool = False
    ranked: bool = False
    top: int = 0  # 0 = all candidates, as scores and order


def parse_rank_options(query: bytes) -> RankOptions:
    """Parse `?append=true&ranked=true&top=10`. RequestError 400 for an unknown name or invalid value."""
    out: dict[str, Any] = {}
    for name, value in parse_qsl(query.decode("latin-1"), keep_blank_values=True) if query else ():
        if name not in RANK_QUERY:
            raise RequestError(
                400, f"unknown parameter {shown(name)!r}{nearest(shown(name), RANK_QUERY)}", f"?{shown(name)}"
            )
        out[name] = _top(value) if name == "top" else _flag(name, value)
    return RankOptions(**out)


def _flag(name: str, value: str) -> bool:
    if value not in ("true", "false"):
        raise RequestError(400, f"expected true or false, got {shown(value)!r}", f"?{name}")
    return value == "true"


def _top(value: str) -> int:
    number = _positive(value)
    if not number:
        raise RequestError(400, f"expected a number of slots from 1 on, got {shown(value)!r}", "?top")
    return number


def parse_deadline_ms(scope: Scope, max_ms: int) -> int:
    """Return the client's `x-deadline-ms`, at most `max_ms`. RequestError 400 if it is invalid."""
    stated = next(
        (value.decode("latin-1") for name, value in scope["headers"] if name == DEADLINE.encode()), None
    )
    if stated is None:
        return max_ms
    number = _positive(stated.strip())
    if not number:
        raise RequestError(400, f"expected {DEADLINE} as whole milliseconds from 1 on, got {shown(stated)!r}")
    return min(number, max_ms)


def _positive(text: str) -> int:
    """Return 0 if `text` is not a positive number."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 20 else 0


HEADER = "x-model-version"


def apply_version_header(scope: Scope, request: RankRequest) -> None:
    """Take the header `x-model-version` as the body's `model_version`. RequestError 400 if both are given and
    differ."""
    named = next((value.decode("latin-1") for name, value in scope["headers"] if name == HEADER.encode()), "")
    if named and request.model_version and named != request.model_version:
        message = (
            f"expected one version, got {shown(request.model_version)!r} here and {shown(named)!r} "
            f"in {HEADER}"
        )
        raise RequestError(400, message, "$.model_version")
    request.model_version = request.model_version or named


log = logging.getLogger("roostream.serving")


class _Endpoint:
    """Error handling, metrics and encoding that all endpoints share."""

    route = ""

    def __init__(
        self, context: ServingContext, body_reader: BodyReader, log_rate_limit: LogRateLimit
    ) -> None:
        self.context, self.body_reader, self.log_rate_limit = context, body_reader, log_rate_limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, whatever fails. Nothing is sent to a client that hung up."""
        begin_s = time.perf_counter()
        headers: dict[str, str] = {}
        answer: object
        begun_s = asyncio.get_running_loop().time()
        try:
            until_s = begun_s + parse_deadline_ms(scope, self.context.config.deadline_ms) / 1000
            status, answer = 200, await self.answer(scope, receive, until_s)
        except ClientGoneError:
            return
        except (Exception, asyncio.CancelledError) as error:
            status, answer, headers = self.error_response(error)
        body, media, own = self.encode(scope, answer)
        self.context.metrics.answered(self.route, status, time.perf_counter() - begin_s)
        await send_answer(send, status, body, media, headers | own)

    def error_response(self, error: BaseException) -> tuple[int, object, dict[str, str]]:
        """Return (status, body, headers) of an error. Re-raises a cancellation outside of a stop."""
        if isinstance(error, RequestError | asyncio.CancelledError):
            refusal = self._refusal(error)
        else:
            self._log_defect(error)
            refusal = RequestError(500, "this request could not be answered; the cause is in serving's log")
        return refusal.status, self.error_body(refusal), refusal.headers()

    def error_body(self, error: RequestError) -> object:
        """The body of an error answer."""
        return error.body()

    def encode(self, scope: Scope, answer: object) -> tuple[bytes, str, dict[str, str]]:
        """Return (body, media type, extra headers)."""
        return *encode_body(answer, wants_protobuf(scope)), {}

    async def answer(self, scope: Scope, receive: Receive, until_s: float) -> object:
        """Return the body of a 200 answer, to be encoded by `encode`. Raises RequestError,
        ClientGoneError."""
        raise NotImplementedError

    def append_to_log(self, records: list[LogRecord]) -> None:
        """Append records to the feature log, in the event loop. After this the request is answered, even past
        its deadline."""
        try:
            for record in records:
                self.context.log.append(record)
        except LogFullError as error:
            raise RequestError(503, str(error), retry_after_s=RETRY_AFTER_S) from None
        except WireError as error:
            raise RequestError(413, str(error)) from None

    def _refusal(self, error: RequestError | asyncio.CancelledError) -> RequestError:
        """During a stop, the server cancels requests that do not end in time."""
        if isinstance(error, RequestError):
            return error
        if not self.body_reader.is_stopping:
            raise error
        return stopping_error()

    def _log_defect(self, error: BaseException) -> None:
        left_out = self.log_rate_limit.due(error_kind(error))
        if left_out is not None:
            more = f" ({left_out} more since the last report)" if left_out else ""
            log.error(
                "a %s request failed: this is a defect of Roostream%s", self.route, more, exc_info=error
            )


class RankEndpoint(_Endpoint):
    """`POST /v1/rank`: read the body, parse, admit, wait in the scoring queue, log, answer."""

    route = "rank"

    def __init__(
        self, context: ServingContext, body_reader: BodyReader, log_rate_limit: LogRateLimit
    ) -> None:
        super().__init__(context, body_reader, log_rate_limit)
        self.gate = AdmissionGate(context.config.max_in_flight)
        self.json = JsonParser(context.schema)
        most = (context.config.max_pass_requests, context.config.max_pass_candidates)
        service, waited = context.service, context.metrics.stages.queue.observe
        self.queue = ScoringQueue(
            context.executor, service.rank_all, self.gate, most, waited, service.may_wait
        )

    async def answer(self, scope: Scope, receive: Receive, until_s: float) -> object:
        """Answer once the impression is logged.

        Raises:
            RequestError: 400, 404, 408, 413, 415, 429, 500; 503: the log is full; 504: the deadline passed.
            Nothing is logged. ClientGoneError: nothing is logged.
        """
        self.gate.check(self.remaining_s(until_s))  # before a body is read and parsed in vain
        options = parse_rank_options(scope["query_string"])
        media = request_media_type(scope, (JSON, PROTOBUF))
        body = await self.body_reader.read(scope, receive, until_s)
        request = self.parse_request(scope, body, media, options)
        return await self.rank_request(request, len(body), until_s)

    def parse_request(self, scope: Scope, body: bytes, media: str, options: RankOptions) -> RankRequest:
        """Raises RequestError 400, 413."""
        begin_s = time.perf_counter()
        request = self._parse(body, media, options)
        self.context.metrics.stages.parse.observe(time.perf_counter() - begin_s)
        apply_version_header(scope, request)
        return request

    async def rank_request(self, request: RankRequest, num_bytes: int, until_s: float) -> RankAnswer:
        """Rank a parsed request and log its impression. Raises RequestError 404, 413, 429, 500, 503, 504."""
        self.check_log_space(request, num_bytes)
        with self.gate.admit(self.remaining_s(until_s)):
            return await self._scored(request, until_s)

    def check_log_space(self, request: RankRequest, num_bytes: int) -> None:
        """Call before admission. Raises RequestError 503: the feature log has no space for the impression."""
        if not self.context.log.has_room(num_bytes):
            message = "the feature log is full: Kafka has not accepted its records; try again"
            raise RequestError(503, message, retry_after_s=RETRY_AFTER_S)
        names = CURRENT_CALL.get()
        request.traceparent = names.traceparent if names else ""

    def log_impression(self, ranked: RankResult) -> RankAnswer:
        """Log the impression; the answer may be sent afterwards. Raises RequestError 413, 503."""
        begin_s, answer = time.perf_counter(), ranked.answer
        self.append_to_log([ranked.record])
        self.context.metrics.stages.log.observe(time.perf_counter() - begin_s)
        self.context.metrics.candidates.inc(len(answer.order))
        if answer.degraded:
            self.context.metrics.degraded.inc()
        return answer

    async def _scored(self, request: RankRequest, until_s: float) -> RankAnswer:
        """The timestamp is taken only now, so that a slow body does not hold the watermark back."""
        stamp_ms = self.context.watermark.open()
        try:
            async with asyncio.timeout_at(until_s):
                ranked = await self.queue.score(request, stamp_ms)
            return self.log_impression(ranked)
        except TimeoutError:
            raise deadline_error() from None
        finally:
            self.context.watermark.close(stamp_ms)

    def _parse(self, body: bytes, media: str, options: RankOptions) -> RankRequest:
        if media == PROTOBUF:
            request = parse_impression(self.context.schema, body)
        else:
            request = self.json.parse(body)
        request.append |= options.append
        request.return_ranked, request.top = options.ranked, options.top
        return request

    def remaining_s(self, until_s: float) -> float:
        return until_s - asyncio.get_running_loop().time()


def deadline_error() -> RequestError:
    return RequestError(
        504, "not scored within the deadline; nothing was logged", retry_after_s=RETRY_AFTER_S
    )


class EngagementsEndpoint(_Endpoint):
    """`POST /v1/engagements`: answered once the engagements are logged."""

    route = "engagements"

    def __init__(self, context: ServingContext, rank: RankEndpoint, log_rate_limit: LogRateLimit) -> None:
        super().__init__(context, rank.body_reader, log_rate_limit)
        self.lane = WorkLane(rank.gate, SHARE)
        self.json = EngagementParser(context.schema, strict=context.config.strict_actions)

    async def answer(self, scope: Scope, receive: Receive, until_s: float) -> dict[str, Any]:
        """Raises RequestError 400, 408, 413, 415, 429: nothing is logged; 503: the log became full, earlier
        records are logged."""
        self.lane.check(until_s)  # before a body is read and parsed in vain
        request_media_type(scope, (JSON,))
        body = await self.body_reader.read(scope, receive, until_s)
        parsed = ParsedEngagements([], [], [])
        async with self.lane.turn(until_s):
            stamp_ms = self.context.watermark.open()
            try:
                for _ in self.json.parse_in_pieces(body, stamp_ms, parsed):
                    await self.lane.pause()
                self.append_to_log(parsed.records)
                self.context.service.interleaving_stats.record_engagements(parsed.records)
            finally:
                self.context.watermark.close(stamp_ms)
        metrics, unused = self.context.metrics, self.json.unused(parsed.actions)
        metrics.engagements.inc(len(parsed.records))
        for action in unused:
            metrics.unused_action(action, parsed.actions.count(action))
        return {
            "accepted": len(parsed.records),
            "event_ids": [str(e) for e in parsed.event_ids],
            "unused_actions": unused,
        }
