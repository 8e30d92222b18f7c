"""Open-loop load generator: sends each request when it is due, whether or not earlier requests were answered.

One thread with epoll and pre-encoded requests, which reads only the status of a response: about 30 µs per
request. Latencies are measured from the due time, not from the time of sending.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

_TIMEOUT_S = 5.0  # for the answers after the last request
_READ = 1 << 16
_END = b"\r\n\r\n"
_LAST = b"\r\nconnection: close\r\n"


class Answer(NamedTuple):
    """`status` 0: no answer came. `late_s`: delay between the due time and the sending."""

    status: int
    took_s: float
    late_s: float
    has_retry_after: bool
    number: int = 0  # of the request
    body: bytes = b""  # with `keeps_bodies`


@dataclass(slots=True)
class _Connection:
    """Busy from a request until its complete answer."""

    socket: socket.socket
    due_s: float = 0.0
    late_s: float = 0.0
    number: int = 0
    received: bytearray = field(default_factory=bytearray)


class Clients:
    """Keep-alive connections, up to `max_connections`, opened when all others are busy. Nothing is retried.
    With `keeps_bodies` answers contain their bodies."""

    def __init__(
        self,
        address: tuple[str, int],
        requests: Sequence[bytes],
        max_connections: int,
        keeps_bodies: bool = False,
    ) -> None:
        self.address, self.requests = address, requests
        self.max_connections, self.keeps_bodies = max_connections, keeps_bodies
        self._idle: list[_Connection] = []
        self._busy: dict[int, _Connection] = {}
        self._poll = select.epoll()
        self._sent = 0

    def open_loop(self, due_s: Sequence[float]) -> list[Answer]:
        """Send a request at each of these times (seconds from now, ascending) and wait for the answers. A
        request without a free connection is not sent and gets status 0."""
        began_s, out, sent = time.perf_counter(), [], 0
        while sent < len(due_s) or self._busy:
            now_s = time.perf_counter() - began_s
            while sent < len(due_s) and due_s[sent] <= now_s:
                if not self._send(began_s + due_s[sent]):
                    out.append(Answer(0, 0.0, 0.0, False))
                sent += 1
            if sent == len(due_s) and now_s > (due_s[-1] if due_s else 0.0) + _TIMEOUT_S:
                break
            out += self._receive(max(due_s[sent] - now_s, 0.0) if sent < len(due_s) else _TIMEOUT_S)
        return out + self._give_up()

    def closed_loop(self, connections: int, seconds: float) -> list[Answer]:
        """Keep `connections` requests in flight for so long."""
        until_s, out = time.perf_counter() + seconds, []
        for _ in range(connections):
            self._send(time.perf_counter())
        while self._busy and time.perf_counter() < until_s + _TIMEOUT_S:
            answers = self._receive(_TIMEOUT_S)
            out += answers
            for _ in answers if time.perf_counter() < until_s else ():
                self._send(time.perf_counter())
        return out + self._give_up()

    def close_idle(self) -> None:
        """Close idle connections, which the server may have closed in the meantime."""
        for connection in self._idle:
            self._poll.unregister(connection.socket.fileno())
            connection.socket.close()
        self._idle.clear()

    def close(self) -> None:
        for connection in (*self._idle, *self._busy.values()):
            connection.socket.close()
        self._poll.close()

    def _send(self, due_s: float) -> bool:
        if not self._idle and len(self._busy) >= self.max_connections:
            return False
        connection = self._idle.pop() if self._idle else self._open()
        if connection is None:
            return False
        connection.due_s, connection.late_s = due_s, time.perf_counter() - due_s
        connection.number = self._sent % len(self.requests)
        self._busy[connection.socket.fileno()] = connection
        try:
            connection.socket.sendall(self.requests[connection.number])
        except ConnectionError:
            self._drop(connection.socket.fileno())
            return False
        self._sent += 1
        return True

    def _open(self) -> _Connection | None:
        """None: the server does not listen. Blocking, because a request fits into the socket's buffer."""
        try:
            connection = _Connection(socket.create_connection(self.address, timeout=_TIMEOUT_S))
        except OSError:
            return None
        connection.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._poll.register(connection.socket.fileno(), select.EPOLLIN)
        return connection

    def _receive(self, timeout_s: float) -> list[Answer]:
        out = []
        select.select((self._poll,), (), (), timeout_s)  # epoll's own timeout is rounded up to a millisecond
        for number, _ in self._poll.poll(0):
            connection = self._busy.get(number)
            if connection is None or not (data := _received(connection.socket)):
                self._drop(number)
                out += [Answer(0, 0.0, 0.0, False)] if connection is not None else []
                continue
            connection.received += data
            if answer := _complete(connection, self.keeps_bodies):
                out.append(answer)
                is_last = _LAST in connection.received
                connection.received.clear()
                if is_last:
                    self._drop(number)
                else:
                    self._idle.append(self._busy.pop(number))
        return out

    def _drop(self, number: int) -> None:
        """Close a connection."""
        self._poll.unregister(number)
        for connection in (*self._busy.values(), *self._idle):
            if connection.socket.fileno() == number:
                connection.socket.close()
                break
        self._busy.pop(number, None)
        self._idle = [connection for connection in self._idle if connection.socket.fileno() >= 0]

    def _give_up(self) -> list[Answer]:
        given_up = list(self._busy)
        for number in given_up:
            self._drop(number)
        return [Answer(0, 0.0, 0.0, False) for _ in given_up]


def _received(connection: socket.socket) -> bytes:
    """Empty after a reset too."""
    try:
        return connection.recv(_READ)
    except ConnectionError:
        return b""


def _complete(connection: _Connection, keeps_body: bool) -> Answer | None:
    """The answer, once its head and its body have arrived."""
    end = connection.received.find(_END)
    if end < 0:
        return None
    head = bytes(connection.received[:end]).lower()
    size = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
    if len(connection.received) < end + len(_END) + size:
        return None
    body = bytes(connection.received[end + len(_END) :]) if keeps_body else b""
    took_s = time.perf_counter() - connection.due_s
    return Answer(
        int(head[9:12]), took_s, connection.late_s, b"\nretry-after: " in head, connection.number, body
    )


def rank_request(body: bytes, media: str = "application/json") -> bytes:
    """A complete request; the answer has the same media type."""
    types = f"content-type: {media}\r\naccept: {media}"
    head = f"POST /v1/rank HTTP/1.1\r\nhost: bench\r\n{types}\r\ncontent-length: {len(body)}"
    return head.encode() + _END + body
