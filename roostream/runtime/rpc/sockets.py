"""Frames over blocking sockets, received into memory that is taken once a frame and only after its sizes were checked
(roostream/runtime/rpc/frames.py). Both ends of a call use these.
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import time
from collections import deque
from typing import Any

import numpy as np

from roostream.runtime.rpc import frames

MIN_BYTES_PER_S = 1e6  # of a peer that is given time by the size of what it sends or takes

_SOCKET_BYTES = 4 << 20
_RECORD_BYTES = 1 << 14  # of TLS: what one write sends at most
_MAX_BUFFERS = min(getattr(os, "sysconf", lambda _: 1024)("SC_IOV_MAX"), 1024)


def tune(connection: socket.socket) -> None:
    """Without Nagle's delay, with room for a frame on its way."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        connection.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BYTES)


def shutdown(connection: socket.socket, how: int) -> None:
    """Also when the peer was faster. Of the socket below TLS: behind SSLSocket.shutdown a thread with an answer in hand would
    send it in plain text."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connection, how)


def _limit(connection: socket.socket, deadline: float | None) -> None:
    if deadline is None:
        connection.settimeout(None)
        return
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    connection.settimeout(left)


def send(connection: socket.socket, buffers: list[Any], deadline: float | None) -> None:
    """All of them, until `deadline` (monotonic; None = however long). OSError, TimeoutError: what was sent is unknown."""
    pending = deque(memoryview(b) for b in buffers)
    while pending:
        _limit(connection, deadline)
        sent = _write(connection, pending)
        while sent and sent >= len(pending[0]):
            sent -= len(pending.popleft())
        if sent:
            pending[0] = pending[0][sent:]


def _write(connection: socket.socket, pending: deque[memoryview]) -> int:
    if not isinstance(connection, ssl.SSLSocket):
        return connection.sendmsg([pending[i] for i in range(min(len(pending), _MAX_BUFFERS))])
    if len(pending[0]) >= _RECORD_BYTES or len(pending) == 1:
        return connection.send(pending[0][:_RECORD_BYTES])
    record = bytearray()
    for buffer in pending:
        record += buffer[: _RECORD_BYTES - len(record)]
        if len(record) == _RECORD_BYTES:
            break
    return connection.send(record)


def has_news(connection: socket.socket) -> bool:
    """Whether an idle connection has bytes (none are due), or an end."""
    try:
        connection.settimeout(0)
        socket.socket.recv(connection, 1, socket.MSG_PEEK)  # below TLS, which can't peek
    except (BlockingIOError, InterruptedError):
        return False
    except OSError:
        return True
    return True


def receive(
    connection: socket.socket, deadline: float | None, max_frame_bytes: int, frame_s: float | None = None
) -> tuple[int, frames.Body, list[np.ndarray]] | None:
    """(kind, body, arrays), or None if the peer closed between two frames. `deadline` (monotonic) is the whole frame's; with
    `frame_s` it is its first byte's, and the rest has `frame_s` and the time that its size takes.

    Raises:
        WireError: not a frame of ours, too large, or damaged on its way.
        OSError: the connection broke. TimeoutError: the peer was too slow.
    """
    head = memoryview(bytearray(frames.PREFIX_BYTES))
    _limit(connection, deadline)
    got = connection.recv_into(head)
    if got == 0:
        return None
    if frame_s is not None:
        deadline = time.monotonic() + frame_s
    _fill(connection, head[got:], deadline)
    prefix = frames.parse_prefix(head, max_frame_bytes)
    if frame_s is not None and deadline is not None:
        deadline += prefix.payload_bytes / MIN_BYTES_PER_S
    header = memoryview(bytearray(prefix.header_bytes))
    _fill(connection, header, deadline)
    body = frames.parse_header(prefix, header)
    payload = np.empty(prefix.payload_bytes, dtype=np.uint8)
    _fill(connection, payload.data, deadline)
    frames.check(prefix, head, header, payload.data)
    return prefix.kind, body, frames.views(body, payload)


def _fill(connection: socket.socket, into: memoryview, deadline: float | None) -> None:
    got = 0
    while got < len(into):
        _limit(connection, deadline)
        n = connection.recv_into(into[got:])
        if n == 0:
            raise ConnectionResetError("the peer closed the connection in the middle of a frame")
        got += n
