"""uvicorn's HTTP protocol with limits on what a client can hold: time in each state of a connection, bytes of
the headers, pipelined requests, and the number of connections.

A connection that breaks a limit gets an error answer, if one can still be sent, and is closed. The limits are
here because httptools collects an endless header, trailer or URL and joins it again with each piece, and
because uvicorn limits the time of idle connections only.
"""

from __future__ import annotations

import asyncio
import enum
from typing import Any

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from serving.errors import RequestError, shown
from serving.http.admission import RETRY_AFTER_S

MAX_HEAD_BYTES = 32 << 10  # request line and headers
MAX_PIPELINED = 64  # requests that wait on one connection
MAX_REST_BYTES = 16 << 20  # of a body that arrive after the request was answered
MAX_REFUSED_BYTES = 256 << 10  # that arrive after something that is not HTTP
HEAD_S = 10.0  # from connecting or from the first byte of a request until its headers are complete
REST_S = 10.0  # for the rest of a body after the request was answered
STALLED_S = 20.0  # for the client to read MIN_READ_BYTES of answers that wait
LINGER_S = 2.0  # for the client to read MIN_READ_BYTES of the last answer, while its input is discarded
MIN_READ_BYTES = 16 << 10
_SINGLE = (b"authorization", b"content-type", b"content-encoding", b"x-deadline-ms", b"x-model-version")
_UPGRADE = (b"connection", b"upgrade", b"http2-settings")


class State(enum.Enum):
    """What a connection waits for."""

    IDLE = "the next request"
    HEAD = "the rest of the headers"
    BUSY = "the application, or the body that the application reads"
    REST = "the rest of a body that is no longer needed"
    STALLED = "the client to read"
    CLOSING = "the client to close"


_SLOW = (State.HEAD, State.REST, State.STALLED)  # states that wait for the client


class OpenConnections:
    """The connections of a server that can be closed to make room for a new one, each longest first."""

    def __init__(self, max_connections: int) -> None:
        self.max_connections = max_connections
        self.idle: dict[LimitedProtocol, None] = {}
        self.slow: dict[LimitedProtocol, None] = {}  # waiting for the client, in any other state

    def moved(self, connection: LimitedProtocol, state: State | None) -> None:
        """Record the new state of a connection; None = it is closed."""
        self.idle.pop(connection, None)
        self.slow.pop(connection, None)
        if state is State.IDLE:
            self.idle[connection] = None
        elif state in _SLOW:
            self.slow[connection] = None

    def make_room(self, newcomer: LimitedProtocol) -> None:
        """Close the connection that has been idle longest, else the one that has waited longest for its
        client. If all connections are busy, refuse the new one."""
        if victim := next((c for c in self.idle if c is not newcomer), None):
            victim.close()
        elif victim := next(iter(self.slow), None):
            victim.give_way()
        else:
            message = f"{self.max_connections} connections are open, the maximum of this process; try again"
            newcomer.refuse(RequestError(503, message, retry_after_s=RETRY_AFTER_S), lingers=False)


class _LingeringTransport(asyncio.Transport):
    """A transport of which the protocol decides how it is closed. Nothing is written after that."""

    def __init__(self, transport: asyncio.Transport, protocol: LimitedProtocol) -> None:
        super().__init__()
        self.inner, self._protocol = transport, protocol

    def close(self) -> None:
        self._protocol.close()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self.is_closing():
            self.inner.write(data)

    def is_closing(self) -> bool:
        return self._protocol.state is State.CLOSING or self.inner.is_closing()

    def pause_reading(self) -> None:
        if not self.inner.is_closing():
            self.inner.pause_reading()

    def resume_reading(self) -> None:
        if not self.inner.is_closing():
            self.inner.resume_reading()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self.inner.get_extra_info(name, default)


