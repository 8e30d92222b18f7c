"""Sends and receives frames over blocking sockets; used by client and server of calls.

Memory is allocated once a frame, after its sizes were checked (roostream/runtime/rpc/frames.py).
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

MIN_BYTES_PER_S = 1e6  # slowest transfer rate that time limits allow for

_SOCKET_BUFFER_BYTES = 4 << 20
_TLS_RECORD_BYTES = 1 << 14  # the most that one TLS write sends
_MAX_BUFFERS = min(getattr(os, "sysconf", lambda _: 1024)("SC_IOV_MAX"), 1024)


def set_options(connection: socket.socket) -> None:
    """Disable Nagle's algorithm, enable keep-alive, and enlarge the buffers."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        connection.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BUFFER_BYTES)


def shutdown(connection: socket.socket, how: int) -> None:
    """Shut down the socket below TLS, ignoring errors. After SSLSocket.shutdown another thread would send its
    response unencrypted."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connection, how)


def _set_timeout(connection: socket.socket, deadline: float | None) -> None:
    if deadline is None:
        connection.settimeout(None)
        return
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    connection.settimeout(left)


def send(connection: socket.socket, buffers: list[Any], deadline: float | None) -> None:
    """Send all buffers until `deadline` (monotonic time; None = no limit).

    Raises OSError or TimeoutError; it is then unknown how much was sent.
    """
    pending = deque(memoryview(b) for b in buffers)
    while pending:
        _set_timeout(connection, deadline)
        sent = _write(connection, pending)
        while sent and sent >= len(pending[0]):
            sent -= len(pending.popleft())
        if sent:
            pending[0] = pending[0][sent:]


def _write(connection: socket.socket, pending: deque[memoryview]) -> int:
    """Send as much as one call takes; return the number of bytes. Over TLS, small buffers share a record."""
    if not isinstance(connection, ssl.SSLSocket):
        return connection.sendmsg([pending[i] for i in range(min(len(pending), _MAX_BUFFERS))])
    if len(pending[0]) >= _TLS_RECORD_BYTES or len(pending) == 1:
        return connection.send(pending[0][:_TLS_RECORD_BYTES])
    record = bytearray()
    for buffer in pending:
        record += buffer[: _TLS_RECORD_BYTES - len(record)]
        if len(record) == _TLS_RECORD_BYTES:
            break
    return connection.send(record)


def has_input(connection: socket.socket) -> bool:
    """Whether an idle connection has unexpected bytes, or was closed by the peer."""
    try:
        connection.settimeout(0)
        socket.socket.recv(connection, 1, socket.MSG_PEEK)  # below TLS, which has no MSG_PEEK
    except (BlockingIOError, InterruptedError):
        return False
    except OSError:
        return True
    return True


def receive(
    connection: socket.socket, deadline: float | None, max_frame_bytes: int, frame_s: float | None = None
) -> tuple[int, frames.Body, list[np.ndarray]] | None:
    """Receive one frame as (kind, body, arrays); None if the peer closed the connection between two frames.

    `deadline` (monotonic time) is the limit of the complete frame. With `frame_s` it is the limit of the
    first byte; the rest then has `frame_s` plus a time proportional to its size.

    Raises:
        WireError: not a valid frame, too large, or damaged.
        OSError: the connection broke. TimeoutError: the peer was too slow.
    """
    head = memoryview(bytearray(frames.PREFIX_BYTES))
    _set_timeout(connection, deadline)
    got = connection.recv_into(head)
    if got == 0:
        return None
    if frame_s is not None:
        deadline = time.monotonic() + frame_s
    _fill(connection, head[got:], deadline)
    prefix = frames.parse_prefix(head, max_frame_bytes)
    if frame_s is not None and deadline is not None:
        deadline += (prefix.header_bytes + prefix.payload_bytes) / MIN_BYTES_PER_S
    header = memoryview(bytearray(prefix.header_bytes))
    _fill(connection, header, deadline)
    body = frames.parse_header(prefix, header)
    payload = np.empty(prefix.payload_bytes, dtype=np.uint8)
    _fill(connection, payload.data, deadline)
    frames.check(prefix, head, header, payload.data)
    return prefix.kind, body, frames.views(body, payload)


def _fill(connection: socket.socket, into: memoryview, deadline: float | None) -> None:
    """Receive exactly `len(into)` bytes."""
    got = 0
    while got < len(into):
        _set_timeout(connection, deadline)
        n = connection.recv_into(into[got:])
        if n == 0:
            raise ConnectionResetError("the peer closed the connection in the middle of a frame")
        got += n
