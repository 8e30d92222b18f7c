"""The routes `/v1/rank` and `/v1/engagements`, and what all traffic routes share."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Annotated, Any
from urllib.parse import parse_qsl

from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from roostream.errors import WireError, nearest
from roostream.runtime.log_rate_limit import LogRateLimit, and_more, error_kind
from roostream.runtime.program import CURRENT_CALL
from serving import examples
from serving.answer import encode_protobuf, top_answer
from serving.context import ServingContext
from serving.errors import RequestError, shown
from serving.feature_log.format import LogRecord
from serving.feature_log.log import FeatureLog, LogFullError
from serving.http.admission import RETRY_AFTER_S, AdmissionGate, WorkLane, remaining_s
from serving.http.body import (
    JSON,
    PROTOBUF,
    BodyReader,
    ClientGoneError,
    error_response,
    json_response,
    prefers,
    request_media_type,
    stopping_error,
)
from serving.http.engagements import SHARE, EngagementBody, EngagementParser, ParsedEngagements
from serving.http.middleware import UNTIL_S, parse_positive
from serving.http.openapi import VERSION, VERSION_HEADER, TypeComponents, query_parameters
from serving.http.scoring_queue import ScoringQueue
from serving.rank_json import JsonParser
from serving.rank_protobuf import parse_impression
from serving.request import RankRequest
from serving.types import MAX_ENGAGEMENTS, EngagementsAnswer, RankAnswer, RankOptions, TopAnswer, limits

log = logging.getLogger("roostream.serving")


class TrafficRoute(APIRoute):
    """A route whose endpoint takes the request and returns the response.

    Endpoints decode and encode bodies themselves, with msgspec or protobuf, so FastAPI's dependencies and
    models are not used. Every error becomes an answer, and every answer is counted under the route's name.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        self.app = self._answer  # in place of FastAPI's request_response, which opens stacks of dependencies

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        begin_s = time.perf_counter()
        traffic: Traffic = scope["app"].state.traffic
        try:
            response: Response = await self.endpoint(Request(scope, receive, send))
        except ClientGoneError:
            return
        except (Exception, asyncio.CancelledError) as error:
            response = error_response(scope, _refusal(traffic, self.name, error))
        traffic.context.metrics.answered(self.name, response.status_code, time.perf_counter() - begin_s)
        await response(scope, receive, send)


