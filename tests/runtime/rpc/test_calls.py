"""The RPC server and transport over real sockets: behavior beyond the contract in
tests/contract/test_transport.py."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from roostream.errors import FencedError, SetupError, TransportError, UnavailableError
from roostream.runtime.rpc import frames
from roostream.runtime.rpc import server as rpc_server
from roostream.runtime.rpc import sockets as connections
from roostream.runtime.rpc.client import HostLookup, SocketTransport, error_of
from roostream.runtime.rpc.security import LinkCredentials
from roostream.runtime.rpc.server import RpcServer
from roostream.runtime.rpc.transport import Arrays, Header
from tests.runtime.file_descriptors import no_file_descriptors


class EchoHandler:
    """A handler that echoes calls. `hold` blocks until `release` is set; `huge` returns an answer above the
    limit."""

    def __init__(self) -> None:
        self.release, self.entered = threading.Event(), threading.Event()

    def __call__(
        self, method: str, header: Header, arrays: Sequence[np.ndarray]
    ) -> tuple[Header, Sequence[np.ndarray]]:
        if method == "hold":
            self.entered.set()
            self.release.wait(10)
        if method == "huge":
            return {}, [np.zeros(1 << 20, np.uint8)]
        return header, arrays


@pytest.fixture
def peer() -> Iterator[EchoHandler]:
    peer = EchoHandler()
    yield peer
    peer.release.set()


@pytest.fixture
def server(peer: EchoHandler) -> Iterator[RpcServer]:
    server = RpcServer(peer, max_frame_bytes=1 << 16).start()
    yield server
    peer.release.set()
    server.stop()


@pytest.fixture
def transport(server: RpcServer) -> Iterator[SocketTransport]:
    transport = SocketTransport(server.address)
    yield transport
    transport.close()


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_a_server_listens_on_an_address_of_ipv6(peer: EchoHandler, host: str) -> None:
    server = RpcServer(peer, host).start()
    assert server.address == f"[::1]:{server.port}"
    with contextlib.closing(SocketTransport(server.address)) as transport:
        assert transport.call("echo", {"n": 1}, timeout_s=10)[0] == {"n": 1}
    server.stop()


def send_raw(server: RpcServer, data: bytes) -> bytes:
    """Send these bytes and return everything the server answers until it closes the connection."""
    with socket.create_connection((server.host, server.port), timeout=10) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        out = b""
        while chunk := connection.recv(1 << 16):
            out += chunk
        return out


GOOD = b"".join(frames.encode(frames.CALL, {"method": "echo", "header": {"x": 1}}, [np.arange(5)]))


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: example\r\n\r\n",
        GOOD[:4] + b"\x02" + GOOD[5:],  # an answer instead of a call
        GOOD[:8] + struct.pack("<I", 2**31) + GOOD[12:],  # a header of 2 GiB
        GOOD[:16] + struct.pack("<Q", 2**40) + GOOD[24:],  # a payload of 1 TiB
        GOOD[:24] + b"\xc1" * (len(GOOD) - 24),
        GOOD[:-1] + bytes([GOOD[-1] ^ 1]),  # one flipped bit in an array
        GOOD[:24] + bytes([GOOD[24] ^ 1]) + GOOD[25:],  # one flipped bit in the checksum
        b"ROO1" + GOOD[4:],
        b"".join(frames.encode(frames.CALL, {"header": {}})),  # no method
        b"".join(frames.encode(frames.CALL, {"method": 7, "header": {}})),
        b"".join(
            frames.encode(frames.CALL, {"method": "echo"}, [np.zeros(1 << 14)])
        ),  # larger than the server accepts
    ],
)
def test_garbage_closes_its_connection_with_one_line_and_nothing_else(
    server: RpcServer, transport: SocketTransport, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    transport.call("echo", {})
    with contextlib.suppress(OSError):  # the server may close before it reads, or we send, everything
        assert send_raw(server, data) == b""
    assert transport.call("echo", {"still": "here"})[0] == {"still": "here"}
    lines = [r for r in caplog.records if r.name == "roostream.rpc"]
    assert len(lines) == 1 and "closed" in lines[0].message and lines[0].exc_info is None


class FlippingProxy:
    """A proxy of one connection to `port` that flips the last bit of the answer."""

    def __init__(self, port: int) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.thread = threading.Thread(target=self._forward, args=(port,))
        self.thread.start()

    def _forward(self, port: int) -> None:
        client_side, _ = self.listener.accept()
        with client_side, socket.create_connection(("127.0.0.1", port), timeout=10) as server_side:
            client_side.settimeout(10)
            server_side.sendall(client_side.recv(1 << 16))
            answer = bytearray(server_side.recv(1 << 16))
            answer[-1] ^= 0x80
            client_side.sendall(answer)
            client_side.recv(1)


def test_an_answer_with_a_flipped_bit_is_no_answer(server: RpcServer) -> None:
    proxy = FlippingProxy(server.port)
    transport = SocketTransport(proxy.address)
    with pytest.raises(
        TransportError, match=r"expected a frame with checksum [0-9a-f]{16}, got [0-9a-f]{16}: it was damaged"
    ):
        transport.call("echo", {}, [np.arange(5)])
    transport.close()
    proxy.thread.join(10)
    proxy.listener.close()
    assert not proxy.thread.is_alive()


def connect_silently(server: RpcServer, sent: bytes = b"") -> socket.socket:
    connection = socket.create_connection((server.host, server.port), timeout=10)
    if sent:
        connection.sendall(sent)
    return connection


@pytest.mark.parametrize("sent", [b"", GOOD[:3], GOOD[:40], GOOD[:-1]])
def test_a_connection_that_never_finishes_its_first_call_is_closed(
    peer: EchoHandler, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc_server, "FIRST_CALL_S", 0.05)
    monkeypatch.setattr(rpc_server, "FRAME_S", 0.05)
    server = RpcServer(peer).start()
    with connect_silently(server, sent) as connection:
        assert connection.recv(1) == b""
    assert server.stop() == 0


def test_a_connection_may_be_idle_for_longer_between_two_calls(
    peer: EchoHandler, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = RpcServer(peer).start()
    transport = SocketTransport(server.address)
    transport.call("echo", {})
    monkeypatch.setattr(rpc_server, "FIRST_CALL_S", 0.05)
    with connect_silently(server) as late:
        assert late.recv(1) == b"", "a connection without any call is still closed"
    transport.call("echo", {})
    assert transport.num_connections_opened == 1
    transport.close()
    server.stop()


def test_a_peer_that_reads_no_answer_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc_server, "FRAME_S", 0.05)
    monkeypatch.setattr(connections, "MIN_BYTES_PER_S", 1e12)
    monkeypatch.setattr(connections, "_SOCKET_BUFFER_BYTES", 1 << 16)
    handler_entered = threading.Event()

    def answer(*_: object) -> tuple[Header, Arrays]:
        handler_entered.set()
        return {}, [np.zeros(64 << 20, np.uint8)]

    server = RpcServer(answer).start()
    with connect_silently(server, GOOD):
        assert handler_entered.wait(10)
        deadline_s = time.monotonic() + 30
        while server.num_connections:
            assert time.monotonic() < deadline_s, "the server did not close the connection"
            time.sleep(0.01)
    server.stop()


def test_silent_connections_do_not_block_others(peer: EchoHandler, caplog: pytest.LogCaptureFixture) -> None:
    server = RpcServer(peer, max_connections=4).start()
    transport = SocketTransport(server.address)
    transport.call("echo", {})
    silent_connections = [connect_silently(server, GOOD[: 40 * (n % 2)]) for n in range(12)]
    for n in range(3):
        other = SocketTransport(server.address)
        assert other.call("echo", {"n": n})[0] == {"n": n}
        other.close()
    assert transport.call("echo", {"x": 1})[0] == {"x": 1} and transport.num_connections_opened == 1, (
        "the connection with earlier calls was closed; the silent ones should be"
    )
    assert "idle longest" in caplog.text
    for connection in silent_connections:
        connection.close()
    transport.close()
    server.stop()


@pytest.mark.parametrize("length", [0, 3, 24, 40])
def test_half_a_frame_is_no_call_and_no_noise(
    server: RpcServer, length: int, caplog: pytest.LogCaptureFixture
) -> None:
    assert send_raw(server, GOOD[:length]) == b"" and caplog.records == []


def test_a_frame_in_small_pieces_is_one_call(server: RpcServer) -> None:
    with socket.create_connection((server.host, server.port), timeout=10) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for at in range(0, len(GOOD), 7):
            connection.send(GOOD[at : at + 7])
        assert connection.recv(4) == b"ROO2"


def test_an_answer_that_is_too_large_arrives_as_an_error(transport: SocketTransport) -> None:
    with pytest.raises(Exception, match="at most 65536"):
        transport.call("huge", {})
    assert transport.call("echo", {"x": 1})[0] == {"x": 1}


def test_many_arrays_go_in_one_frame(transport: SocketTransport) -> None:
    arrays = [np.array([n], np.int64) for n in range(3000)]
    assert [a[0] for a in transport.call("echo", {}, arrays)[1]] == list(range(3000))


def test_an_unanswered_call_times_out_and_the_next_reconnects(
    transport: SocketTransport, peer: EchoHandler
) -> None:
    with pytest.raises(TransportError, match=r"hold at .*: no answer within 0.05 s"):
        transport.call("hold", {}, timeout_s=0.05)
    assert transport.call("echo", {"x": 1})[0] == {"x": 1}


def test_an_unreachable_peer_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(TransportError, match="can't connect"):
        SocketTransport(f"127.0.0.1:{port}").call("echo", {})


def test_the_time_limit_of_a_call_includes_the_lookup_of_its_host(server: RpcServer) -> None:
    release, num_lookups = threading.Event(), 0

    def getaddrinfo(host: str, port: None, **options: object) -> list[object]:
        nonlocal num_lookups
        num_lookups += 1
        release.wait(30)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))]

    transport = SocketTransport(f"shard-0.shards:{server.port}", lookup=HostLookup(getaddrinfo))
    try:
        for _ in range(3):
            with pytest.raises(TransportError, match=r"shard-0\.shards was not resolved"):
                transport.call("echo", {}, timeout_s=0.05)
        assert num_lookups == 1, "calls wait for the lookup that runs"
        release.set()
        assert transport.call("echo", {"x": 1})[0] == {"x": 1}
    finally:
        release.set()
        transport.close()


def test_a_silent_address_of_a_host_leaves_time_for_the_next_one(
    peer: EchoHandler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example the IPv6 address of a host that answers at its IPv4 address alone."""
    server = RpcServer(peer).start()
    found = [(socket.AF_INET6, 1, 6, "", ("fd00::1", 0, 0, 0)), (socket.AF_INET, 1, 6, "", ("127.0.0.1", 0))]
    connect = socket.create_connection

    def silent_for_ipv6(address: tuple[str, int], timeout: float) -> socket.socket:
        if address[0] == "fd00::1":
            time.sleep(timeout)
            raise TimeoutError("timed out")
        return connect(address, timeout)

    monkeypatch.setattr(socket, "create_connection", silent_for_ipv6)
    transport = SocketTransport(f"shard-0:{server.port}", lookup=HostLookup(lambda *_, **__: found))
    assert transport.call("echo", {"x": 1})[0] == {"x": 1}
    transport.close()
    server.stop()


