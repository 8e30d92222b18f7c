"""Our RPC over TCP to a server process; run as a module, this file is the server."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence

import numpy as np

from benchmarks.common.link_keys import link_key_folder, read_link_credentials
from benchmarks.common.peer_process import peer_address, print_address_and_wait
from benchmarks.harness.benchmark import Work
from roostream.runtime.rpc.client import SocketTransport
from roostream.runtime.rpc.server import RpcServer
from roostream.runtime.rpc.transport import Header

MB = 1e6


@contextlib.contextmanager
def send(num_bytes: int, secured: bool = False) -> Iterator[Work]:
    """An array to the server, a small answer back; MB."""
    with _client(secured) as transport:
        payload = np.ones(num_bytes // 4, np.float32)
        yield Work(lambda: transport.call("take", {}, [payload]), num_bytes / MB)


@contextlib.contextmanager
def receive(num_bytes: int, secured: bool = False) -> Iterator[Work]:
    with _client(secured) as transport:
        yield Work(lambda: transport.call("give", {"bytes": num_bytes}), num_bytes / MB)


@contextlib.contextmanager
def small(secured: bool = False) -> Iterator[Work]:
    """One call at a time, 64 bytes each way."""
    with _client(secured) as transport:
        payload = np.ones(16, np.float32)
        yield Work(lambda: transport.call("echo", {}, [payload]))


@contextlib.contextmanager
def _client(secured: bool) -> Iterator[SocketTransport]:
    with (
        link_key_folder(secured) as folder,
        peer_address("benchmarks.common.rpc_ours", *filter(None, [folder])) as address,
    ):
        transport = SocketTransport(address, credentials=read_link_credentials(folder))
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
    server = RpcServer(
        _handle, credentials=read_link_credentials(sys.argv[1] if len(sys.argv) > 1 else "")
    ).start()
    print_address_and_wait(server.address)
    server.stop()
