"""Server of calls over TCP, with one thread a connection; roostream/runtime/rpc/client.py is the client."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import socket
import ssl
import threading
import time
from typing import Any

import numpy as np

from roostream.errors import RoostreamError, SetupError, UnavailableError, WireError
from roostream.runtime.address import is_loopback, join_address
from roostream.runtime.log_rate_limit import LogRateLimit
from roostream.runtime.rpc import frames
from roostream.runtime.rpc import sockets as connections
from roostream.runtime.rpc.security import LinkCredentials
from roostream.runtime.rpc.transport import Handler, Header

log = logging.getLogger("roostream.rpc")

MAX_CONNECTIONS = 256  # each has a thread
FIRST_CALL_S = 10.0  # until the first byte of a connection
IDLE_S = 300.0  # between two calls; the client connects again later
FRAME_S = 10.0  # to receive a frame, or to send a response, plus a time proportional to its size


@dataclasses.dataclass(eq=False)
class _Connection:
    """State of one open connection."""

    thread: threading.Thread
    idle_since_s: float  # when it was opened, or its last call was answered
    has_called: bool = False
    busy: bool = False  # a call is in progress
    authenticated: bool = False  # it sent an accepted token, or none is required


class RpcServer:
    """Answers calls with `handler`, in one thread a connection.

    Bytes that are not a valid frame close their connection, with one log line. Idle connections have a time
    limit. When the maximum number of connections is reached, the one that has been idle longest is closed for
    a new one; those that never made a call are closed first.
    """

    def __init__(
        self,
        handler: Handler,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        max_frame_bytes: int = frames.MAX_FRAME_BYTES,
        max_connections: int = MAX_CONNECTIONS,
        credentials: LinkCredentials | None = None,
    ) -> None:
        self.handler = handler
        self.host = host.strip("[]")
        self.port = port
        self.credentials = credentials or LinkCredentials()
        self.max_frame_bytes, self.max_connections = max_frame_bytes, max_connections
        self._listener: socket.socket | None = None
        self._connections: dict[socket.socket, _Connection] = {}
        self._lock = threading.Lock()
        self._stopping, self._log_rate_limit = False, LogRateLimit()
        self._acceptor: threading.Thread | None = None

    def start(self) -> RpcServer:
        """Bind and accept connections. Returns self.

        Raises:
            SetupError: the port is taken, or the address is public and mutual TLS is off.
        """
        if not (
            is_loopback(self.host) or self.credentials.security.is_mutual_tls or self.credentials.insecure
        ):
            raise SetupError(
                f"expected to listen on 127.0.0.1, got {self.host!r}: calls carry no authentication; "
                "set certificate, key and ca of [link], or insecure = true if the network is yours alone"
            )
        try:
            family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
            self._listener = socket.create_server((self.host, self.port), family=family, backlog=64)
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
        """`host:port` in use; `start` chooses the port if it was 0."""
        return join_address(self.host, self.port)

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    def stop(self, timeout_s: float = 2.0) -> int:
        """Stop accepting connections, wait up to `timeout_s` for calls in progress, then close the rest
        within half a second. Returns the number of calls that were cut off."""
        self._stopping = True
        deadline = time.monotonic() + timeout_s
        if self._listener is None:
            return 0
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        if self._acceptor:
            self._acceptor.join(timeout_s)
        with self._lock:
            open_now = dict(self._connections)
        for connection in open_now:
            connections.shutdown(connection, socket.SHUT_RD)
        for client in open_now.values():
            client.thread.join(max(deadline - time.monotonic(), 0.0))
        with self._lock:
            cut_off = sum(client.busy for client in self._connections.values())
        for connection in open_now:
            connections.shutdown(connection, socket.SHUT_RDWR)
        for client in open_now.values():
            client.thread.join(max(deadline + 0.5 - time.monotonic(), 0.0))
        return cut_off

    def _accept(self) -> None:
        assert self._listener is not None
        while not self._stopping:
            try:
                connection, peer = self._listener.accept()
            except OSError as error:
                if not self._stopping:  # probably out of file descriptors; retried, because connections end
                    text = "can't accept a connection: %s"
                    self._log_rate_limit.warning(log, ("accept", error.errno), text, error)
                    time.sleep(0.1)
                continue
            try:
                self._open(connection, peer)
            except Exception as error:  # no error of one connection may end the thread that accepts all
                expected = isinstance(error, OSError | RuntimeError | MemoryError)
                log.warning("closed the connection from %s: %r", peer, error, exc_info=not expected)
                connection.close()

    def _open(self, accepted: socket.socket, peer: object) -> None:
        """Serve a connection in a thread of its own. Raises OSError, RuntimeError, MemoryError: it cannot be
        served; the caller closes it."""
        connection = self.credentials.wrap_accepted(accepted)
        with self._lock:
            full = len(self._connections) >= self.max_connections and not self._make_room()
            if not full:
                thread = threading.Thread(
                    target=self._serve, args=(connection, peer), name="rpc", daemon=True
                )
                self._connections[connection] = _Connection(thread, time.monotonic())
        if full:
            log.warning("refused a connection from %s: %d are open", peer, self.max_connections)
            connection.close()
            return
        try:
            thread.start()
        except BaseException:  # out of threads or memory
            with self._lock:
                self._connections.pop(connection, None)
            connection.close()
            raise

    def _make_room(self) -> bool:
        """Close the connection that has been idle longest. The caller holds the lock."""
        idle = [
            (it.has_called, it.idle_since_s, connection)
            for connection, it in self._connections.items()
            if not it.busy
        ]
        if not idle:
            return False
        *_, connection = min(idle, key=lambda entry: entry[:2])
        del self._connections[connection]
        connections.shutdown(connection, socket.SHUT_RDWR)
        log.warning(
            "the limit of %d open connections is reached: the one that was idle longest is closed",
            self.max_connections,
        )
        return True

    def _serve(self, connection: socket.socket, peer: object) -> None:
        try:
            connections.set_options(connection)
            if isinstance(connection, ssl.SSLSocket):
                connection.settimeout(FIRST_CALL_S)
                connection.do_handshake()
            while not self._stopping and self._serve_one(connection):
                pass
        except WireError as error:
            self._warn("wire", peer, "closed the connection from %s: %s", peer, error)
        except ssl.SSLError as error:
            text = "closed the connection from %s: TLS handshake failed (%s)"
            why = getattr(error, "verify_message", "")  # of an SSLCertVerificationError
            self._warn("tls", peer, text, peer, why or error.reason or error)
        except TimeoutError:
            log.debug("closed the connection from %s: idle or too slow", peer)
        except OSError as error:
            log.debug("connection from %s ended: %s", peer, error)
        finally:
            with self._lock:
                self._connections.pop(connection, None)
            connection.close()

    def _serve_one(self, connection: socket.socket) -> bool:
        """Serve one call; False: the peer closed the connection, or it was closed for another one."""
        client = self._connections.get(connection)
        if client is None:
            return False
        wait_s = IDLE_S if client.has_called else FIRST_CALL_S
        client.authenticated = client.authenticated or not self.credentials.tokens
        max_bytes = self.max_frame_bytes if client.authenticated else 0
        received = connections.receive(connection, time.monotonic() + wait_s, max_bytes, FRAME_S)
        if received is None:
            return False
        client.busy = True
        try:
            kind, body, arrays = received
            if kind != frames.CALL or not isinstance(body.get("method"), str):
                raise WireError("undecodable", f"expected a call, got a frame of kind {kind}")
            header = body.get("header", {})
            if body["method"] == frames.GREETING or not client.authenticated:
                answer = self._authenticate(client, connection, body["method"], header)
            else:
                answer = self._answer(body["method"], header, arrays)
            size_s = sum(len(buffer) for buffer in answer) / connections.MIN_BYTES_PER_S
            connections.send(connection, answer, time.monotonic() + FRAME_S + size_s)
        finally:
            client.busy, client.has_called, client.idle_since_s = False, True, time.monotonic()
        return client.authenticated

    def _authenticate(
        self, client: _Connection, connection: socket.socket, method: str, header: Header
    ) -> list[Any]:
        client.authenticated = method == frames.GREETING and self.credentials.accepts_token(
            header.get("token")
        )
        if client.authenticated:
            return frames.encode(frames.ANSWER, {"header": {}})
        peer = connection.getpeername()
        self._warn("token", peer, "refused a client without a valid token, from %s", peer)
        refused = UnavailableError(
            "expected a valid token, got another or none; compare link.token_file of both programs"
        )
        return frames.encode(frames.ERROR, error_body(refused))

    def _warn(self, kind: str, peer: Any, message: str, *values: object) -> None:
        """Log a line that a client can cause again and again; of each host one a minute."""
        self._log_rate_limit.warning(log, (kind, peer[0]), message, *values)

    def _answer(self, method: str, header: Header, arrays: list[np.ndarray]) -> list[Any]:
        try:
            answer, answer_arrays = self.handler(method, header, arrays)
            return frames.encode(frames.ANSWER, {"header": answer}, answer_arrays, self.max_frame_bytes)
        except RoostreamError as error:
            return frames.encode(frames.ERROR, error_body(error))
        except Exception as error:
            log.exception("call %r failed: this is a defect of Roostream", method)
            return frames.encode(
                frames.ERROR, error_body(UnavailableError(f"{method}: the peer failed: {error!r:.300}"))
            )


def error_body(error: RoostreamError) -> frames.Body:
    """An error as a message: class name, text, and a WireError's reason."""
    return {"error": type(error).__name__, "message": str(error), "reason": getattr(error, "reason", "")}
