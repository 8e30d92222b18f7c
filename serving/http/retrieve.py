"""`POST /v1/retrieve`: which items; nothing of it is logged, since nobody has seen them. `POST /v1/recommend`: which items in
which order, as one request: what is shown is ranked and logged as any list, so that engagements find it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from starlette.types import Receive, Scope

from serving.answer import RankAnswer, shortest
from serving.build import Parts
from serving.errors import RequestError
from serving.http.admission import RETRY_AFTER_S
from serving.http.body import JSON, media_of
from serving.http.retrieve_body import RetrieveParser
from serving.http.routes import RankEndpoint
from serving.http.seldom import Seldom
from serving.http.version_header import take_version
from serving.retrieval.retriever import Retrieved, Retriever
from serving.retrieval.shortlist import Shortlist

T = TypeVar("T")


class RetrieveEndpoint(RankEndpoint):
    """Shares the queue of ranks."""

    route = "retrieve"

    def __init__(self, parts: Parts, rank: RankEndpoint, retriever: Retriever, seldom: Seldom) -> None:
        super().__init__(parts, rank.intake, seldom)
        self.gate, self.queue, self.retriever = rank.gate, rank.queue, retriever
        self.bodies = RetrieveParser(parts.schema, parts.service.policy.task)

    async def answer(self, scope: Scope, receive: Receive, until_s: float) -> object:
        """Raises RequestError 400, 408, 413, 415, 429, 500, 503, 504; ClientGoneError."""
        asked = self.bodies.retrieve(await self.body(scope, receive, until_s))
        found = await self.in_turn(lambda now_ms: self.retriever.retrieve(asked, now_ms), until_s)
        return {**_about(asked.request.request_id, found), "items": _items(found), "degraded": found.degraded}

    async def body(self, scope: Scope, receive: Receive, until_s: float) -> bytes:
        """Of a request that can be let in. Raises as `answer`."""
        self.gate.check(self.left_s(until_s))
        media_of(scope, (JSON,))
        return await self.intake.read(scope, receive, until_s)

    async def in_turn(self, work: Callable[[int], T], until_s: float) -> T:
        """`work(now in ms)` in the scoring thread, admitted as a rank is. Raises as `answer`."""
        now_ms = self.parts.stamps.clock.now_ms()
        with self.gate.admit(self.left_s(until_s)):
            try:
                async with asyncio.timeout_at(until_s):
                    return await asyncio.get_running_loop().run_in_executor(self.parts.executor, work, now_ms)
            except TimeoutError:
                message = "nothing was found within the deadline; nothing was logged"
                raise RequestError(504, message, retry_after_s=RETRY_AFTER_S) from None


class RecommendEndpoint(RetrieveEndpoint):
    """Two turns of the scoring thread: items, then their order."""

    route = "recommend"

    def __init__(self, parts: Parts, rank: RankEndpoint, retriever: Retriever, seldom: Seldom) -> None:
        super().__init__(parts, rank, retriever, seldom)
        self.shortlist = Shortlist(parts.service, retriever)

    async def answer(self, scope: Scope, receive: Receive, until_s: float) -> object:
        """Once the log has its impression; with nothing to show there is none. Raises as RankEndpoint.answer."""
        body = await self.body(scope, receive, until_s)
        asked, shown = self.bodies.recommend(body)
        take_version(scope, asked.request)
        listed, found = await self.in_turn(
            lambda now_ms: self.shortlist.choose(asked, shown, now_ms), until_s
        )
        about = _about(asked.request.request_id, found)
        if listed is None:
            named = self.parts.service.versions.named(asked.request.model_version).name
            return {**about, "model_version": named, "items": [], "degraded": found.degraded}
        ranked = await self.ranked(listed, len(body), until_s)
        return {
            **about,
            "model_version": ranked.model_version,
            "items": _ranked_items(ranked),
            "degraded": ranked.degraded or found.degraded,
        }


def _about(request_id: str, found: Retrieved) -> dict[str, Any]:
    return {"request_id": request_id, "retrieval_version": found.space.version.name}


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
