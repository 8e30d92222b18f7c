"""uvicorn's HTTP protocol with limits: bytes and time of the headers, pipelined requests, and the number of
connections.

A connection that breaks a limit gets an error answer, if one can still be sent, and is closed. The limits are
here because httptools collects an endless header, trailer or URL and joins it again with each piece, and
because uvicorn never closes a connection that stays silent before its first request or in the middle of its
headers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from serving.errors import RequestError
from serving.http.admission import RETRY_AFTER_S
from serving.http.fast_path import PATH, WholeRanks, is_whole_post

MAX_HEAD_BYTES = 32 << 10  # request line and headers
MAX_PIPELINED = 64  # requests that wait on one connection
HEAD_S = 10.0  # from the first byte of a request (or from connecting) until its headers are complete
LINGER_S = 5.0  # for the client to receive the last answer
# A larger request rarely arrives in one piece, so the fast path does not look at it
_MAX_WHOLE = MAX_HEAD_BYTES


class LimitedProtocol(HttpToolsProtocol):
    """One per connection. `limited_to` makes a subclass with `max_connections`, `refuses` and `whole`."""

    max_connections = 1000
    whole: WholeRanks | None = None  # the fast path (serving/http/fast_path.py); None = off

    @staticmethod
    def refuses(data: bytes) -> bytes | None:
        """The answer to a request that is refused without parsing it (serving/http/fast_path.py)."""
        return None

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._in_head, self._refused = True, False
        self._barren_bytes = 0  # received since the last complete headers or body part
        self._head_timer: asyncio.TimerHandle | None = None
        self.active_s = self.head_began_s = time.monotonic()
        self._whole: list[bytes] | None = None  # body parts, while the fast path parses a request
        self._is_complete = False  # the parser agrees that the request is complete
        # A fast-path request is being answered; its answer is the connection's last
        self._asks = self._is_last = False
        self._held = b""  # received meanwhile

    @property
    def is_idle(self) -> bool:
        """Between requests; no byte of the next one has arrived."""
        return self._in_head and not self._barren_bytes and self._owes_nothing

    @property
    def is_in_head(self) -> bool:
        """Some headers of a request have arrived, not all, and nothing else is in progress."""
        return self._in_head and self._barren_bytes > 0 and self._owes_nothing and not self._refused

    @property
    def _owes_nothing(self) -> bool:
        return not self._asks and (self.cycle is None or self.cycle.response_complete)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._time_head()
        if len(self.connections) > self.max_connections:
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_here()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self.active_s = time.monotonic()
        if self._asks:
            self._hold(data)
            return
        if self.is_idle and not self.flow.write_paused:
            if (answer := self.refuses(data)) is not None:
                self._answer_at_once(answer)
                return
            if (
                self.whole is not None
                and self.whole.is_open
                and len(data) <= _MAX_WHOLE
                and is_whole_post(data, PATH)
            ):
                self._ask_whole(self.whole, data)
                return
        self._barren_bytes += len(data)
        if self._in_head and self._head_timer is None:
            self._time_head()
        super().data_received(data)
        if self._barren_bytes > MAX_HEAD_BYTES:
            self._refuse_head()

    def on_message_begin(self) -> None:
        if self._whole is not None:
            self.url, self.headers = b"", []
            return
        super().on_message_begin()
        if self._head_timer is None:
            self._time_head()

    def on_headers_complete(self) -> None:
        if self._whole is not None:
            return
        self._head_is_here()
        self._in_head = False
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > MAX_HEAD_BYTES:
            self._refuse_head()
        elif len(self.pipeline) >= MAX_PIPELINED:
            self.refuse(RequestError(429, f"more than {MAX_PIPELINED} requests wait on this connection"))
        if not self._refused:
            self._barren_bytes = 0
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if self._whole is not None:
            self._whole.append(body)
            return
        self._barren_bytes = 0
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._whole is not None:
            self._is_complete = True
            return
        self._barren_bytes, self._in_head = 0, True
        if not self._refused:
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn for input that is not HTTP."""
        self.refuse(RequestError(400, "expected an HTTP request"))

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self.close()

    def timeout_keep_alive_handler(self) -> None:
        """uvicorn starts this timer only after its own answers, so a fast-path answer may be more recent."""
        remaining_s = self.active_s + self.timeout_keep_alive - time.monotonic()
        if self._asks or remaining_s > 0:
            self._time_keep_alive(max(remaining_s, 1.0))
        else:
            self.close()

    def shutdown(self) -> None:
        if self._asks:
            self._is_last = True
            return
        super().shutdown()
        if self.transport.is_closing():
            self.close()

    def _ask_whole(self, whole: WholeRanks, data: bytes) -> None:
        """Parse a complete request without uvicorn's request cycle."""
        self._head_is_here()
        parts: list[bytes] = []
        self._whole, self._is_complete = parts, False
        try:
            self.parser.feed_data(data)
            query = httptools.parse_url(self.url).query if b"?" in self.url else b""
        except httptools.HttpParserError:
            self._is_complete = False
        finally:
            self._whole = None
        if not self._is_complete:
            self.send_400_response("")
            return
        self._asks = True
        whole.take(
            {"type": "http", "headers": self.headers, "query_string": query or b""}, b"".join(parts), self
        )

    def answer_whole(self, status: int, body: bytes, headers: list[tuple[bytes, bytes]]) -> None:
        """See `serving.http.fast_path.AskingConnection`."""
        self._asks = False
        if self.transport.is_closing():
            return
        lines = [*self.server_state.default_headers, *headers, (b"content-length", str(len(body)).encode())]
        self._is_last |= (b"connection", b"close") in lines
        if self._is_last and (b"connection", b"close") not in lines:
            lines.append((b"connection", b"close"))
        self.transport.write(
            STATUS_LINE[status] + b"".join([b"%b: %b\r\n" % line for line in lines]) + b"\r\n" + body
        )
        if self._is_last:
            self.close()
        elif self.timeout_keep_alive_task is None:
            self._time_keep_alive(self.timeout_keep_alive)
        if self._held:
            self._go_on()

    def _hold(self, data: bytes) -> None:
        """Keep input until the current request is answered."""
        self._held += data
        self.flow.pause_reading()

    def _go_on(self) -> None:
        data, self._held = self._held, b""
        self.flow.resume_reading()
        if not self.transport.is_closing():
            self.data_received(data)

    def _time_keep_alive(self, seconds: float) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(seconds, self.timeout_keep_alive_handler)

    def _answer_at_once(self, answer: bytes) -> None:
        """Send an answer without the parser; the connection stays open as after any other answer."""
        self._head_is_here()
        self.transport.write(answer)
        if self.timeout_keep_alive_task is None:
            self._time_keep_alive(self.timeout_keep_alive)

    def _time_head(self) -> None:
        self.head_began_s = time.monotonic()
        self._head_timer = self.loop.call_later(HEAD_S, self._head_is_late)

    def _head_is_here(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self._barren_bytes:
            self.refuse(
                RequestError(408, f"expected complete headers within {HEAD_S:g} s", code="header_timeout")
            )
        else:
            self.close()

    def _refuse_head(self) -> None:
        self.refuse(RequestError(431, f"expected at most {MAX_HEAD_BYTES} bytes of headers"))

    def _make_room(self) -> None:
        """Close the connection that has been idle longest, else the one whose headers have been incomplete
        longest, so that slow clients do not keep others out. If all connections are busy, refuse the new one.
        """
        others = [c for c in self.connections if c is not self and isinstance(c, LimitedProtocol)]
        idle = min((c for c in others if c.is_idle), key=lambda c: c.active_s, default=None)
        slow = min((c for c in others if c.is_in_head), key=lambda c: c.head_began_s, default=None)
        if idle is not None:
            idle.close()
        elif slow is not None:
            slow.refuse(
                RequestError(
                    408,
                    "expected complete headers; the connection is needed for another client",
                    code="header_timeout",
                )
            )
        else:
            message = f"{self.max_connections} connections are open, the maximum of this process; try again"
            self.refuse(RequestError(503, message, retry_after_s=RETRY_AFTER_S))

    def refuse(self, error: RequestError) -> None:
        """Send an error and close. A request that is being answered on this connection is cut off."""
        if self._refused:
            return
        self._refused = True
        self._head_is_here()
        body = msgspec.json.encode(error.body())
        headers = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            **error.headers(),
            "connection": "close",
        }
        lines = b"".join(f"{name}: {value}\r\n".encode() for name, value in headers.items())
        if self._owes_nothing:
            self.transport.write(STATUS_LINE[error.status] + lines + b"\r\n" + body)
        self.close()

    def close(self) -> None:
        """Close without waiting for a client that does not read its last answer."""
        if not self.transport.is_closing():
            self.transport.close()
        self.loop.call_later(LINGER_S, self.transport.abort)


def limited_to(
    max_connections: int, refuses: Callable[[bytes], bytes | None], whole: WholeRanks | None = None
) -> type[LimitedProtocol]:
    """Return the protocol class with these limits; uvicorn creates its instances itself."""
    own = {"max_connections": max_connections, "refuses": staticmethod(refuses), "whole": whole}
    return type("LimitedProtocol", (LimitedProtocol,), own)
