"""The route `/v1/explain`. Explanations never delay rank requests by more than one forward pass.

One explanation runs at a time. Each of its forward passes queues for the scoring thread separately, and none
starts while rank requests are being refused.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any, TypeVar

from starlette.types import Receive, Scope

from param_server.replica.replica import Replica
from serving.context import ServingContext
from serving.errors import RequestError
from serving.http.admission import RETRY_AFTER_S
from serving.http.body import JSON, request_media_type
from serving.http.log_rate_limit import LogRateLimit
from serving.http.routes import RankEndpoint, apply_version_header
from serving.page.explanation import MAX_CANDIDATES, ExplainAnswer, Explainer

EXPLAIN_S = 10.0
T = TypeVar("T")


class ExplainEndpoint(RankEndpoint):
    """Checks the admission gate of `rank` without taking a place in it."""

    route = "explain"

    def __init__(self, context: ServingContext, rank: RankEndpoint, log_rate_limit: LogRateLimit) -> None:
        super().__init__(context, rank.body_reader, log_rate_limit)
        self.gate = rank.gate
        initial = functools.cache(lambda: Replica(context.schema, context.config.seed, num_buckets=1))
        self.explainer = Explainer(context.service, initial)
        self.is_busy = False

    async def answer(self, scope: Scope, receive: Receive, until_s: float) -> ExplainAnswer:
        """Nothing is logged in any case.

        Raises:
            RequestError: 400, 404, 408, 413, 415, 500; 429: rank requests are refused, or another explanation
            is running; 504: it took more than EXPLAIN_S.
            ClientGoneError: the body did not arrive.
        """
        request_media_type(scope, (JSON,))
        request = self.json.parse(await self.body_reader.read(scope, receive, until_s))
        apply_version_header(scope, request)
        if len(request.item_ids) > MAX_CANDIDATES:
            message = (
                f"expected at most {MAX_CANDIDATES} candidates to be explained, got {len(request.item_ids)}"
            )
            raise RequestError(413, message, "$.candidates")
        self.gate.check(self.remaining_s(until_s))
        if self.is_busy:
            raise RequestError(429, "another explanation is running; try again", retry_after_s=RETRY_AFTER_S)
        self.is_busy = True
        try:
            async with asyncio.timeout(EXPLAIN_S):
                explanation = await self._run_in_scoring_thread(
                    self.explainer.begin, request, self.context.watermark.clock.now_ms()
                )
                for names in self.explainer.passes(explanation):
                    await self._run_in_scoring_thread(self.explainer.score_without, explanation, names)
                return self.explainer.build_answer(explanation)
        except TimeoutError:
            raise RequestError(
                504, f"not explained within {EXPLAIN_S:g} s", retry_after_s=RETRY_AFTER_S
            ) from None
        finally:
            self.is_busy = False

    async def _run_in_scoring_thread(self, call: Callable[..., T], *arguments: Any) -> T:
        """Run in the scoring thread, after what waits for it already."""
        return await asyncio.get_running_loop().run_in_executor(self.context.executor, call, *arguments)
