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
from msgspec import Meta
from starlette.types import Receive, Scope

from roostream.errors import nearest
from roostream.schema.schema import Schema
from serving.answer import RankAnswer, shortest
from serving.context import ServingContext
from serving.errors import RequestError, shown
from serving.http.admission import RETRY_AFTER_S, WorkLane
from serving.http.body import JSON, request_media_type
from serving.http.log_rate_limit import LogRateLimit
from serving.http.routes import RankEndpoint, apply_version_header
from serving.rank_json import FORBID, Id, JsonParser, decode_body, limits
from serving.request import RankRequest, check_text, parse_id, parse_ids, parse_request_id
from serving.retrieval.catalogue import AttributeValue
from serving.retrieval.retriever import Retrieved, Retriever, RetrieveRequest, Shortlist

MAX_ITEMS = 1000  # per answer
MAX_NAMED = 10_000  # ids in one list of a body
MAX_FILTERED = 32  # attributes in a filter
_WHO = ("request_id", "user_id", "session_id", "surface", "ro")
_Value = Annotated[AttributeValue | list[AttributeValue], Meta(description="or a list: one of them")]
_COMMON: list[Any] = [
    ("task", Annotated[str, limits("label whose towers are used; '' = the one that orders")], ""),
    (
        "exclude",
        Annotated[list[Id], limits("items to leave out", maxItems=MAX_NAMED)],
        msgspec.field(default_factory=list),
    ),
    (
        "among",
        Annotated[
            list[Id] | None,
            limits("no others than these are found; null = all of the catalogue", maxItems=MAX_NAMED),
        ],
        None,
    ),
    (
        "exclude_seen",
        Annotated[bool, Meta(description="leave out the items of the request's histories")],
        False,
    ),
    (
        "filter",
        Annotated[
            dict[str, _Value],
            limits("attributes of the catalogue that items must have", maxProperties=MAX_FILTERED),
        ],
        msgspec.field(default_factory=dict),
    ),
]


