"""`ServingClient` and `AsyncServingClient`: connections that are kept, and the driving of `attempts`; all that is said is in
serving/client/said.py, all that is decided in serving/client/retrying.py."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx2 as httpx

from roo.schema import Schema
from serving.client.retrying import Attempts, Call, Pause, Reply, RetryPolicy, Send, attempts
from serving.client.said import (
    EngagementFields,
    RankFields,
    Ranking,
    Receipt,
    decoded_as,
    engage_call,
    rank_call,
    ranking_of,
    receipt_of,
)

T = TypeVar("T")
_READY = Call("GET", "/readyz", expects=frozenset({200, 503}))
_ABOUT = Call("GET", "/", headers=(("accept", "application/json"),))


class _Caller:
    """What both have: how they are made, and what their calls are."""

    def __init__(self, schema: Schema | None, policy: RetryPolicy | None) -> None:
        self.schema, self.policy = schema, policy or RetryPolicy()

    def _begin(self, call: Call, deadline_ms: int | None) -> Attempts:
        return attempts(call, self.policy, self.policy.deadline_ms if deadline_ms is None else deadline_ms, time.monotonic)


class ServingClient(_Caller):
    """Thread-safe; keeps its connections until it is closed, or leaves its `with`.

    `schema`: ranks go as protobuf, in both directions, which costs both sides less. `key`: a bearer key, where serving asks for
    one. `tls`: authorities and a certificate of one's own, where the URL is https. `transport` stands in for the network.
    """

    def __init__(
        self,
        url: str,
        *,
        key: str = "",
        schema: Schema | None = None,
        policy: RetryPolicy | None = None,
        tls: ssl.SSLContext | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        super().__init__(schema, policy)
        self._http = httpx.Client(
            base_url=url, headers=_authorization(key), verify=tls or True, transport=transport, trust_env=False
        )

    def rank(self, fields: RankFields, deadline_ms: int | None = None) -> Ranking:
        """Rank the candidates of a request; what is shown must be `items`, in that order.

        Raises:
            ServingError: refused, or not answered within the deadline after all retries.
            WireError: with a schema: a feature isn't the schema's.
        """
        return self._done(rank_call(fields, self.schema), deadline_ms, lambda reply: ranking_of(reply, fields))

    def engage(self, fields: EngagementFields | Sequence[EngagementFields], deadline_ms: int | None = None) -> Receipt:
        """Tell what users did; may be told again as often as needed. Raises ServingError."""
        return self._done(engage_call(fields), deadline_ms, receipt_of)

    def ready(self) -> bool:
        """Whether answers are complete. Raises ServingError: nobody answers."""
        return self._done(_READY, None, lambda reply: reply.status == 200)

    def version(self) -> str:
        """Of the model in use. Raises ServingError."""
        return self._done(_ABOUT, None, _version_of)

    def close(self) -> None:
        """Its connections; it can't be used any more."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _done(self, call: Call, deadline_ms: int | None, read: Callable[[Reply], T]) -> T:
        flow = self._begin(call, deadline_ms)
        step = next(flow)
        try:
            while True:
                step = flow.send(self._do(step))
        except StopIteration as done:
            return read(done.value)

    def _do(self, step: Send | Pause) -> Reply | None:
        if isinstance(step, Pause):
            time.sleep(step.seconds)
            return None
        try:
            return _reply(self._http.request(**_request(step)))
        except httpx.TransportError as error:
            return _lost(error)


class AsyncServingClient(_Caller):
    """As ServingClient, in one event loop."""

    def __init__(
        self,
        url: str,
        *,
        key: str = "",
        schema: Schema | None = None,
        policy: RetryPolicy | None = None,
        tls: ssl.SSLContext | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        super().__init__(schema, policy)
        self._http = httpx.AsyncClient(
            base_url=url, headers=_authorization(key), verify=tls or True, transport=transport, trust_env=False
        )

    async def rank(self, fields: RankFields, deadline_ms: int | None = None) -> Ranking:
        """As ServingClient.rank."""
        return await self._done(rank_call(fields, self.schema), deadline_ms, lambda reply: ranking_of(reply, fields))

    async def engage(self, fields: EngagementFields | Sequence[EngagementFields], deadline_ms: int | None = None) -> Receipt:
        """As ServingClient.engage."""
        return await self._done(engage_call(fields), deadline_ms, receipt_of)

    async def ready(self) -> bool:
        """As ServingClient.ready."""
        return await self._done(_READY, None, lambda reply: reply.status == 200)

    async def version(self) -> str:
        """As ServingClient.version."""
        return await self._done(_ABOUT, None, _version_of)

    async def close(self) -> None:
        """Its connections; it can't be used any more."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def _done(self, call: Call, deadline_ms: int | None, read: Callable[[Reply], T]) -> T:
        flow = self._begin(call, deadline_ms)
        step = next(flow)
        try:
            while True:
                step = flow.send(await self._do(step))
        except StopIteration as done:
            return read(done.value)

    async def _do(self, step: Send | Pause) -> Reply | None:
        if isinstance(step, Pause):
            await asyncio.sleep(step.seconds)
            return None
        try:
            async with asyncio.timeout(step.left_s):
                return _reply(await self._http.request(**_request(step)))
        except TimeoutError:
            return Reply(0, {}, b"Timeout")
        except httpx.TransportError as error:
            return _lost(error)


def _authorization(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}


def _request(step: Send) -> dict[str, Any]:
    """`left_s` bounds each phase of a sync call, which has no bound over all of them; the server keeps the deadline too."""
    call = step.call
    return {"method": call.method, "url": call.path, "content": call.body, "headers": call.headers, "timeout": step.left_s}


def _reply(answer: httpx.Response) -> Reply:
    return Reply(answer.status_code, answer.headers, answer.content)


def _lost(error: httpx.TransportError) -> Reply:
    return Reply(0, {}, f"{type(error).__name__} {error}".strip().encode())


def _version_of(reply: Reply) -> str:
    return str(decoded_as(dict, reply).get("model_version", ""))
