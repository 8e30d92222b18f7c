"""Calls over TCP: `RpcServer` answers them with threads, one a connection; `SocketTransport` makes them.

Blocking sockets without Nagle's delay, received into memory that is taken once a frame and only after its sizes were
checked (runtime/frames.py). A connection carries one call at a time, in order; a caller that wants several at once uses
several threads, and the transport then holds several connections.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections import deque
from typing import Any

import numpy as np

from roo import errors
from roo.errors import RoostreamError, SetupError, TransportError, WireError
from runtime import frames
from runtime.address import is_loopback, parse_address
from runtime.transport import Answer, Arrays, Handler, Header

log = logging.getLogger("roostream.rpc")

_SOCKET_BYTES = 4 << 20
_MAX_BUFFERS = min(getattr(os, "sysconf", lambda _: 1024)("SC_IOV_MAX"), 1024)


class RpcServer:
    """Answers calls with `handler`, from one thread a connection.

    Bytes that aren't a frame of ours close their connection with one log line; the others go on.
    """

    def __init__(
        self,
        handler: Handler,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        max_frame_bytes: int = frames.MAX_FRAME_BYTES,
        max_connections: int = 256,
        insecure: bool = False,
    ) -> None:
        self.handler, self.host, self.port = handler, host, port
        self.max_frame_bytes, self.max_connections, self.insecure = max_frame_bytes, max_connections, insecure
        self._listener: socket.socket | None = None
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._busy: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._stopping = False
        self._acceptor: threading.Thread | None = None

    def start(self) -> RpcServer:
        """Bind and accept; self.

        Raises:
            SetupError: the port is taken, or the address is not loopback and `insecure` was not given.
        """
        if not is_loopback(self.host) and not self.insecure:
            raise SetupError(
                f"expected to listen on 127.0.0.1, got {self.host!r}: calls carry no authentication; "
                "set insecure = true if the network is yours alone"
            )
        try:
            self._listener = socket.create_server((self.host, self.port), backlog=64)
        except (OSError, OverflowError) as error:
            raise SetupError(
                f"{self.host}:{self.port} can't be listened on ({error}); choose another port, or 0 for any"
            ) from None
        self.port = self._listener.getsockname()[1]
        self._acceptor = threading.Thread(target=self._accept, name="rpc-accept", daemon=True)
        self._acceptor.start()
        return self

    @property
    def address(self) -> str:
        """`host:port` in use; the port is drawn by `start` if it was 0."""
        return f"{self.host}:{self.port}"

    def stop(self, timeout_s: float = 2.0) -> int:
        """1 accept no more, 2 let calls in hand end within `timeout_s`, 3 cut off the rest; how many were cut off."""
        self._stopping = True
        if self._listener is None:
            return 0
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        if self._acceptor:
            self._acceptor.join(timeout_s)
        deadline = time.monotonic() + timeout_s
        with self._lock:
            open_now = dict(self._connections)
        for connection in open_now:
            _shutdown(connection, socket.SHUT_RD)
        for thread in open_now.values():
            thread.join(max(deadline - time.monotonic(), 0.0))
        with self._lock:
            cut_off = len(self._busy)
        for connection in open_now:
            _shutdown(connection, socket.SHUT_RDWR)
        for thread in open_now.values():
            thread.join(0.2)
        return cut_off

    def _accept(self) -> None:
        assert self._listener is not None
        while not self._stopping:
            try:
                connection, peer = self._listener.accept()
            except OSError as error:
                if not self._stopping:  # out of file descriptors, most likely: connections end, then there is room again
                    log.warning("can't accept a connection: %s", error)
                    time.sleep(0.1)
                continue
            with self._lock:
                full = len(self._connections) >= self.max_connections
                if not full:
                    thread = threading.Thread(target=self._serve, args=(connection, peer), name="rpc", daemon=True)
                    self._connections[connection] = thread
            if full:
                log.warning("connection from %s refused: %d are open", peer, self.max_connections)
                connection.close()
            else:
                thread.start()

    def _serve(self, connection: socket.socket, peer: object) -> None:
        try:
            _tune(connection)
            while not self._stopping and self._serve_one(connection):
                pass
        except WireError as error:
            log.warning("connection from %s closed: %s", peer, error)
        except OSError as error:
            log.debug("connection from %s ended: %s", peer, error)
        finally:
            with self._lock:
                del self._connections[connection]
            connection.close()

    def _serve_one(self, connection: socket.socket) -> bool:
        """One call; False when the peer has closed between two."""
        received = _receive(connection, None, self.max_frame_bytes)
        if received is None:
            return False
        with self._lock:
            self._busy.add(connection)
        try:
            kind, body, arrays = received
            if kind != frames.CALL or not isinstance(body.get("method"), str):
                raise WireError("undecodable", f"expected a call, got a frame of kind {kind}")
            _send(connection, self._answer(body["method"], body.get("header", {}), arrays), None)
        finally:
            with self._lock:
                self._busy.discard(connection)
        return True

    def _answer(self, method: str, header: Header, arrays: list[np.ndarray]) -> list[Any]:
        try:
            answer, answer_arrays = self.handler(method, header, arrays)
            return frames.encode(frames.ANSWER, {"header": answer}, answer_arrays, self.max_frame_bytes)
        except RoostreamError as error:
            return frames.encode(frames.ERROR, error_body(error))
        except Exception as error:
            log.exception("call %r failed: this is a defect of Roostream", method)
            return frames.encode(frames.ERROR, error_body(TransportError(f"{method}: the peer failed: {error!r:.300}")))


class SocketTransport:
    """A Transport to `"host:port"`. Connections are dialled when needed and kept for the next call; see
    `runtime.transport.Transport` for what a failure means."""

    def __init__(self, address: str, *, dial_timeout_s: float = 2.0, max_frame_bytes: int = frames.MAX_FRAME_BYTES) -> None:
        self.address, self.dial_timeout_s, self.max_frame_bytes = address, dial_timeout_s, max_frame_bytes
        self._idle: deque[socket.socket] = deque()
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closed = False

    def call(self, method: str, header: Header, arrays: Arrays = (), *, timeout_s: float = 30.0) -> Answer:
        buffers = frames.encode(frames.CALL, {"method": method, "header": header}, arrays, self.max_frame_bytes)
        deadline = time.monotonic() + timeout_s
        connection = self._take(method, timeout_s)
        try:
            _send(connection, buffers, deadline)
            received = _receive(connection, deadline, self.max_frame_bytes)
        except (OSError, WireError) as error:
            self._drop(connection)
            reason = f"no answer within {timeout_s:g} s" if isinstance(error, TimeoutError) else str(error)
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
            connections, self._open, self._idle = self._open, set(), deque()
        for connection in connections:
            _shutdown(connection, socket.SHUT_RDWR)
            connection.close()

    def _take(self, method: str, timeout_s: float) -> socket.socket:
        """An idle connection that the peer hasn't closed, or a new one."""
        while True:
            with self._lock:
                if self._closed:
                    raise TransportError(f"{method} at {self.address}: this transport is closed")
                connection = self._idle.pop() if self._idle else None
            if connection is None:
                return self._dial(method, timeout_s)
            if not _peer_closed(connection):
                return connection
            self._drop(connection)

    def _dial(self, method: str, timeout_s: float) -> socket.socket:
        try:
            connection = socket.create_connection(parse_address(self.address), min(self.dial_timeout_s, timeout_s))
        except OSError as error:
            raise TransportError(f"{method} at {self.address}: can't connect ({error})") from None
        _tune(connection)
        with self._lock:
            self._open.add(connection)
        return connection

    def _drop(self, connection: socket.socket) -> None:
        with self._lock:
            self._open.discard(connection)
        connection.close()