@pytest.mark.parametrize("host", ["no-such-host.invalid", "two..dots", "x" * 64])
def test_a_host_without_an_address_is_reported(host: str) -> None:
    with pytest.raises(TransportError, match="can't connect"):
        SocketTransport(f"{host}:7000", connect_timeout_s=30.0).call("echo", {})


def test_a_server_that_was_restarted_is_dialled_again_without_a_failed_call(peer: EchoHandler) -> None:
    first = RpcServer(peer).start()
    transport = SocketTransport(first.address)
    transport.call("echo", {})
    assert first.stop() == 0
    with pytest.raises(TransportError):
        transport.call("echo", {})
    second = RpcServer(peer, port=first.port).start()
    assert transport.call("echo", {"x": 2})[0] == {"x": 2}
    second.stop()
    transport.close()


def test_stop_waits_for_calls_in_hand(peer: EchoHandler) -> None:
    server = RpcServer(peer).start()
    transport, answers = SocketTransport(server.address), []
    caller = threading.Thread(target=lambda: answers.append(transport.call("hold", {"x": 1})[0]))
    caller.start()
    assert peer.entered.wait(10)
    threading.Timer(0.05, peer.release.set).start()
    assert server.stop(timeout_s=10) == 0
    caller.join(10)
    assert answers == [{"x": 1}]
    transport.close()


