"""Client of calls over TCP. A connection carries one call at a time; concurrent calls of several threads use
several connections.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from roostream import errors
from roostream.errors import RoostreamError, TransportError, UnavailableError, WireError
from roostream.runtime.address import parse_address
from roostream.runtime.rpc import frames
from roostream.runtime.rpc import sockets as connections
from roostream.runtime.rpc.security import LinkCredentials
from roostream.runtime.rpc.transport import Answer, Arrays, Header


class HostLookup:
    """Resolves host names within a time limit, which `socket.getaddrinfo` does not have: it runs in a thread
    that may outlive the call. Thread-safe; concurrent calls for a host share one thread."""

    def __init__(self, getaddrinfo: Callable[..., list[Any]] = socket.getaddrinfo) -> None:
        self._getaddrinfo = getaddrinfo
        self._running: dict[str, Future[list[str]]] = {}
        self._lock = threading.Lock()

    def addresses(self, host: str, timeout_s: float) -> list[str]:
        """The addresses of a host; of an address, itself. Raises OSError."""
        with contextlib.suppress(ValueError):
            return [str(ipaddress.ip_address(host))]
        with self._lock:
            answer = self._running.get(host)
            if answer is None:
                answer = Future()
                thread = threading.Thread(
                    target=self._resolve, args=(host, answer), name="lookup", daemon=True
                )
                try:
                    thread.start()
                except RuntimeError as error:  # the process or the machine has too many threads
                    raise OSError(f"the name {host} was not resolved: {error}") from None
                self._running[host] = answer
        try:
            return answer.result(max(timeout_s, 0.0))
        except TimeoutError:
            raise TimeoutError(f"the name {host} was not resolved in time") from None

    def _resolve(self, host: str, answer: Future[list[str]]) -> None:
        try:
            found = self._getaddrinfo(host, None, type=socket.SOCK_STREAM)
            answer.set_result(list(dict.fromkeys(address[0] for *_, address in found)))
        except UnicodeError:
            answer.set_exception(OSError(f"{host!r} is no host name"))
        except Exception as error:
            answer.set_exception(error)
        with self._lock:  # held by the caller until the answer is in the table
            del self._running[host]


class SocketTransport:
    """A `Transport` to "host:port". Connections are opened when needed and reused. The host name is resolved
    for each new connection, so that a peer that moved is found again."""

    def __init__(
        self,
        address: str,
        *,
        connect_timeout_s: float = 2.0,
        credentials: LinkCredentials | None = None,
        lookup: HostLookup | None = None,
    ) -> None:
        self.address, self.connect_timeout_s = address, connect_timeout_s
        self.credentials = credentials or LinkCredentials()
        self._idle: deque[socket.socket] = deque()
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._lookup = lookup or HostLookup()
        self._closed = False
        self.num_connections_opened = 0

    def call(self, method: str, header: Header, arrays: Arrays = (), *, timeout_s: float = 30.0) -> Answer:
        buffers = frames.encode(frames.CALL, {"method": method, "header": header}, arrays)
        deadline = time.monotonic() + timeout_s
        connection = self._connection(method, timeout_s)
        try:
            connections.send(connection, buffers, deadline)
            received = connections.receive(connection, deadline, frames.MAX_FRAME_BYTES)
        except (OSError, WireError) as error:
            self._drop(connection)
            reason = f"no answer within {timeout_s:g} s" if isinstance(error, TimeoutError) else str(error)
            if isinstance(error, ssl.SSLError):  # with TLS 1.3 a client's handshake ends before the server's
                reason += "; it may refuse this program's certificate, see its log"
            raise TransportError(f"{method} at {self.address}: {reason}") from None
        if received is None:
            self._drop(connection)
            raise TransportError(f"{method} at {self.address}: the peer closed the connection")
        with self._lock:
            if not self._closed:
                self._idle.append(connection)
        kind, body, answer = received
        if kind == frames.ERROR:
            raise error_of(body)
        return body.get("header", {}), answer

    def close(self) -> None:
        with self._lock:
            self._closed = True
            open_now, self._open, self._idle = self._open, set(), deque()
        for connection in open_now:
            connections.shutdown(connection, socket.SHUT_RDWR)
            connection.close()

    def _connection(self, method: str, timeout_s: float) -> socket.socket:
        """An idle connection that the peer has not closed, or a new one."""
        while True:
            with self._lock:
                if self._closed:
                    raise TransportError(f"{method} at {self.address}: this transport is closed")
                connection = self._idle.pop() if self._idle else None
            if connection is None:
                return self._connect(method, timeout_s)
            if not connections.has_input(connection):
                return connection
            self._drop(connection)

    def _connect(self, method: str, timeout_s: float) -> socket.socket:
        deadline = time.monotonic() + min(self.connect_timeout_s, timeout_s)
        host, port = parse_address(self.address)
        try:
            connection = self._dial(host.strip("[]"), port, deadline)
            connections.set_options(connection)
            connection = self.credentials.wrap_connected(connection, host)
            self._authenticate(connection, deadline)
        except OSError as error:
            raise TransportError(
                f"{method} at {self.address}: can't connect ({error.strerror or error})"
            ) from None
        with self._lock:
            if not self._closed:
                self._open.add(connection)
                self.num_connections_opened += 1
                return connection
        connection.close()
        raise TransportError(f"{method} at {self.address}: this transport was closed meanwhile")

    def _dial(self, host: str, port: int, deadline: float) -> socket.socket:
        """A connection to the first address of the host that accepts one. The addresses share what is left
        until `deadline`, so that a silent one does not take the time of all. Raises OSError."""
        refused = OSError(f"the name {host} has no address")
        addresses = self._lookup.addresses(host, deadline - time.monotonic())
        for num_left, address in zip(range(len(addresses), 0, -1), addresses, strict=True):
            limit_s = max((deadline - time.monotonic()) / num_left, 0.001)
            try:
                connection = socket.create_connection((address, port), limit_s)
            except OSError as error:
                refused = error
            else:
                connection.settimeout(max(deadline - time.monotonic(), 0.001))
                return connection
        raise refused

    def _authenticate(self, connection: socket.socket, deadline: float) -> None:
        """Send the token, if there is one. Raises the error that the peer returns, or OSError; the connection
        is closed then."""
        tokens = self.credentials.tokens
        if not tokens:
            return
        try:
            greeting = frames.encode(frames.CALL, {"method": frames.GREETING, "header": {"token": tokens[0]}})
            connections.send(connection, greeting, deadline)
            answer = connections.receive(connection, deadline, frames.MAX_FRAME_BYTES)
            if answer is None:
                raise ConnectionResetError("the peer closed the connection instead of taking the token")
            if answer[0] == frames.ERROR:
                raise error_of(answer[1])
        except WireError as error:
            connection.close()
            raise ConnectionResetError(str(error)) from None
        except BaseException:
            connection.close()
            raise

    def _drop(self, connection: socket.socket) -> None:
        with self._lock:
            self._open.discard(connection)
        connection.close()


def error_of(body: frames.Body) -> RoostreamError:
    """The error that `error_body` described, or UnavailableError for a class that isn't known here. Never a
    TransportError: this peer did answer, so the call must not be repeated."""
    name, message = str(body.get("error", "")), str(body.get("message", ""))
    cls = getattr(errors, name, None)
    if cls is TransportError:
        return UnavailableError(message)
    if cls is WireError:
        return WireError(str(body.get("reason", "")), message)
    if isinstance(cls, type) and issubclass(cls, RoostreamError):
        return cls(message)
    return UnavailableError(f"{name}: {message}")
