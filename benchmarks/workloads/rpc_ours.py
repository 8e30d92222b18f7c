"""Our calls over TCP, to a server in a process of its own; as a module, that server."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np

from benchmarks.question import Work
from benchmarks.workloads.server import listen_until_told, serving
from runtime.rpc_client import SocketTransport
from runtime.rpc_server import RpcServer
from runtime.transport import Header

MB = 1e6


@contextlib.contextmanager
def send(num_bytes: int) -> Iterator[Work]:
    """An array to the server, a small answer back; MB."""
    with _client() as transport:
        payload = np.ones(num_bytes // 4, np.float32)
        yield Work(lambda: transport.call("take", {}, [payload]), num_bytes / MB)


@contextlib.contextmanager
def receive(num_bytes: int) -> Iterator[Work]:
    with _client() as transport:
        yield Work(lambda: transport.call("give", {"bytes": num_bytes}), num_bytes / MB)


@contextlib.contextmanager
def small() -> Iterator[Work]:
    """One call at a time, 64 bytes each way."""
    with _client() as transport:
        payload = np.ones(16, np.float32)
        yield Work(lambda: transport.call("echo", {}, [payload]))


@contextlib.contextmanager
def _client() -> Iterator[SocketTransport]:
    with serving("benchmarks.workloads.rpc_ours") as address:
        transport = SocketTransport(address)
        try:
            yield transport
        finally:
            transport.close()


def _handle(method: str, header: Header, arrays: list[np.ndarray]) -> tuple[Header, Sequence[np.ndarray]]:
    if method == "give":
        return {}, [_GIVEN.setdefault(header["bytes"], np.ones(header["bytes"] // 4, np.float32))]
    return {}, arrays if method == "echo" else []


_GIVEN: dict[int, np.ndarray] = {}

if __name__ == "__main__":
    server = RpcServer(_handle).start()
    listen_until_told(server.address)
    server.stop()