def _refusal(traffic: Traffic, route: str, error: BaseException) -> RequestError:
    """The error to answer with. A cancellation is one during a stop, when the server cancels requests that do
    not end in time; any other is raised again."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, asyncio.CancelledError):
        if not traffic.bodies.is_stopping:
            raise error
        return stopping_error()
    left_out = traffic.log_rate_limit.due(error_kind(error))
    if left_out is not None:
        more = and_more(left_out)
        log.error("a %s request failed: this is a defect of Roostream%s", route, more, exc_info=error)
    return RequestError(500, "this request could not be answered; the cause is in serving's log")


class Ranking:
    """Ranks parsed requests for all routes: admission, scoring queue, feature log. Used by one event loop.

    Engagements and retrieval have lanes of their own beside the rank requests.
    """

    def __init__(self, context: ServingContext) -> None:
        self.context = context
        self.gate = AdmissionGate(context.config.max_in_flight)
        self.engagement_lane, self.retrieval_lane = WorkLane(self.gate, SHARE), WorkLane(self.gate)
        self.queue = ScoringQueue(
            context.executor,
            context.service.rank_all,
            self.gate,
            context.config.max_pass_requests,
            context.config.max_pass_candidates,
            context.metrics.stages.queue.observe,
            context.service.row_reads_wait,
        )

    async def rank(self, request: RankRequest, num_bytes: int, until_s: float) -> RankAnswer[Any]:
        """Rank a request and log its impression; `num_bytes` is the size of its body. Nothing is logged if
        this raises.

        Raises:
            RequestError: 404, 413, 429, 500; 503: the log is full; 504: the deadline `until_s` passed.
        """
        context = self.context
        if not context.log.has_room(num_bytes):
            message = "the feature log is full: Kafka has not accepted its records; try again"
            raise RequestError(503, message, retry_after_s=RETRY_AFTER_S)
        names = CURRENT_CALL.get()
        request.traceparent = names.traceparent if names else ""
        with self.gate.admit(remaining_s(until_s)):
            stamp_ms = context.watermark.open()  # only now, so that a slow body does not hold it back
            try:
                async with asyncio.timeout_at(until_s):
                    ranked = await self.queue.score(request, stamp_ms)
                begin_s = time.perf_counter()
                append_to_log(context.log, [ranked.record])
                context.metrics.stages.log.observe(time.perf_counter() - begin_s)
            except TimeoutError:
                raise RequestError(
                    504, "not scored within the deadline; nothing was logged", retry_after_s=RETRY_AFTER_S
                ) from None
            finally:
                context.watermark.close(stamp_ms)
        context.metrics.candidates.inc(len(ranked.answer.order))
        if ranked.answer.degraded:
            context.metrics.degraded.inc()
        return ranked.answer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traffic:
    """What the traffic routes share; it is in the application's state. Functions called `add_…_route` add
    routes to `router`."""

    context: ServingContext
    ranking: Ranking
    bodies: BodyReader
    log_rate_limit: LogRateLimit
    types: TypeComponents
    router: APIRouter


def append_to_log(feature_log: FeatureLog, records: list[LogRecord]) -> None:
    """Append records in the event loop. After this the request is answered, even past its deadline.

    Raises:
        RequestError: 413 a record is too large; 503 the log is full. Records before it are logged.
    """
    try:
        for record in records:
            feature_log.append(record)
    except LogFullError as error:
        raise RequestError(503, str(error), retry_after_s=RETRY_AFTER_S) from None
    except WireError as error:
        raise RequestError(413, str(error)) from None


def add_rank_route(traffic: Traffic) -> None:
    """Add `/v1/rank`."""
    schema, ranking, bodies = traffic.context.schema, traffic.ranking, traffic.bodies
    parser, parse_s = schema.derived(JsonParser), traffic.context.metrics.stages.parse
    types = traffic.types
    about = types.traffic(
        "rank",
        "Rank the candidates of a request",
        types.json(parser.types.rank, example=examples.rank_example(schema)),
        types.json_with_options(
            types.scored(RankAnswer), types.scored(TopAnswer), example=examples.answer_example(schema)
        ),
        [*query_parameters(RankOptions), VERSION],
    )

    @traffic.router.post("/v1/rank", name="rank", **about)
    async def rank(request: Request) -> Response:
        """All candidates are scored, and the list is logged before it is returned. A body of the type
        `application/x-protobuf` is a `roo.Impression` without scores; a client that accepts this type gets a
        `roo.RankAnswer`."""
        scope = request.scope
        options = parse_rank_options(scope["query_string"])
        media = request_media_type(scope, (JSON, PROTOBUF))
        if options.ranked and prefers(scope, PROTOBUF):
            message = "expected no ?ranked=true with an answer in protobuf, which has `order` only"
            raise RequestError(400, message, "?ranked")
        body = await bodies.read(request, scope[UNTIL_S])
        begin_s = time.perf_counter()
        parsed = parse_impression(schema, body) if media == PROTOBUF else parser.parse(body)
        parsed.append |= options.append
        parsed.return_ranked = options.ranked
        parse_s.observe(time.perf_counter() - begin_s)
        apply_version_header(scope, parsed)
        answer = await ranking.rank(parsed, len(body), scope[UNTIL_S])
        if prefers(scope, PROTOBUF):
            return Response(encode_protobuf(answer, options.top), media_type=PROTOBUF)
        if options.top:
            return json_response(top_answer(answer, parsed.client_item_ids, options.top))
        return json_response(answer)


def add_engagements_route(traffic: Traffic) -> None:
    """Add `/v1/engagements`."""
    context, bodies, types = traffic.context, traffic.bodies, traffic.types
    lane = traffic.ranking.engagement_lane
    parser = EngagementParser(context.schema, strict=context.config.strict_actions)
    many = Annotated[list[EngagementBody], limits(maxItems=MAX_ENGAGEMENTS)]
    about = types.traffic(
        "engage",
        "Send a list of engagements, or one without a list",
        types.json(many, example=[examples.engagement_example(context.schema)]),
        types.json(EngagementsAnswer, example=examples.ENGAGED),
        without=(404, 504),
    )

    @traffic.router.post("/v1/engagements", name="engagements", **about)
    async def engagements(request: Request) -> Response:
        """All engagements of a list are logged before this is answered, or none is accepted."""
        until_s = request.scope[UNTIL_S]
        check_no_parameters(request.scope)
        request_media_type(request.scope, (JSON,))
        body = await bodies.read(request, until_s)
        parsed = ParsedEngagements([], [], [])
        async with lane.turn(until_s):
            stamp_ms = context.watermark.open()
            try:
                for _ in parser.parse_in_pieces(body, stamp_ms, parsed):
                    await lane.pause()
                append_to_log(context.log, parsed.records)
                context.service.interleaving_stats.record_engagements(parsed.records)
            finally:
                context.watermark.close(stamp_ms)
        metrics, unused = context.metrics, parser.unused(parsed.actions)
        metrics.engagements.inc(len(parsed.records))
        counts = Counter(parsed.actions)
        for action in unused:
            metrics.unused_action(action, counts[action])
        return json_response(
            EngagementsAnswer(len(parsed.records), [str(e) for e in parsed.event_ids], unused)
        )


def parse_rank_options(query: bytes) -> RankOptions:
    """Parse `?append=true&ranked=true&top=10`. RequestError 400 for an unknown name, an invalid value, or a
    name that is given twice."""
    out: dict[str, Any] = {}
    known = RankOptions.__struct_fields__
    for name, value in _parameters(query):
        if name not in known:
            raise RequestError(
                400, f"unknown parameter {shown(name)!r}{nearest(shown(name), known)}", f"?{shown(name)}"
            )
        if name in out:
            raise RequestError(400, f"expected {name} once, got it twice", f"?{name}")
        out[name] = _top(value) if name == "top" else _flag(name, value)
    return RankOptions(**out)


def check_no_parameters(scope: Scope) -> None:
    """For routes without parameters. RequestError 400: there is one, which would be ignored."""
    for name, _ in _parameters(scope["query_string"]):
        message = f"expected no parameters in the address, got {shown(name)!r}; fields belong in the body"
        raise RequestError(400, message, f"?{shown(name)}")


def _parameters(query: bytes) -> list[tuple[str, str]]:
    return parse_qsl(query.decode("latin-1"), keep_blank_values=True) if query else []


def _flag(name: str, value: str) -> bool:
    if value not in ("true", "false"):
        raise RequestError(400, f"expected true or false, got {shown(value)!r}", f"?{name}")
    return value == "true"


def _top(value: str) -> int:
    number = parse_positive(value)
    if not number:
        raise RequestError(400, f"expected a number of slots from 1 on, got {shown(value)!r}", "?top")
    return number


def apply_version_header(scope: Scope, request: RankRequest) -> None:
    """Take the header `x-model-version` as the body's `model_version`. RequestError 400 if both are given and
    differ."""
    stated = Headers(scope=scope).get(VERSION_HEADER, "")
    if stated and request.model_version and stated != request.model_version:
        message = (
            f"expected one version, got {shown(request.model_version)!r} here and {shown(stated)!r} "
            f"in {VERSION_HEADER}"
        )
        raise RequestError(400, message, "$.model_version")
    request.model_version = request.model_version or stated
