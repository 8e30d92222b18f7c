"""The routes `/v1/retrieve` and `/v1/recommend`.

`/v1/retrieve` finds items; nothing is logged, since no user has seen them. `/v1/recommend` finds and ranks
items in one request; the list is logged like any ranked list, so that engagements can be joined with it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Future
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
from fastapi import Request, Response

from roostream.errors import nearest
from roostream.schema.schema import Schema
from serving import examples
from serving.answer import Scores
from serving.context import ServingContext
from serving.errors import RequestError, shown
from serving.http.admission import RETRY_AFTER_S, WorkLane
from serving.http.body import JSON, json_response, request_media_type
from serving.http.middleware import UNTIL_S
from serving.http.openapi import VERSION
from serving.http.routes import Traffic, apply_version_header, check_no_parameters
from serving.rank_json import JsonParser, decode_body
from serving.request import RankRequest, check_text, parse_id, parse_ids, parse_request_id
from serving.retrieval.retriever import Retrieved, Retriever, RetrieveRequest, Shortlist
from serving.types import (
    FORBID,
    MAX_FILTERED,
    MAX_ITEMS,
    MAX_NAMED,
    FilterValue,
    FoundItem,
    RecommendAnswer,
    RecommendFields,
    RetrieveAnswer,
    RetrieveFields,
    ScoredItem,
    limits,
)

T = TypeVar("T")


def retrieve_type(ro: Any) -> type[msgspec.Struct]:
    """The body of `/v1/retrieve`; `ro` is the type of the request's features."""
    return _with_features("RetrieveRequest", ro, [], RetrieveFields)


def recommend_type(schema: Schema, ro: Any) -> type[msgspec.Struct]:
    """The body of `/v1/recommend`; `ro` is the type of the request's features."""
    max_items = max_found(schema)
    own = [
        ("k", Annotated[int, limits("items to show", minimum=1, maximum=max_items)], min(10, max_items)),
        (
            "retrieved",
            Annotated[int, limits("items that are found for the ranker", minimum=1, maximum=max_items)],
            min(100, max_items),
        ),
    ]
    return _with_features("RecommendRequest", ro, own, RecommendFields)


def _with_features(name: str, ro: Any, own: list[Any], base: type[msgspec.Struct]) -> type[msgspec.Struct]:
    fields = [*own, ("ro", ro, msgspec.field(default_factory=ro))]
    return msgspec.defstruct(name, fields, bases=(base,), kw_only=True, **FORBID)


def max_found(schema: Schema) -> int:
    """The most items that can be found for ranking: no more than a ranked list may have."""
    return min(MAX_ITEMS, schema.limits.max_candidates)