@contextlib.contextmanager
def failing_call(transport: SocketTransport, peer: EchoHandler) -> Iterator[None]:
    """A call that is still running when the block begins, and that must have failed after its end."""
    failed: list[TransportError] = []

    def call() -> None:
        try:
            transport.call("hold", {})
        except TransportError as error:
            failed.append(error)

    caller = threading.Thread(target=call)
    caller.start()
    assert peer.entered.wait(10)
    yield
    caller.join(10)
    assert len(failed) == 1


def test_stop_counts_the_calls_that_it_cuts_off(peer: EchoHandler) -> None:
    server = RpcServer(peer).start()
    transport = SocketTransport(server.address)
    with failing_call(transport, peer):
        assert server.stop(timeout_s=0.05) == 1
    transport.close()


def test_closing_a_transport_ends_its_calls(transport: SocketTransport, peer: EchoHandler) -> None:
    with failing_call(transport, peer):
        transport.close()


def call_until_accepted(transport: SocketTransport) -> object:
    """Retry until the server accepts the call. The server notices the end of a call later than its client."""
    end_s = time.monotonic() + 10
    while True:
        try:
            return transport.call("echo", {"x": 1})[0]
        except TransportError:
            assert time.monotonic() < end_s
            time.sleep(0.01)


def test_connections_beyond_the_limit_are_refused_with_a_line(
    peer: EchoHandler, caplog: pytest.LogCaptureFixture
) -> None:
    server = RpcServer(peer, max_connections=1).start()
    first, second = SocketTransport(server.address), SocketTransport(server.address)
    caller = threading.Thread(target=first.call, args=("hold", {}))
    caller.start()
    assert peer.entered.wait(10)
    with pytest.raises(TransportError):
        second.call("echo", {})
    assert "1 are open" in caplog.text, "a connection with a running call must not be closed for a new one"
    peer.release.set()
    caller.join(10)
    assert call_until_accepted(second) == {"x": 1}
    for transport in (first, second):
        transport.close()
    server.stop()


