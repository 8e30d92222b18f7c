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

_PATIENCE_S = 5.0  # for the answers after the last request
_READ = 1 << 16
_END = b"\r\n\r\n"
_LAST = b"\r\nconnection: close\r\n"


class Answered(NamedTuple):
    """`status` 0: no answer came. `late_s`: how long after it was due the request was sent."""

    status: int
    took_s: float
    late_s: float
    says_when: bool  # has a Retry-After
    number: int = 0  # of the request, in their order
    body: bytes = b""  # where clients keep it


@dataclass(slots=True)
class _Line:
    """A connection; busy from a request until its whole answer is here."""

    socket: socket.socket
    due_s: float = 0.0
    late_s: float = 0.0
    number: int = 0
    received: bytearray = field(default_factory=bytearray)


class Clients:
    """Connections are kept and used again until an answer says that it is their last; more are opened when
    all are busy, up to `most`. Nothing is tried twice. With `keeps_bodies` answers have what they said. Close
    it to close them."""

    def __init__(
        self, address: tuple[str, int], requests: Sequence[bytes], most: int, keeps_bodies: bool = False
    ) -> None:
        self.address, self.requests, self.most, self.keeps_bodies = address, requests, most, keeps_bodies
        self._idle: list[_Line] = []
        self._busy: dict[int, _Line] = {}
        self._poll = select.epoll()
        self._sent = 0

    def open_loop(self, due_s: Sequence[float]) -> list[Answered]:
        """Send a request at each of these times (s from now, ascending); returns when all are answered, or
        none came for long. A request for which no connection is free is not sent: status 0."""
        began_s, out, k = time.perf_counter(), [], 0
        while k < len(due_s) or self._busy:
            now_s = time.perf_counter() - began_s
            while k < len(due_s) and due_s[k] <= now_s:
                if not self._send(began_s + due_s[k]):
                    out.append(Answered(0, 0.0, 0.0, False))
                k += 1
            if k == len(due_s) and now_s > (due_s[-1] if due_s else 0.0) + _PATIENCE_S:
                break
            out += self._receive(max(due_s[k] - now_s, 0.0) if k < len(due_s) else _PATIENCE_S)
        return out + self._give_up()

    def closed_loop(self, lines: int, seconds: float) -> list[Answered]:
        """`lines` requests always on their way, for so long."""
        until_s, out = time.perf_counter() + seconds, []
        for _ in range(lines):
            self._send(time.perf_counter())
        while self._busy and time.perf_counter() < until_s + _PATIENCE_S:
            answered = self._receive(_PATIENCE_S)
            out += answered
            for _ in answered if time.perf_counter() < until_s else ():
                self._send(time.perf_counter())
        return out + self._give_up()

    def begin_anew(self) -> None:
        """Without the connections of before: who was asked may have closed them in the meantime."""
        for line in self._idle:
            self._poll.unregister(line.socket.fileno())
            line.socket.close()
        self._idle.clear()

    def close(self) -> None:
        for line in (*self._idle, *self._busy.values()):
            line.socket.close()
        self._poll.close()

    def _send(self, due_s: float) -> bool:
        if not self._idle and len(self._busy) >= self.most:
            return False
        line = self._idle.pop() if self._idle else self._open()
        if line is None:
            return False
        line.due_s, line.late_s = due_s, time.perf_counter() - due_s
        line.number = self._sent % len(self.requests)
        self._busy[line.socket.fileno()] = line
        try:
            line.socket.sendall(self.requests[line.number])
        except ConnectionError:
            self._drop(line.socket.fileno())
            return False
        self._sent += 1
        return True

    def _open(self) -> _Line | None:
        """Blocking: a request fits into the socket's buffer, and answers are read when something came. None:
        nobody listens."""
        try:
            line = _Line(socket.create_connection(self.address, timeout=_PATIENCE_S))
        except OSError:
            return None
        line.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._poll.register(line.socket.fileno(), select.EPOLLIN)
        return line

    def _receive(self, timeout_s: float) -> list[Answered]:
        out = []
        select.select(
            (self._poll,), (), (), timeout_s
        )  # to the microsecond: epoll's own wait is rounded up to a millisecond
        for number, _ in self._poll.poll(0):
            line = self._busy.get(number)
            if line is None or not (came := _received(line.socket)):
                self._drop(number)
                out += [Answered(0, 0.0, 0.0, False)] if line is not None else []
                continue
            line.received += came
            if answered := _whole(line, self.keeps_bodies):
                out.append(answered)
                is_last = _LAST in line.received
                line.received.clear()
                if is_last:
                    self._drop(number)
                else:
                    self._idle.append(self._busy.pop(number))
        return out

    def _drop(self, number: int) -> None:
        """The server closes it, or has."""
        self._poll.unregister(number)
        for line in (*self._busy.values(), *self._idle):
            if line.socket.fileno() == number:
                line.socket.close()
                break
        self._busy.pop(number, None)
        self._idle = [line for line in self._idle if line.socket.fileno() >= 0]

    def _give_up(self) -> list[Answered]:
        given_up = list(self._busy)
        for number in given_up:
            self._drop(number)
        return [Answered(0, 0.0, 0.0, False) for _ in given_up]


def _received(connection: socket.socket) -> bytes:
    """b"" also where it was reset."""
    try:
        return connection.recv(_READ)
    except ConnectionError:
        return b""


def _whole(line: _Line, keeps_body: bool) -> Answered | None:
    """The answer, once its head and as many bytes as it says are here."""
    end = line.received.find(_END)
    if end < 0:
        return None
    head = bytes(line.received[:end]).lower()
    size = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
    if len(line.received) < end + len(_END) + size:
        return None
    body = bytes(line.received[end + len(_END) :]) if keeps_body else b""
    took_s = time.perf_counter() - line.due_s
    return Answered(int(head[9:12]), took_s, line.late_s, b"\nretry-after: " in head, line.number, body)


def rank_request(body: bytes, media: str = "application/json") -> bytes:
    """As it goes over the wire; the answer is to be of the same kind."""
    head = f"POST /v1/rank HTTP/1.1\r\nhost: bench\r\ncontent-type: {media}\r\naccept: {media}\r\ncontent-length: {len(body)}"
    return head.encode() + _END + body