def error_body(error: RoostreamError) -> frames.Body:
    """How an error travels: its class by name, its sentence, and a WireError's reason."""
    return {"error": type(error).__name__, "message": str(error), "reason": getattr(error, "reason", "")}


def error_of(body: frames.Body) -> RoostreamError:
    """The error that `error_body` described; of an unknown class, TransportError."""
    name, message = str(body.get("error", "")), str(body.get("message", ""))
    cls = getattr(errors, name, None)
    if cls is WireError:
        return WireError(str(body.get("reason", "")), message)
    if isinstance(cls, type) and issubclass(cls, RoostreamError):
        return cls(message)
    return TransportError(f"{name}: {message}")


def _tune(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        connection.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BYTES)


def _shutdown(connection: socket.socket, how: int) -> None:
    with contextlib.suppress(OSError):  # the peer was faster
        connection.shutdown(how)


def _peer_closed(connection: socket.socket) -> bool:
    """Whether an idle connection has bytes (none are due) or an end: either way it can't carry another call."""
    try:
        connection.settimeout(0)
        connection.recv(1, socket.MSG_PEEK)
    except (BlockingIOError, InterruptedError):
        return False
    except OSError:
        return True
    return True


def _limit(connection: socket.socket, deadline: float | None) -> None:
    if deadline is None:
        connection.settimeout(None)
        return
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    connection.settimeout(left)


def _send(connection: socket.socket, buffers: list[Any], deadline: float | None) -> None:
    pending = deque(memoryview(b) for b in buffers)
    while pending:
        _limit(connection, deadline)
        sent = connection.sendmsg([pending[i] for i in range(min(len(pending), _MAX_BUFFERS))])
        while sent and sent >= len(pending[0]):
            sent -= len(pending.popleft())
        if sent:
            pending[0] = pending[0][sent:]


def _receive(
    connection: socket.socket, deadline: float | None, max_frame_bytes: int
) -> tuple[int, frames.Body, list[np.ndarray]] | None:
    """(kind, body, arrays), or None if the peer closed between two frames."""
    head = memoryview(bytearray(frames.PREFIX_BYTES))
    if not _fill(connection, head, deadline, end_is_fine=True):
        return None
    prefix = frames.parse_prefix(head, max_frame_bytes)
    header = memoryview(bytearray(prefix.header_bytes))
    _fill(connection, header, deadline)
    body = frames.parse_header(prefix, header)
    payload = np.empty(prefix.payload_bytes, dtype=np.uint8)
    _fill(connection, payload.data, deadline)
    return prefix.kind, body, frames.views(body, payload)


def _fill(connection: socket.socket, into: memoryview, deadline: float | None, end_is_fine: bool = False) -> bool:
    got = 0
    while got < len(into):
        _limit(connection, deadline)
        n = connection.recv_into(into[got:])
        if n == 0:
            if got == 0 and end_is_fine:
                return False
            raise ConnectionResetError("the peer closed the connection in the middle of a frame")
        got += n
    return True
