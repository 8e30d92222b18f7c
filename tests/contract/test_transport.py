"""The contract of every transport: calls, arrays and errors arrive in the same way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from roostream import errors
from roostream.errors import RoostreamError, TransportError, UnavailableError, WireError
from roostream.runtime.rpc.client import SocketTransport
from roostream.runtime.rpc.server import RpcServer
from roostream.runtime.rpc.transport import Header, InMemoryTransport, Transport


class CallHandler:
    """A handler whose behavior depends on the called method."""

    def __init__(self) -> None:
        self.methods_called: list[str] = []
        self.two_calls = threading.Barrier(2, timeout=10)

    def __call__(
        self, method: str, header: Header, arrays: Sequence[np.ndarray]
    ) -> tuple[Header, Sequence[np.ndarray]]:
        self.methods_called.append(method)
        match method:
            case "raise":
                raise getattr(errors, header["error"])(*header["args"])
            case "defect":
                raise ZeroDivisionError("oops")
            case "meet":
                self.two_calls.wait()
            case "double":
                return {}, [a * a.dtype.type(2) for a in arrays]
        return header, arrays


@pytest.fixture
def peer() -> CallHandler:
    return CallHandler()


@pytest.fixture(params=["in memory", "socket"])
def transport(request: pytest.FixtureRequest, peer: CallHandler) -> Iterator[Transport]:
    if request.param == "in memory":
        yield InMemoryTransport(peer)
        return
    server = RpcServer(peer).start()
    over_tcp = SocketTransport(server.address)
    yield over_tcp
    over_tcp.close()
    assert server.stop() == 0


@pytest.mark.parametrize("dtype", ["u1", "i8", "f4"])
@pytest.mark.parametrize("shape", [(0,), (3,), (2, 5), (0, 16), (1000, 33)])
def test_arrays_round_trip(transport: Transport, dtype: str, shape: tuple[int, ...]) -> None:
    array = (np.random.default_rng(0).random(shape) * 100).astype(dtype)
    header, (answer, second_answer) = transport.call(
        "echo", {"a": 1, "b": ["x", None, {"c": 2.5}]}, [array, array]
    )
    assert header == {"a": 1, "b": ["x", None, {"c": 2.5}]}
    assert answer.dtype == array.dtype
    assert answer.shape == shape
    assert answer.tobytes() == second_answer.tobytes() == array.tobytes()


def test_answers_are_writable(transport: Transport) -> None:
    _, (answer,) = transport.call("double", {}, [np.ones(4, np.float32)])
    answer += 1
    assert answer.tolist() == [3, 3, 3, 3]


def test_later_changes_by_the_peer_are_not_visible(transport: Transport) -> None:
    array = np.ones(4, np.float32)
    _, (answer,) = transport.call("echo", {}, [array])
    array[:] = 9
    assert answer.tolist() == [1, 1, 1, 1]


ERRORS = [
    name
    for name in dir(errors)
    if isinstance(c := getattr(errors, name), type) and issubclass(c, RoostreamError)
]


@pytest.mark.parametrize("name", ERRORS)
def test_every_roostream_error_keeps_its_type_and_text(transport: Transport, name: str) -> None:
    args: list[Any] = ["non_finite", "what happened"] if name == "WireError" else ["what happened"]
    arrives_as = (
        "UnavailableError" if name == "TransportError" else name
    )  # an answered call is not a lost one
    with pytest.raises(getattr(errors, arrives_as)) as caught:
        transport.call("raise", {"error": name, "args": args})
    assert type(caught.value).__name__ == arrives_as and str(caught.value) == "what happened"
    assert not isinstance(caught.value, WireError) or caught.value.reason == "non_finite"


def test_a_defect_of_the_peer_is_reported_as_an_answer(transport: Transport) -> None:
    with pytest.raises(UnavailableError, match="ZeroDivisionError") as caught:
        transport.call("defect", {})
    assert not isinstance(caught.value, TransportError), "an answered call must not be repeated"
    assert transport.call("echo", {"x": 1})[0] == {"x": 1}


def test_calls_of_several_threads_run_concurrently(transport: Transport, peer: CallHandler) -> None:
    threads = [threading.Thread(target=transport.call, args=("meet", {})) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert peer.methods_called == ["meet", "meet"] and not peer.two_calls.broken


def test_each_thread_gets_its_own_answers(transport: Transport) -> None:
    wrong: list[int] = []

    def call(n: int) -> None:
        for _ in range(20):
            _, (answer,) = transport.call("double", {"n": n}, [np.full(1000, n, np.int64)])
            if (answer != 2 * n).any():
                wrong.append(n)

    threads = [threading.Thread(target=call, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert wrong == []


def test_a_closed_transport_raises_transport_errors(transport: Transport) -> None:
    close: Callable[[], None] = transport.close
    close()
    close()
    with pytest.raises(TransportError):
        transport.call("echo", {})


@pytest.mark.parametrize(("when", "executed"), [("before", []), ("after", ["echo"])])
def test_injected_faults_happen_before_or_after_the_call(
    peer: CallHandler, when: str, executed: list[str]
) -> None:
    transport = InMemoryTransport(peer)
    transport.fail_next("echo", when)
    with pytest.raises(TransportError, match=f"injected fault {when}"):
        transport.call("echo", {})
    assert peer.methods_called == executed
    assert transport.call("echo", {}) == ({}, [])
