"""Limit of the rpc benchmark: the same bytes over a loopback socket with an 8-byte length. Standard library
only."""

from __future__ import annotations

import contextlib
import mmap
import socket
import struct
import threading
from collections.abc import Callable, Iterator

from benchmarks.common.peer_process import peer_address, print_address_and_wait
from benchmarks.harness.benchmark import Work

_LENGTHS = struct.Struct("<II")  # bytes that follow, bytes wanted back
_SOCKET_BYTES = 4 << 20
_MAX_BYTES = 16 << 20


@contextlib.contextmanager
def send(num_bytes: int) -> Iterator[Work]:
    with _connection() as connection:
        yield Work(_exchange(connection, _memory(num_bytes), 8), num_bytes / 1e6)


@contextlib.contextmanager
def receive(num_bytes: int) -> Iterator[Work]:
    with _connection() as connection:
        yield Work(_exchange(connection, b"", num_bytes), num_bytes / 1e6)


@contextlib.contextmanager
def small() -> Iterator[Work]:
    with _connection() as connection:
        yield Work(_exchange(connection, bytes(64), 64))


def _memory(num_bytes: int) -> memoryview:
    """Written once, in large pages where the system has them, as numpy's arrays are: copying is faster
    then."""
    memory = mmap.mmap(-1, max(num_bytes, mmap.PAGESIZE), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(memory)
    view[:] = bytes(len(view))
    return view[:num_bytes]


def _exchange(connection: socket.socket, payload: bytes | memoryview, wanted: int) -> Callable[[], None]:
    head, target = _LENGTHS.pack(len(payload), wanted), _memory(wanted)
    view = memoryview(payload)

    def step() -> None:
        sent = connection.sendmsg((head, view)) - len(head)
        while sent < len(view):
            sent += connection.send(view[sent:])
        _fill(connection, target)

    return step


@contextlib.contextmanager
def _connection() -> Iterator[socket.socket]:
    with peer_address("benchmarks.common.rpc_socket") as address:
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port))) as connection:
            _tune(connection)
            yield connection


def _tune(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        connection.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BYTES)


def _fill(connection: socket.socket, target: memoryview) -> bool:
    got = 0
    while got < len(target):
        received = connection.recv_into(target[got:])
        if not received:
            return False
        got += received
    return True


def _serve(listener: socket.socket) -> None:
    head, space, answer = memoryview(bytearray(_LENGTHS.size)), _memory(_MAX_BYTES), _memory(_MAX_BYTES)
    while True:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(ConnectionError):
            _tune(connection)
            while _fill(connection, head):
                follows, wanted = _LENGTHS.unpack(head)
                _fill(connection, space[:follows])
                connection.sendall(answer[:wanted])


if __name__ == "__main__":
    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=_serve, args=(listening,), daemon=True).start()
        print_address_and_wait(f"127.0.0.1:{listening.getsockname()[1]}")