def retrieve_type(rank: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """The body of `/v1/retrieve`; `rank` is the body of `/v1/rank`."""
    k = Annotated[int, limits("items to find", minimum=1, maximum=MAX_ITEMS)]
    return msgspec.defstruct("RetrieveRequest", [*_who(rank), ("k", k, 100), *_COMMON], **FORBID)


def recommend_type(schema: Schema, rank: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """The body of `/v1/recommend`; `rank` is the body of `/v1/rank`."""
    most = max_found(schema)
    fields = [
        *_who(rank),
        ("k", Annotated[int, limits("items to show", minimum=1, maximum=most)], min(10, most)),
        (
            "retrieved",
            Annotated[int, limits("items that are found for the ranker", minimum=1, maximum=most)],
            min(100, most),
        ),
        (
            "model_version",
            Annotated[str, limits("of the ranking, as for a rank", pattern=r"^(\d{1,20}-\d{1,20})?$")],
            "",
        ),
        *_COMMON,
    ]
    return msgspec.defstruct("RecommendRequest", fields, **FORBID)


def max_found(schema: Schema) -> int:
    """The most items that can be found for ranking: no more than a ranked list may have."""
    return min(MAX_ITEMS, schema.limits.max_candidates)


class RetrieveParser(JsonParser):
    """For one schema. Thread-safe."""

    def __init__(self, schema: Schema, default_task: int) -> None:
        super().__init__(schema)
        self.default_task = default_task
        known, rank = self._types.known, self._types.rank
        retrieve, recommend = retrieve_type(rank), recommend_type(schema, rank)
        self._retrieve, self._recommend = msgspec.json.Decoder(retrieve), msgspec.json.Decoder(recommend)
        self._known_retrieve = {**known, "$": retrieve.__struct_fields__}
        self._known_recommend = {**known, "$": recommend.__struct_fields__}

    def retrieve(self, body: bytes) -> RetrieveRequest:
        """Raises RequestError 400 with the path of the field, 413."""
        given = decode_body(self._retrieve, body, self._known_retrieve)
        return self._build_request(given, _count(given.k, "$.k", MAX_ITEMS), "")

    def recommend(self, body: bytes) -> tuple[RetrieveRequest, int]:
        """Return the request and the number of items to show. Raises RequestError 400 with the path of the
        field, 413."""
        given, most = decode_body(self._recommend, body, self._known_recommend), max_found(self.schema)
        shown_, found = _count(given.k, "$.k", most), _count(given.retrieved, "$.retrieved", most)
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
                ro=self._request_values(given.ro),
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


def _named_ids(ids: list[int | str], path: str) -> np.ndarray:
    if len(ids) > MAX_NAMED:
        raise RequestError(413, f"expected at most {MAX_NAMED} items, got {len(ids)}", path)
    return parse_ids(ids, lambda i: f"{path}[{i}]")


def _count(value: int, path: str, most: int) -> int:
    if not 1 <= value <= most:
        raise RequestError(400, f"expected 1 to {most} items, got {shown(value)}", path)
    return value


def _checked_filter(wanted: dict[str, Any]) -> dict[str, Any]:
    if len(wanted) > MAX_FILTERED:
        raise RequestError(413, f"expected at most {MAX_FILTERED} attributes, got {len(wanted)}", "$.filter")
    return wanted


def _who(rank: type[msgspec.Struct]) -> list[Any]:
    """The fields of a rank body that describe the user."""
    given = {f.name: f for f in msgspec.structs.fields(rank)}
    fields: list[Any] = []
    for name in _WHO:
        f = given[name]
        made = (
            msgspec.field(default_factory=f.default_factory) if f.default is msgspec.NODEFAULT else f.default
        )
        fields.append((name, f.type, made))
    return fields


T = TypeVar("T")


class RetrieveEndpoint(RankEndpoint):
    """Has an admission gate of its own, and uses the scoring thread one request at a time, in turns with
    `/v1/rank`."""

    route = "retrieve"

    def __init__(
        self, context: ServingContext, rank: RankEndpoint, retriever: Retriever, log_rate_limit: LogRateLimit
    ) -> None:
        super().__init__(context, rank.body_reader, log_rate_limit)
        self.gate, self.queue, self.retriever = rank.gate, rank.queue, retriever
        self.lane = WorkLane(rank.gate)
        self.bodies = RetrieveParser(context.schema, context.service.policy.task)

    async def answer(self, scope: Scope, receive: Receive, until_s: float) -> object:
        """Raises RequestError 400, 408, 413, 415, 429, 500, 503, 504; ClientGoneError."""
        request = self.bodies.retrieve(await self.body(scope, receive, until_s))
        found = await self.run_in_scoring_thread(
            lambda now_ms: self.retriever.retrieve(request, now_ms), until_s
        )
        return {
            **_about(request.rank_request.request_id, found),
            "items": _items(found),
            "degraded": found.degraded,
        }

    async def body(self, scope: Scope, receive: Receive, until_s: float) -> bytes:
        """Read the body of a request that can be admitted. Raises as `answer`."""
        self.lane.check(until_s)
        request_media_type(scope, (JSON,))
        return await self.body_reader.read(scope, receive, until_s)

    async def run_in_scoring_thread(self, work: Callable[[int], T], until_s: float) -> T:
        """Call `work(now_ms)` in the scoring thread when the request's turn comes. Raises as `answer`.

        Work that has started cannot be interrupted: after the deadline, the next request waits until it has
        ended.
        """
        since_s = await self.lane.begin(until_s)
        loop = asyncio.get_running_loop()

        def end(done: Future[T]) -> None:
            is_answered = not done.cancelled() and done.exception() is None
            with contextlib.suppress(RuntimeError):  # the loop has ended, after a stop
                loop.call_soon_threadsafe(self.lane.end, since_s, is_answered)

        running = self.context.executor.submit(work, self.context.watermark.clock.now_ms())
        running.add_done_callback(end)
        try:
            async with asyncio.timeout_at(until_s):
                return await asyncio.wrap_future(running)
        except TimeoutError:
            message = "nothing was found within the deadline; nothing was logged"
            raise RequestError(504, message, retry_after_s=RETRY_AFTER_S) from None


class RecommendEndpoint(RetrieveEndpoint):
    """Uses the scoring thread twice: to find items, then to rank them."""

    route = "recommend"

    def __init__(
        self, context: ServingContext, rank: RankEndpoint, retriever: Retriever, log_rate_limit: LogRateLimit
    ) -> None:
        super().__init__(context, rank, retriever, log_rate_limit)
        self.shortlist = Shortlist(context.service, retriever)

    async def answer(self, scope: Scope, receive: Receive, until_s: float) -> object:
        """Answer once the impression is logged; without items to show, none is logged. Raises as
        RankEndpoint.answer."""
        body = await self.body(scope, receive, until_s)
        request, shown = self.bodies.recommend(body)
        apply_version_header(scope, request.rank_request)
        listed, found = await self.run_in_scoring_thread(
            lambda now_ms: self.shortlist.choose(request, shown, now_ms), until_s
        )
        about = _about(request.rank_request.request_id, found)
        if listed is None:
            named = self.context.service.versions.named(request.rank_request.model_version).name
            return {**about, "model_version": named, "items": [], "degraded": found.degraded}
        ranked = await self.rank_request(listed, len(body), until_s)
        return {
            **about,
            "model_version": ranked.model_version,
            "items": _ranked_items(ranked),
            "degraded": ranked.degraded or found.degraded,
        }


def _about(request_id: str, found: Retrieved) -> dict[str, Any]:
    return {"request_id": request_id, "retrieval_version": found.index.version.name}


def _items(found: Retrieved) -> list[dict[str, Any]]:
    decimals = found.found.product_K.astype(float).round(6).tolist()
    return [
        {"item_id": item, "product": product} for item, product in zip(found.given, decimals, strict=True)
    ]


def _ranked_items(ranked: RankAnswer) -> list[dict[str, Any]]:
    """In the order to show."""
    assert ranked.ranked is not None
    scores = [dict(zip(ranked.tasks, row, strict=True)) for row in shortest(ranked.scores_nT).tolist()]
    return [
        {"item_id": item, "scores": scores[i]} for item, i in zip(ranked.ranked, ranked.order, strict=True)
    ]