class RetrieveParser:
    """For one schema. Thread-safe."""

    def __init__(self, schema: Schema, default_task: int) -> None:
        self.schema, self.default_task = schema, default_task
        self._ranking = schema.derived(JsonParser)
        known, ro = self._ranking.types.known, self._ranking.types.ro
        self.retrieve_type, self.recommend_type = retrieve_type(ro), recommend_type(schema, ro)
        self._retrieve = msgspec.json.Decoder(self.retrieve_type)
        self._recommend = msgspec.json.Decoder(self.recommend_type)
        self._known_retrieve = {**known, "$": self.retrieve_type.__struct_fields__}
        self._known_recommend = {**known, "$": self.recommend_type.__struct_fields__}

    def retrieve(self, body: bytes) -> RetrieveRequest:
        """Parse a request of `/v1/retrieve`. Raises RequestError 400 with the path of the field, 413."""
        given = _decode(self._retrieve, body, self._known_retrieve)
        return self._build_request(given, _count(given.k, "$.k", MAX_ITEMS), "")

    def recommend(self, body: bytes) -> tuple[RetrieveRequest, int]:
        """Return the request and the number of items to show. Raises RequestError 400 with the path of the
        field, 413."""
        given, max_items = _decode(self._recommend, body, self._known_recommend), max_found(self.schema)
        shown_, found = _count(given.k, "$.k", max_items), _count(given.retrieved, "$.retrieved", max_items)
        return self._build_request(given, max(found, shown_), given.model_version), shown_

    def _build_request(self, given: Any, k: int, model_version: str) -> RetrieveRequest:
        return RetrieveRequest(
            rank_request=RankRequest(
                request_id=parse_request_id(given.request_id, "$.request_id"),
                user_id=parse_id(given.user_id, "$.user_id"),
                session_id=parse_id(given.session_id, "$.session_id"),
                surface=check_text(given.surface, "$.surface"),
                item_ids=np.zeros(0, np.int64),
                client_item_ids=(),
                ro=self._ranking.request_values(given.ro),
                nro={},
                append=False,
                first_position=0,
                model_version=model_version,
            ),
            k=k,
            task=self._task(given.task),
            exclude_N=_named_ids(given.exclude, "$.exclude"),
            among_N=None if given.among is None else _named_ids(given.among, "$.among"),
            exclude_seen=given.exclude_seen,
            wanted=_checked_filter(given.filter),
        )

    def _task(self, name: str) -> int:
        if not name:
            return self.default_task
        if name not in self.schema.tasks:
            message = (
                f"expected one of {', '.join(self.schema.tasks)}, got "
                f"{shown(name)!r}{nearest(shown(name), self.schema.tasks)}"
            )
            raise RequestError(400, message, "$.task")
        return self.schema.tasks.index(name)


def _decode(decoder: msgspec.json.Decoder[Any], body: bytes, known: dict[str, tuple[str, ...]]) -> Any:
    """As `decode_body`, but the path of a wrong value in the filter names the attribute, where msgspec writes
    `[...]`."""
    try:
        return decode_body(decoder, body, known)
    except RequestError as error:
        if error.path.startswith("$.filter[...]") and (name := _wrong_attribute(body)):
            error.path = error.path.replace("[...]", f".{shown(name)}", 1)
        raise


def _wrong_attribute(body: bytes) -> str:
    """The name of the filter's first attribute whose value has a wrong type; "" if the body is not valid JSON
    or no attribute is wrong."""
    try:
        wanted = msgspec.json.decode(body)["filter"]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
    for name, value in wanted.items() if isinstance(wanted, dict) else ():
        try:
            msgspec.convert(value, FilterValue)
        except msgspec.ValidationError:
            return name
    return ""


def _named_ids(ids: list[int | str], path: str) -> np.ndarray:
    if len(ids) > MAX_NAMED:
        raise RequestError(413, f"expected at most {MAX_NAMED} items, got {len(ids)}", path)
    return parse_ids(ids, lambda i: f"{path}[{i}]")


def _count(value: int, path: str, max_count: int) -> int:
    if not 1 <= value <= max_count:
        raise RequestError(400, f"expected 1 to {max_count} items, got {shown(value)}", path)
    return value


def _checked_filter(wanted: dict[str, Any]) -> dict[str, Any]:
    if len(wanted) > MAX_FILTERED:
        raise RequestError(413, f"expected at most {MAX_FILTERED} attributes, got {len(wanted)}", "$.filter")
    return wanted