class LimitedProtocol(HttpToolsProtocol):
    """One per connection. `limited_to` makes a subclass with `open`."""

    open = OpenConnections(1000)

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.state = State.IDLE
        self._in_head, self._refused, self._upgrades = True, False, False
        self._barren_bytes = 0  # received since the last complete headers or body part
        self._rest_bytes = 0  # received of a body after its request was answered, or while closing
        self._running: RequestResponseCycle | None = None  # the request that the application answers
        self._timer: asyncio.TimerHandle | None = None
        self._unread_bytes = 0  # of answers, when the timer was started

    @property
    def _owes_nothing(self) -> bool:
        return not self.pipeline and (self._running is None or self._running.response_complete)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(_LingeringTransport(transport, self))
        self._inner = transport
        self.open.moved(self, State.IDLE)
        self._start_timer(HEAD_S)
        if len(self.connections) > self.open.max_connections:
            self.open.make_room(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self.open.moved(self, None)
        self.state = State.CLOSING
        self.pipeline.clear()
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """A client that only listens any more gets the answers to its complete requests."""
        if self.scheme != "http" or self.state is State.CLOSING or self._owes_nothing or not self._in_head:
            return False
        self._newest.keep_alive = False
        return True

    def data_received(self, data: bytes) -> None:
        if self._refused or self.state is State.CLOSING:
            self._count_rest(len(data))
            return
        self._barren_bytes += len(data)
        self._unset_keepalive_if_required()
        self._feed(data)
        if self._barren_bytes > MAX_HEAD_BYTES:
            self.refuse(RequestError(431, f"expected at most {MAX_HEAD_BYTES} bytes of headers"))
        self._update_state()

    def _feed(self, data: bytes) -> None:
        while not self._refused:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                if self.parser.get_method() == b"CONNECT":
                    self.refuse(RequestError(400, "expected an HTTP request to this server, got CONNECT"))
                    return
                # httptools skips the body of a request with `Upgrade`. The request is parsed again without
                # it, because a server may ignore it.
                data = self._head_without_upgrade() + data[upgrade.args[0] :]
                self._upgrades = False
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            except httptools.HttpParserError:
                self.logger.warning("Invalid HTTP request received.")
                self.refuse(RequestError(400, "expected an HTTP request"))

    def _head_without_upgrade(self) -> bytes:
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self._version)]
        lines += [b"%b: %b" % header for header in self.headers if header[0] not in _UPGRADE]
        named = b",".join(value for name, value in self.headers if name == b"connection").lower()
        if b"close" in (token.strip() for token in named.split(b",")):
            lines.append(b"connection: close")
        return b"\r\n".join(lines) + b"\r\n\r\n"

    @property
    def _version(self) -> bytes:
        return self.parser.get_http_version().encode()

    def on_headers_complete(self) -> None:
        self._upgrades = self.parser.should_upgrade()
        if self._upgrades or self._refused:
            return
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        names = [name for name, _ in self.headers]
        num_hosts = names.count(b"host")
        codings = [value.strip().lower() for name, value in self.headers if name == b"transfer-encoding"]
        if num_hosts > 1 or (num_hosts == 0 and self._version == b"1.1"):  # RFC 9112, section 3.2
            self.refuse(RequestError(400, f"expected one Host header, got {num_hosts}"))
        elif repeated := next((name for name in _SINGLE if names.count(name) > 1), b""):
            self.refuse(RequestError(400, f"expected one header {repeated.decode()}, got several"))
        elif codings and codings != [b"chunked"]:  # httptools would pass on a body that is still encoded
            got = shown(b", ".join(codings).decode("latin-1"))
            self.refuse(RequestError(400, f"expected the Transfer-Encoding 'chunked', got {got!r}"))
        elif size > MAX_HEAD_BYTES:
            self.refuse(RequestError(431, f"expected at most {MAX_HEAD_BYTES} bytes of headers"))
        elif len(self.pipeline) >= MAX_PIPELINED:
            self.refuse(RequestError(429, f"more than {MAX_PIPELINED} requests wait on this connection"))
        else:
            super().on_headers_complete()
            self._in_head, self._barren_bytes = False, 0

    def on_body(self, body: bytes) -> None:
        if not self._refused:
            self._barren_bytes = 0
            if self.cycle.response_complete:
                self._count_rest(len(body))
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not (self._refused or self._upgrades):
            self._barren_bytes, self._rest_bytes, self._in_head = 0, 0, True
            super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._update_state()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._update_state()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._update_state()

    def timeout_keep_alive_handler(self) -> None:
        self.close()

    @property
    def _newest(self) -> RequestResponseCycle:
        """The newest request without a complete answer."""
        assert self._running is not None
        return self.pipeline[0][0] if self.pipeline else self._running

    def _update_state(self) -> None:
        """Each state has its own time limit, which starts when the connection enters the state."""
        if self.state is State.CLOSING:
            return
        if self.flow.write_paused:
            state = State.STALLED
        elif not self._owes_nothing:
            state = State.BUSY
        elif not self._in_head:
            state = State.REST
        else:
            state = State.HEAD if self._barren_bytes else State.IDLE
        if state is self.state:
            return
        self.state = state
        self.open.moved(self, state)
        self._stop_timer()
        if state in _SLOW:
            self._start_timer({State.HEAD: HEAD_S, State.REST: REST_S, State.STALLED: STALLED_S}[state])

    def _start_timer(self, seconds: float) -> None:
        self._unread_bytes = self._inner.get_write_buffer_size()
        self._timer = self.loop.call_later(seconds, self._is_late, seconds)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _is_late(self, seconds: float) -> None:
        self._timer = None
        if self.state in (State.STALLED, State.CLOSING):
            if self._unread_bytes - self._inner.get_write_buffer_size() >= MIN_READ_BYTES:
                self._start_timer(seconds)  # the client reads, slowly
            else:
                self._inner.abort()
        elif self.state is State.HEAD:
            message = f"expected complete headers within {HEAD_S:g} s"
            self.refuse(RequestError(408, message, code="header_timeout"))
        else:
            self.close()

    def _count_rest(self, num_bytes: int) -> None:
        self._rest_bytes += num_bytes
        if self._rest_bytes > (MAX_REFUSED_BYTES if self._refused else MAX_REST_BYTES):
            if self.state is State.CLOSING:
                self._inner.abort()
            else:
                self.close()

    def refuse(self, error: RequestError, lingers: bool = True) -> None:
        """Parse nothing more, answer complete requests, or send the error if there are none, and close; see
        `close` for `lingers`."""
        if self._refused:
            return
        self._refused = True
        if not self._in_head and self.cycle.response_complete:
            self.close(lingers)  # a second answer would be taken for that of the next request
            return
        if not self._in_head:  # the body of the newest request is invalid
            if self.pipeline:
                self.pipeline.popleft()
            else:
                self.cycle.disconnected = self.cycle.response_complete = True
                self.cycle.message_event.set()
                if self.cycle.response_started:
                    self.close()
        if not self._owes_nothing:
            self._newest.keep_alive = False
            self._update_state()
            return
        body = msgspec.json.encode(error.body())
        headers = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            **error.headers(),
            "connection": "close",
        }
        lines = b"".join(f"{name}: {value}\r\n".encode() for name, value in headers.items())
        self.transport.write(STATUS_LINE[error.status] + lines + b"\r\n" + body)
        self.close(lingers)

    def give_way(self) -> None:
        """End a connection that waits for its client, because another client needs it."""
        if self.state is State.STALLED:
            self._inner.abort()
        else:
            message = "expected a complete request; the connection is needed for another client"
            self.refuse(RequestError(408, message, code="header_timeout"), lingers=False)

    def close(self, lingers: bool = True) -> None:
        """Close, without waiting longer than LINGER_S for a client that does not read its last answer.

        While input is unread, closing a socket at once would make the kernel reset the connection, and the
        client might lose the answer. So only the output is closed, and the input is discarded. Without
        `lingers` this is not done, because the place of the connection is needed.
        """
        if self.state is State.CLOSING:
            return
        has_input = self._refused or not self._in_head or self._barren_bytes > 0 or self.flow.read_paused
        lingers = lingers and has_input
        self.state, self._rest_bytes = State.CLOSING, 0
        self.open.moved(self, None)
        self._stop_timer()
        if self._inner.is_closing():
            return
        if lingers:
            if self._inner.can_write_eof():
                self._inner.write_eof()
            self.flow.resume_reading()
        else:
            self._inner.close()
        self._start_timer(LINGER_S)


def limited_to(max_connections: int) -> type[LimitedProtocol]:
    """Return the protocol class with this limit; uvicorn creates its instances itself."""
    return type("LimitedProtocol", (LimitedProtocol,), {"open": OpenConnections(max_connections)})
