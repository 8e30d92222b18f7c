"""`ServingClient` and `AsyncServingClient`: connections that are kept, and the driving of `attempts`. Their calls are said
once, for both (`_Caller`); bodies and answers are in serving/client/messages.py, retries in serving/client/retry.py."""

from __future__ import annotations

import asyncio
import functools
import ssl
import time
from collections.abc import Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, overload

import httpx2 as httpx

from roostream.schema.schema import Schema
from serving.client import messages as said
from serving.client.messages import (
    ApiCall,
    EngagementFields,
    FoundItems,
    RankFields,
    Ranking,
    Receipt,
    Recommendation,
    RecommendFields,
    RetrieveFields,
    TopRanking,
)
from serving.client.retry import Attempts, Call, Pause, Reply, RetryPolicy, Send, attempts

P = ParamSpec("P")
T = TypeVar("T")
Transport = TypeVar("Transport")
_READY = Call("GET", "/readyz", expects=frozenset({200, 503}))
_ABOUT = Call("GET", "/", headers=(("accept", "application/json"),))


class _SyncOrAsync(Generic[P, T]):
    """A method that says what to ask: of the one client it is called, of the other it is awaited."""

    def __init__(self, asks: Callable[Concatenate[Any, P], ApiCall[T]]) -> None:
        self._asks = asks
        self.__doc__ = asks.__doc__

    @overload
    def __get__(self, client: None, kind: type) -> Self: ...
    @overload
    def __get__(self, client: ServingClient, kind: type) -> Callable[P, T]: ...
    @overload
    def __get__(self, client: AsyncServingClient, kind: type) -> Callable[P, Coroutine[Any, Any, T]]: ...

    def __get__(self, client: ServingClient | AsyncServingClient | None, kind: type) -> Any:
        if client is None:
            return self

        @functools.wraps(self._asks)
        def ask(*given: P.args, **named: P.kwargs) -> Any:
            return client._done(functools.partial(self._asks, client, *given, **named))

        return ask


class _Caller(Generic[Transport]):
    """How a client is made, and what it can be asked.

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
        transport: Transport | None = None,
    ) -> None:
        self.schema, self.policy = schema, policy or RetryPolicy()
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._connect(base_url=url, headers=headers, verify=tls or True, transport=transport, trust_env=False)

    @_SyncOrAsync
    def rank(self, fields: RankFields, deadline_ms: int | None = None) -> ApiCall[Ranking]:
        """Rank the candidates of a request; what is shown must be `items`, in that order.

        Raises:
            ServingError: refused, or not answered within the deadline after all retries.
            WireError: with a schema: a feature isn't the schema's.
        """
        return said.rank_exchange(fields, self.schema)._replace(deadline_ms=deadline_ms)

    @_SyncOrAsync
    def top(self, fields: RankFields, slots: int, deadline_ms: int | None = None) -> ApiCall[TopRanking]:
        """As `rank`, answered with the first `slots` alone: all are scored and logged. Raises as `rank`."""
        return said.top_exchange(fields, slots, self.schema)._replace(deadline_ms=deadline_ms)

    @_SyncOrAsync
    def retrieve(self, fields: RetrieveFields, deadline_ms: int | None = None) -> ApiCall[FoundItems]:
        """Find items of the catalogue for a request. Raises ServingError."""
        return said.retrieve_exchange(fields)._replace(deadline_ms=deadline_ms)

    @_SyncOrAsync
    def recommend(self, fields: RecommendFields, deadline_ms: int | None = None) -> ApiCall[Recommendation]:
        """Find items and rank them; what is shown must be `items`, in that order. Raises ServingError."""
        return said.recommend_exchange(fields)._replace(deadline_ms=deadline_ms)

    @_SyncOrAsync
    def engage(
        self, fields: EngagementFields | Sequence[EngagementFields], deadline_ms: int | None = None
    ) -> ApiCall[Receipt]:
        """Tell what users did; may be told again as often as needed. Raises ServingError."""
        return said.engage_exchange(fields)._replace(deadline_ms=deadline_ms)

    @_SyncOrAsync
    def ready(self) -> ApiCall[bool]:
        """Whether answers are complete. Raises ServingError: nobody answers."""
        return ApiCall(_READY, lambda reply: reply.status == 200)

    @_SyncOrAsync
    def version(self) -> ApiCall[str]:
        """Of the model in use. Raises ServingError."""
        return ApiCall(_ABOUT, lambda reply: str(said.decode_json(dict, reply).get("model_version", "")))

    def _connect(self, **settings: Any) -> None:
        raise NotImplementedError

    def _begin(self, asked: ApiCall[Any]) -> Attempts:
        deadline_ms = self.policy.deadline_ms if asked.deadline_ms is None else asked.deadline_ms
        return attempts(asked.call, self.policy, deadline_ms, time.monotonic)


class ServingClient(_Caller[httpx.BaseTransport]):
    """Thread-safe; keeps its connections until it is closed, or leaves its `with`."""

    def close(self) -> None:
        """Its connections; it can't be used any more."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _connect(self, **settings: Any) -> None:
        self._http = httpx.Client(**settings)

    def _done(self, ask: Callable[[], ApiCall[T]]) -> T:
        asked = ask()
        flow = self._begin(asked)
        step = next(flow)
        try:
            while True:
                step = flow.send(self._do(step))
        except StopIteration as done:
            return asked.read(done.value)

    def _do(self, step: Send | Pause) -> Reply | None:
        if isinstance(step, Pause):
            time.sleep(step.seconds)
            return None
        try:
            return _reply(self._http.request(**_request(step)))
        except httpx.TransportError as error:
            return _lost(error)


class AsyncServingClient(_Caller[httpx.AsyncBaseTransport]):
    """As ServingClient, in one event loop: every call is awaited."""

    async def close(self) -> None:
        """Its connections; it can't be used any more."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _connect(self, **settings: Any) -> None:
        self._http = httpx.AsyncClient(**settings)

    async def _done(self, ask: Callable[[], ApiCall[T]]) -> T:
        asked = ask()
        flow = self._begin(asked)
        step = next(flow)
        try:
            while True:
                step = flow.send(await self._do(step))
        except StopIteration as done:
            return asked.read(done.value)

    async def _do(self, step: Send | Pause) -> Reply | None:
        if isinstance(step, Pause):
            await asyncio.sleep(step.seconds)
            return None
        try:
            async with asyncio.timeout(step.remaining_s):
                return _reply(await self._http.request(**_request(step)))
        except TimeoutError:
            return Reply(0, {}, b"Timeout")
        except httpx.TransportError as error:
            return _lost(error)


def _request(step: Send) -> dict[str, Any]:
    """`remaining_s` bounds each phase of a sync call, which has no bound over all of them; the server keeps the deadline too."""
    call = step.call
    return {
        "method": call.method,
        "url": call.path,
        "content": call.body,
        "headers": call.headers,
        "timeout": step.remaining_s,
    }


def _reply(answer: httpx.Response) -> Reply:
    return Reply(answer.status_code, answer.headers, answer.content)


def _lost(error: httpx.TransportError) -> Reply:
    return Reply(0, {}, f"{type(error).__name__} {error}".strip().encode())
