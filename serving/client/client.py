"""`ServingClient` and `AsyncServingClient`. Their methods are declared once (`_Caller`); messages are in
serving/client/messages.py, retries in serving/client/retry.py.
"""

from __future__ import annotations

import asyncio
import functools
import os
import ssl
import time
from collections.abc import Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, overload

import httpx2 as httpx

from roostream.errors import ConfigError
from roostream.schema.schema import Schema
from serving.client import messages
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
_LATE = Reply(0, {}, b"Timeout")
_READY = Call("GET", "/readyz", expects=frozenset({200, 503}))
_ABOUT = Call("GET", "/", headers=(("accept", "application/json"),))


class _SyncOrAsync(Generic[P, T]):
    """A method that returns an ApiCall. The sync client executes it; the async client returns a coroutine
    that does."""

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
            return client.execute(functools.partial(self._asks, client, *given, **named))

        return ask


class _Caller(Generic[Transport]):
    """The constructor and the methods of both clients.

    `schema`: with it, rank requests and answers are protobuf, which is cheaper for both sides. `key`: a
    bearer key, if serving requires one. `tls`: own certificate authorities or client certificate for https.
    `transport` replaces the network. Raises ConfigError: the url, the key or the schema is invalid.

    A forked process opens connections of its own: on a shared one it would read the answers to its parent.
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
        if not isinstance(schema, Schema | None):
            raise ConfigError(f"expected a schema as load_schema returns it, got {type(schema).__name__}")
        self.schema, self.policy = schema, policy or RetryPolicy()
        headers = {"authorization": f"Bearer {_checked_key(key)}"} if key else {}
        self._settings: dict[str, Any] = {
            "base_url": _checked_url(url),
            "headers": headers,
            "verify": tls or True,
            "transport": transport,
            "trust_env": False,
        }
        self._open()

    @_SyncOrAsync
    def rank(self, fields: RankFields, deadline_ms: int | None = None) -> ApiCall[Ranking]:
        """Rank the candidates of a request. Show `items` of the answer, in that order.

        Raises:
            ServingError: refused, or not answered within the deadline after all retries.
            WireError: with a schema: a feature does not fit the schema.
        """
        return messages.rank_exchange(fields, self.schema)._replace(deadline_ms=deadline_ms)

    @_SyncOrAsync
    def top(self, fields: RankFields, slots: int, deadline_ms: int | None = None) -> ApiCall[TopRanking]:
        """As `rank`, but the answer has only the first `slots`; all candidates are scored and logged. Raises
        as `rank`."""
        return messages.top_exchange(fields, slots, self.schema)._replace(deadline_ms=deadline_ms)

    @_SyncOrAsync
    def retrieve(self, fields: RetrieveFields, deadline_ms: int | None = None) -> ApiCall[FoundItems]:
        """Find items of the catalogue for a request. Raises ServingError."""
        return messages.retrieve_exchange(fields)._replace(deadline_ms=deadline_ms)

    @_SyncOrAsync
    def recommend(self, fields: RecommendFields, deadline_ms: int | None = None) -> ApiCall[Recommendation]:
        """Find items and rank them. Show `items` of the answer, in that order. Raises ServingError."""
        return messages.recommend_exchange(fields)._replace(deadline_ms=deadline_ms)

    @_SyncOrAsync
    def engage(
        self, fields: EngagementFields | Sequence[EngagementFields], deadline_ms: int | None = None
    ) -> ApiCall[Receipt]:
        """Send engagements. Repeating a call is safe. Raises ServingError."""
        return messages.engage_exchange(fields)._replace(deadline_ms=deadline_ms)

    @_SyncOrAsync
    def ready(self) -> ApiCall[bool]:
        """Whether serving is ready, so that answers are complete. Raises ServingError: no answer."""
        return ApiCall(_READY, lambda reply: reply.status == 200)

    @_SyncOrAsync
    def version(self) -> ApiCall[str]:
        """The model version in use. Raises ServingError."""
        return ApiCall(_ABOUT, lambda reply: str(messages.decode_json(dict, reply).get("model_version", "")))

    def _open(self) -> None:
        """Called once, by the thread that makes the client."""

    def _begin(self, api_call: ApiCall[Any]) -> Attempts:
        deadline_ms = self.policy.deadline_ms if api_call.deadline_ms is None else api_call.deadline_ms
        return attempts(api_call.call, self.policy, deadline_ms, time.monotonic)


class ServingClient(_Caller[httpx.BaseTransport]):
    """Thread-safe. Keeps its connections open until `close`, or the end of its `with` block."""

    _held: tuple[int, httpx.Client] | None = None  # connections, and the process that opened them

    def close(self) -> None:
        """Close the connections; the client cannot be used any more."""
        self._connections().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> None:
        self._connections()

    def _connections(self) -> httpx.Client:
        """The connections of this process."""
        owner, held = os.getpid(), self._held
        if held is None or (held[0] != owner and not held[1].is_closed):
            self._held = held = owner, httpx.Client(**self._settings)
        return held[1]

    def execute(self, build_call: Callable[[], ApiCall[T]]) -> T:
        api_call = build_call()
        flow = self._begin(api_call)
        step = next(flow)
        try:
            while True:
                step = flow.send(self._do(step))
        except StopIteration as done:
            return api_call.read(done.value)

    def _do(self, step: Send | Pause) -> Reply | None:
        if isinstance(step, Pause):
            time.sleep(step.seconds)
            return None
        until_s, body = time.monotonic() + step.remaining_s, b""
        try:
            with self._connections().stream(**_request(step)) as answer:
                for chunk in answer.iter_bytes():
                    if time.monotonic() > until_s:
                        return _LATE
                    body += chunk
        except httpx.RequestError as error:
            return _lost(error)
        return Reply(answer.status_code, answer.headers, body)


class AsyncServingClient(_Caller[httpx.AsyncBaseTransport]):
    """As ServingClient, but every call is awaited. Each event loop gets connections of its own; a change from
    one loop to another opens new ones, so keep one loop."""

    _held: tuple[tuple[int, asyncio.AbstractEventLoop], httpx.AsyncClient] | None = None

    async def close(self) -> None:
        """Close the connections; the client cannot be used any more."""
        await self._connections().aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _connections(self) -> httpx.AsyncClient:
        """The connections of this process and event loop."""
        owner, held = (os.getpid(), asyncio.get_running_loop()), self._held
        if held is None or (held[0] != owner and not held[1].is_closed):
            self._held = held = owner, httpx.AsyncClient(**self._settings)
        return held[1]

    async def execute(self, build_call: Callable[[], ApiCall[T]]) -> T:
        api_call = build_call()
        flow = self._begin(api_call)
        step = next(flow)
        try:
            while True:
                step = flow.send(await self._do(step))
        except StopIteration as done:
            return api_call.read(done.value)

    async def _do(self, step: Send | Pause) -> Reply | None:
        if isinstance(step, Pause):
            await asyncio.sleep(step.seconds)
            return None
        try:
            async with asyncio.timeout(step.remaining_s):
                answer = await self._connections().request(**_request(step))
        except TimeoutError:
            return _LATE
        except httpx.RequestError as error:
            return _lost(error)
        return Reply(answer.status_code, answer.headers, answer.content)


def _checked_url(url: str) -> httpx.URL:
    """Raises ConfigError: it is not an address of http or https."""
    try:
        parsed = httpx.URL(url)
        is_address = parsed.scheme in ("http", "https") and bool(parsed.host)
    except (httpx.InvalidURL, TypeError):
        is_address = False
    if not is_address:
        raise ConfigError(f"expected a url such as http://serving:8080, got {url!r}")
    return parsed


def _checked_key(key: str) -> str:
    """The key without the white space around it, which a file has. Raises ConfigError, which does not repeat
    the key: it cannot stand in a header."""
    key = key.strip()
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError("expected a key as one word of ASCII text, as `roostream keys new` prints it")
    return key


def _request(step: Send) -> dict[str, Any]:
    """`remaining_s` bounds each wait of a sync call for the network. The body of its answer also has to be
    complete by then."""
    call = step.call
    return {
        "method": call.method,
        "url": call.path,
        "content": call.body,
        "headers": call.headers,
        "timeout": step.remaining_s,
    }


def _lost(error: httpx.RequestError) -> Reply:
    return Reply(0, {}, f"{type(error).__name__} {error}".strip().encode())
