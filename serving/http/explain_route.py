"""The route `/v1/explain`. Explanations never delay rank requests by more than one forward pass.

One explanation runs at a time. Each of its forward passes queues for the scoring thread separately, and none
starts while rank requests are being refused.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import Request, Response

from param_server.replica.replica import Replica
from serving.errors import RequestError
from serving.examples import explained_example, rank_example
from serving.http.admission import RETRY_AFTER_S, remaining_s
from serving.http.body import JSON, json_response, request_media_type
from serving.http.middleware import UNTIL_S
from serving.http.openapi import VERSION
from serving.http.routes import Traffic, apply_version_header, check_no_parameters
from serving.page.explanation import MAX_CANDIDATES, ExplainAnswer, Explainer
from serving.rank_json import JsonParser
from serving.request import RankRequest

EXPLAIN_S = 10.0
T = TypeVar("T")


def add_explain_route(traffic: Traffic) -> Explainer:
    """Add `/v1/explain`; return what computes the explanations."""
    context, ranking, bodies, types = traffic.context, traffic.ranking, traffic.bodies, traffic.types
    schema = context.schema
    parser = schema.derived(JsonParser)
    initial = functools.cache(lambda: Replica(schema, context.config.seed, num_buckets=1))
    explainer = Explainer(context.service, initial)
    running = asyncio.Semaphore(1)

    async def run_in_scoring_thread(call: Callable[..., T], *arguments: Any) -> T:
        """Run after what waits for the thread already."""
        return await asyncio.get_running_loop().run_in_executor(context.executor, call, *arguments)

    async def explained(request: RankRequest) -> ExplainAnswer:
        explanation = await run_in_scoring_thread(explainer.begin, request, context.watermark.clock.now_ms())
        for names in explainer.passes(explanation):
            await run_in_scoring_thread(explainer.score_without, explanation, names)
        return explainer.build_answer(explanation)

    about = types.traffic(
        "explain",
        f"Rank without logging and explain: scores without each feature; at most {MAX_CANDIDATES} "
        "candidates, one call at a time",
        types.json(parser.types.rank, example=rank_example(schema)),
        types.json(ExplainAnswer, example=explained_example(schema)),
        [VERSION],
    )

    @traffic.router.post("/v1/explain", name="explain", **about)
    async def explain(request: Request) -> Response:
        """Nothing is logged. Answered 429 while rank requests are refused or another explanation runs, and
        504 after ten seconds."""
        scope = request.scope
        check_no_parameters(scope)
        request_media_type(scope, (JSON,))
        parsed = parser.parse(await bodies.read(request, scope[UNTIL_S]))
        apply_version_header(scope, parsed)
        if len(parsed.item_ids) > MAX_CANDIDATES:
            message = (
                f"expected at most {MAX_CANDIDATES} candidates to be explained, got {len(parsed.item_ids)}"
            )
            raise RequestError(413, message, "$.candidates")
        ranking.gate.check(remaining_s(scope[UNTIL_S]))
        if running.locked():
            raise RequestError(429, "another explanation is running; try again", retry_after_s=RETRY_AFTER_S)
        try:
            async with running, asyncio.timeout(EXPLAIN_S):
                return json_response(await explained(parsed))
        except TimeoutError:
            raise RequestError(
                504, f"not explained within {EXPLAIN_S:g} s", retry_after_s=RETRY_AFTER_S
            ) from None

    return explainer