def test_a_port_in_use_is_refused_in_one_sentence(server: RpcServer, peer: EchoHandler) -> None:
    with pytest.raises(SetupError, match=r"can't be listened on .* choose another port, or 0 for any"):
        RpcServer(peer, port=server.port).start()


def test_servers_listen_on_loopback_by_default(peer: EchoHandler) -> None:
    with pytest.raises(SetupError, match="or insecure = true"):
        RpcServer(peer, "0.0.0.0").start()
    server = RpcServer(peer, "0.0.0.0", credentials=LinkCredentials(insecure=True)).start()
    assert server.stop() == 0


def test_an_error_that_was_answered_is_never_a_lost_answer() -> None:
    assert type(error_of({"error": "FencedError", "message": "m"})) is FencedError
    for name in ("TransportError", "Exception", "RoostreamErrr", "Iterable", "nearest", ""):
        assert type(error_of({"error": name, "message": "m"})) is UnavailableError


def test_a_host_name_is_not_resolved_without_a_thread_and_later_it_is(
    server: RpcServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_to_start(*args: object, **kwargs: object) -> None:
        raise RuntimeError("can't start new thread")

    transport = SocketTransport(f"localhost:{server.port}")
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", fail_to_start)
        with pytest.raises(TransportError, match="can't start new thread"):
            transport.call("echo", {"x": 1})
    assert transport.call("echo", {"x": 1})[0] == {"x": 1}
    transport.close()


def test_a_connection_without_a_thread_is_closed_and_the_next_one_is_served(
    server: RpcServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_to_start(*args: object, **kwargs: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(rpc_server.threading.Thread, "start", fail_to_start)
        with contextlib.suppress(OSError):  # the server may close before the call is sent
            assert send_raw(server, GOOD) == b""
    assert send_raw(server, GOOD) != b""


def test_without_file_descriptors_a_server_logs_one_line_and_later_serves(
    server: RpcServer, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as client:
        client.settimeout(30)
        with no_file_descriptors():
            client.connect(("127.0.0.1", server.port))
            client.sendall(GOOD)
            threading.Event().wait(0.5)  # several tries
        assert client.recv(100) != b""
    assert caplog.text.count("can't accept") == 1


def test_an_unexpected_error_of_one_connection_never_ends_the_thread_that_accepts(peer: EchoHandler) -> None:
    class FailsOnce(LinkCredentials):
        should_fail = True

        def wrap_accepted(self, connection: socket.socket) -> socket.socket:
            if self.should_fail:
                self.should_fail = False
                raise ValueError("a defect")
            return super().wrap_accepted(connection)

    server = RpcServer(peer, credentials=FailsOnce()).start()
    try:
        with contextlib.suppress(OSError):
            assert send_raw(server, GOOD) == b""
        assert send_raw(server, GOOD) != b""
    finally:
        server.stop()


def test_a_transport_that_is_closed_while_it_connects_makes_no_call(server: RpcServer) -> None:
    def getaddrinfo(*_: object, **__: object) -> list[object]:
        transport.close()  # by another thread
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))]

    transport = SocketTransport(f"shard-0:{server.port}", lookup=HostLookup(getaddrinfo))
    with pytest.raises(TransportError, match="closed"):
        transport.call("echo", {}, timeout_s=5.0)
    assert transport.num_connections_opened == 0