def add_retrieval_routes(traffic: Traffic, retriever: Retriever) -> None:
    """Both use the scoring thread one request at a time, in turns with `/v1/rank`. `/v1/recommend` uses it
    twice: to find items, then to rank them."""
    context, ranking, bodies, types = traffic.context, traffic.ranking, traffic.bodies, traffic.types
    lane = ranking.retrieval_lane
    parser = RetrieveParser(context.schema, context.service.policy.task)
    shortlist = Shortlist(context.service, retriever)
    retrieved = types.traffic(
        "retrieve",
        "Find items of the catalogue",
        types.json(parser.retrieve_type, example={"request_id": "r-1", "user_id": 17, "k": 5}),
        types.json(RetrieveAnswer, example=examples.FOUND),
    )
    recommended = types.traffic(
        "recommend",
        "Find items and rank them",
        types.json(parser.recommend_type, example={"request_id": "r-1", "user_id": 17, "k": 3}),
        types.json(types.scored(RecommendAnswer), example=examples.recommended_example(context.schema)),
        [VERSION],
    )

    @traffic.router.post("/v1/retrieve", name="retrieve", **retrieved)
    async def retrieve(request: Request) -> Response:
        """Nothing is logged, because no user has seen the items."""
        check_no_parameters(request.scope)
        request_media_type(request.scope, (JSON,))
        parsed = parser.retrieve(await bodies.read(request, request.scope[UNTIL_S]))
        found = await run_in_scoring_thread(
            context, lane, lambda now_ms: retriever.retrieve(parsed, now_ms), request.scope[UNTIL_S]
        )
        return json_response(
            RetrieveAnswer(
                request_id=parsed.rank_request.request_id,
                degraded=found.degraded,
                retrieval_version=found.index.version.name,
                items=_items(found),
            )
        )

    @traffic.router.post("/v1/recommend", name="recommend", **recommended)
    async def recommend(request: Request) -> Response:
        """Answered once the impression is logged. Without items to show, none is logged."""
        until_s = request.scope[UNTIL_S]
        check_no_parameters(request.scope)
        request_media_type(request.scope, (JSON,))
        body = await bodies.read(request, until_s)
        parsed, num_shown = parser.recommend(body)
        rank_request = parsed.rank_request
        apply_version_header(request.scope, rank_request)
        listed, found = await run_in_scoring_thread(
            context, lane, lambda now_ms: shortlist.choose(parsed, num_shown, now_ms), until_s
        )
        answer: RecommendAnswer[Any] = RecommendAnswer(
            request_id=rank_request.request_id,
            degraded=found.degraded,
            retrieval_version=found.index.version.name,
            model_version="",
            items=[],
        )
        if listed is None:
            answer.model_version = context.service.versions.named(rank_request.model_version).name
            return json_response(answer)
        ranked = await ranking.rank(listed, len(body), until_s)
        assert isinstance(ranked.scores, Scores)
        in_order = ranked.scores.in_order(ranked.order)
        answer.items = [ScoredItem(i, scores) for i, scores in zip(ranked.ranked, in_order, strict=True)]
        answer.model_version, answer.degraded = ranked.model_version, ranked.degraded or found.degraded
        return json_response(answer)


async def run_in_scoring_thread(
    context: ServingContext, lane: WorkLane, work: Callable[[int], T], until_s: float
) -> T:
    """Call `work(now_ms)` in the scoring thread when the request's turn comes.

    Work that has started cannot be interrupted: after the deadline, the next request waits until it has
    ended. Raises RequestError 429, 504, and what `work` raises.
    """
    since_s = await lane.begin(until_s)
    loop = asyncio.get_running_loop()

    def end(done: Future[T]) -> None:
        is_answered = not done.cancelled() and done.exception() is None
        with contextlib.suppress(RuntimeError):  # the loop has ended, after a stop
            loop.call_soon_threadsafe(lane.end, since_s, is_answered)

    running = context.executor.submit(work, context.watermark.clock.now_ms())
    running.add_done_callback(end)
    try:
        async with asyncio.timeout_at(until_s):
            return await asyncio.wrap_future(running)
    except TimeoutError:
        message = "nothing was found within the deadline; nothing was logged"
        raise RequestError(504, message, retry_after_s=RETRY_AFTER_S) from None


def _items(found: Retrieved) -> list[FoundItem]:
    decimals = found.found.product_K.astype(float).round(6).tolist()
    return [FoundItem(item, product) for item, product in zip(found.given, decimals, strict=True)]
