"""Peer of the rpc benchmark: unary gRPC calls with raw bytes, without protobuf. Runs in the environment
`grpcio`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.common.peer_process import peer_address, print_address_and_wait
from benchmarks.harness.benchmark import Work

_OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


@contextlib.contextmanager
def send(num_bytes: int) -> Iterator[Work]:
    with _call("take") as call:
        payload = bytes(num_bytes)
        yield Work(lambda: call(payload), num_bytes / 1e6)


@contextlib.contextmanager
def receive(num_bytes: int) -> Iterator[Work]:
    with _call("give") as call:
        asked = str(num_bytes).encode()
        yield Work(lambda: call(asked), num_bytes / 1e6)


@contextlib.contextmanager
def small() -> Iterator[Work]:
    with _call("echo") as call:
        payload = bytes(64)
        yield Work(lambda: call(payload))


@contextlib.contextmanager
def _call(method: str) -> Iterator[Callable[[bytes], bytes]]:
    import grpc  # type: ignore[import-untyped, unused-ignore]

    with (
        peer_address("benchmarks.common.rpc_grpc") as address,
        grpc.insecure_channel(address, options=_OPTIONS) as channel,
    ):
        grpc.channel_ready_future(channel).result(10)
        yield channel.unary_unary(f"/bench/{method}")


_GIVEN: dict[int, bytes] = {}
_ANSWERS: dict[str, Callable[[bytes, Any], bytes]] = {
    "take": lambda payload, context: b"",
    "give": lambda payload, context: _GIVEN.setdefault(int(payload), bytes(int(payload))),
    "echo": lambda payload, context: payload,
}

if __name__ == "__main__":
    import grpc

    server = grpc.server(ThreadPoolExecutor(2), options=_OPTIONS)
    handlers = {name: grpc.unary_unary_rpc_method_handler(answer) for name, answer in _ANSWERS.items()}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print_address_and_wait(f"127.0.0.1:{port}")
    server.stop(None)
