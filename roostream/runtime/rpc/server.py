"""Calls answered over TCP, with threads, one a connection; `roostream/runtime/rpc/client.py` makes them."""

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
from roostream.runtime.address import is_loopback
from roostream.runtime.rpc import frames
from roostream.runtime.rpc import sockets as connections
from roostream.runtime.rpc.security import LinkCredentials
from roostream.runtime.rpc.transport import Handler, Header

log = logging.getLogger("roostream.rpc")

FIRST_CALL_S = 10.0  # for the first byte of a connection
IDLE_S = 300.0  # between two calls; a client dials again
FRAME_S = 10.0  # within a frame, and to take an answer, beside the time for its size


@dataclasses.dataclass(eq=False)
class _Dialled:
    """One connection, as whoever looks for room sees it."""

    thread: threading.Thread
    since_s: float  # it was dialled, or its last call was answered
    has_called: bool = False
    busy: bool = False  # a call is being answered
    admitted: bool = False  # it told a token that is taken


class RpcServer:
    """Answers calls with `handler`, from one thread a connection.

    Bytes that aren't a frame of ours close their connection with one log line; the others go on. Nobody locks others out: a
    connection without a call has a time limit, and when all are taken the one that has been silent longest makes room, those
    first that never called.
    """

    def __init__(
        self,
        handler: Handler,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        max_frame_bytes: int = frames.MAX_FRAME_BYTES,
        max_connections: int = 256,
        keys: LinkCredentials | None = None,
    ) -> None:
        self.handler, self.host, self.port, self.keys = handler, host, port, keys or LinkCredentials()
        self.max_frame_bytes, self.max_connections = max_frame_bytes, max_connections
        self._listener: socket.socket | None = None
        self._connections: dict[socket.socket, _Dialled] = {}
        self._lock = threading.Lock()
        self._stopping = False
        self._acceptor: threading.Thread | None = None

    def start(self) -> RpcServer:
        """Bind and accept; self.

        Raises:
            SetupError: the port is taken, or others reach the address and nothing asks who they are.
        """
        if not (is_loopback(self.host) or self.keys.security.asks or self.keys.insecure):
            raise SetupError(
                f"expected to listen on 127.0.0.1, got {self.host!r}: calls carry no authentication; "
                "set certificate, key and ca of [link], or insecure = true if the network is yours alone"
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
        """1 accept no more, 2 let calls in hand end within `timeout_s`, 3 cut off the rest, half a second for all of them; how
        many were cut off."""
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
        for dialled in open_now.values():
            dialled.thread.join(max(deadline - time.monotonic(), 0.0))
        with self._lock:
            cut_off = sum(dialled.busy for dialled in self._connections.values())
        for connection in open_now:
            connections.shutdown(connection, socket.SHUT_RDWR)
        for dialled in open_now.values():
            dialled.thread.join(max(deadline + 0.5 - time.monotonic(), 0.0))
        return cut_off

    def _accept(self) -> None:
        assert self._listener is not None
        while not self._stopping:
            try:
                connection, peer = self._listener.accept()
                connection = self.keys.accepted(connection)
            except OSError as error:
                if (
                    not self._stopping
                ):  # out of file descriptors, most likely: connections end, then there is room again
                    log.warning("can't accept a connection: %s", error)
                    time.sleep(0.1)
                continue
            with self._lock:
                full = len(self._connections) >= self.max_connections and not self._make_room()
                if not full:
                    thread = threading.Thread(
                        target=self._serve, args=(connection, peer), name="rpc", daemon=True
                    )
                    self._connections[connection] = _Dialled(thread, time.monotonic())
            if full:
                log.warning("connection from %s refused: %d are open", peer, self.max_connections)
                connection.close()
            else:
                thread.start()

    def _make_room(self) -> bool:
        """Inside the lock: close the connection that is missed least."""
        silent = [
            (it.has_called, it.since_s, connection)
            for connection, it in self._connections.items()
            if not it.busy
        ]
        if not silent:
            return False
        *_, connection = min(silent, key=lambda entry: entry[:2])
        del self._connections[connection]
        connections.shutdown(connection, socket.SHUT_RDWR)
        log.warning("%d connections are open: a silent one is closed", self.max_connections)
        return True

    def _serve(self, connection: socket.socket, peer: object) -> None:
        try:
            connections.tune(connection)
            if isinstance(connection, ssl.SSLSocket):
                connection.settimeout(FIRST_CALL_S)
                connection.do_handshake()
            while not self._stopping and self._serve_one(connection):
                pass
        except WireError as error:
            log.warning("connection from %s closed: %s", peer, error)
        except ssl.SSLError as error:
            log.warning(
                "connection from %s closed: it could not prove who it is (%s)", peer, error.reason or error
            )
        except TimeoutError:
            log.debug("connection from %s closed: it was silent or slow for too long", peer)
        except OSError as error:
            log.debug("connection from %s ended: %s", peer, error)
        finally:
            with self._lock:
                self._connections.pop(connection, None)
            connection.close()

    def _serve_one(self, connection: socket.socket) -> bool:
        """One call; False when the peer has closed between two, or has to make room."""
        dialled = self._connections.get(connection)
        if dialled is None:
            return False
        wait_s = IDLE_S if dialled.has_called else FIRST_CALL_S
        dialled.admitted = dialled.admitted or not self.keys.tokens
        max_bytes = self.max_frame_bytes if dialled.admitted else 0
        received = connections.receive(connection, time.monotonic() + wait_s, max_bytes, FRAME_S)
        if received is None:
            return False
        dialled.busy = True
        try:
            kind, body, arrays = received
            if kind != frames.CALL or not isinstance(body.get("method"), str):
                raise WireError("undecodable", f"expected a call, got a frame of kind {kind}")
            header = body.get("header", {})
            if body["method"] == frames.GREETING or not dialled.admitted:
                answer = self._greeted(dialled, body["method"], header)
            else:
                answer = self._answer(body["method"], header, arrays)
            size_s = sum(len(buffer) for buffer in answer) / connections.MIN_BYTES_PER_S
            connections.send(connection, answer, time.monotonic() + FRAME_S + size_s)
        finally:
            dialled.busy, dialled.has_called, dialled.since_s = False, True, time.monotonic()
        return dialled.admitted

    def _greeted(self, dialled: _Dialled, method: str, header: Header) -> list[Any]:
        dialled.admitted = method == frames.GREETING and self.keys.admits(header.get("token"))
        if dialled.admitted:
            return frames.encode(frames.ANSWER, {"header": {}})
        log.warning("a caller without a token that is taken is refused")
        refused = UnavailableError(
            "expected a token that is taken here, got another or none; compare link.token_file of both"
        )
        return frames.encode(frames.ERROR, error_body(refused))

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
    """How an error travels: its class by name, its sentence, and a WireError's reason."""
    return {"error": type(error).__name__, "message": str(error), "reason": getattr(error, "reason", "")}
