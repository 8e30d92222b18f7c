"""Authentication of RPC callers by certificates and tokens, over real sockets with real certificates."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from roostream.errors import SetupError, TransportError, UnavailableError
from roostream.runtime.rpc import frames
from roostream.runtime.rpc.client import SocketTransport
from roostream.runtime.rpc.security import LinkCredentials, LinkSecurity
from roostream.runtime.rpc.server import RpcServer
from roostream.runtime.rpc.transport import Header
from roostream.runtime.tls import TlsContext, TlsSettings
from roostream.schema.settings import SettingError
from tests.certificates import Authority

TOKEN, OTHER = "t" * 32, "o" * 32


def echo(method: str, header: Header, arrays: Sequence[np.ndarray]) -> tuple[Header, Sequence[np.ndarray]]:
    return header, arrays


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "ours")


Serve = Callable[[LinkSecurity], RpcServer]
Connect = Callable[[RpcServer, LinkSecurity], SocketTransport]


@pytest.fixture
def serve() -> Iterator[Serve]:
    with contextlib.ExitStack() as opened:

        def start(security: LinkSecurity, host: str = "127.0.0.1") -> RpcServer:
            server = RpcServer(echo, host, credentials=LinkCredentials(security)).start()
            opened.callback(server.stop)
            return server

        yield start


@pytest.fixture
def connect() -> Iterator[Connect]:
    with contextlib.ExitStack() as opened:

        def start(server: RpcServer, security: LinkSecurity) -> SocketTransport:
            transport = SocketTransport(server.address, credentials=LinkCredentials(security))
            opened.callback(transport.close)
            return transport

        yield start


def mutual_tls(authority: Authority, name: str, *hosts: str, token_file: str = "") -> LinkSecurity:
    certificate, key = authority.issue(name, *hosts)
    return LinkSecurity(certificate=certificate, key=key, ca=str(authority.pem), token_file=token_file)


def write_tokens(folder: Path, name: str, *lines: str) -> str:
    (folder / name).write_text("\n".join(lines))
    return str(folder / name)


def test_tls_calls_carry_the_same_data(authority: Authority, serve: Serve, connect: Connect) -> None:
    transport = connect(serve(mutual_tls(authority, "shard")), mutual_tls(authority, "worker"))
    arrays = [
        np.arange(7),
        np.zeros(0, np.float32),
        np.random.default_rng(1).random((999, 333)),
        np.arange(3, dtype=np.int8),
    ]
    many_arrays = [np.full(5, number, np.int32) for number in range(3000)]
    for _ in range(3):
        header, echoed = transport.call("echo", {"x": [1, 2]}, arrays)
        assert header == {"x": [1, 2]} and all(
            np.array_equal(a, b) for a, b in zip(arrays, echoed, strict=True)
        )
        assert all(
            np.array_equal(a, b)
            for a, b in zip(many_arrays, transport.call("echo", {}, many_arrays)[1], strict=True)
        )
    assert transport.num_connections_opened == 1  # an idle TLS connection is reused


def test_a_caller_of_another_authority_is_refused(
    authority: Authority, serve: Serve, connect: Connect, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "theirs").mkdir()
    other = Authority(tmp_path / "theirs", "theirs")
    certificate, key = other.issue("worker")
    server = serve(mutual_tls(authority, "shard"))
    transport = connect(
        server,
        LinkSecurity(certificate=certificate, key=key, ca=str(authority.pem)),
    )
    for _ in range(3):
        with pytest.raises(TransportError):
            transport.call("echo", {})
    server.stop()  # waits for the connections' threads
    assert caplog.text.count("TLS handshake failed") == 1, "a client that tries again does not fill the log"


def test_a_server_says_that_the_certificate_of_a_caller_has_expired(
    authority: Authority, serve: Serve, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    certificate, key = authority.issue("worker", expired=True)
    server = serve(mutual_tls(authority, "shard"))
    transport = connect(
        server,
        LinkSecurity(certificate=certificate, key=key, ca=str(authority.pem)),
    )
    with pytest.raises(TransportError, match=r"refuse this program|closed|reset"):
        transport.call("echo", {})
    server.stop()
    assert "certificate has expired" in caplog.text


def test_a_server_of_another_authority_is_refused(
    authority: Authority, serve: Serve, connect: Connect, tmp_path: Path
) -> None:
    (tmp_path / "theirs").mkdir()
    transport = connect(
        serve(mutual_tls(Authority(tmp_path / "theirs", "theirs"), "shard")),
        mutual_tls(authority, "worker"),
    )
    with pytest.raises(TransportError, match="CERTIFICATE_VERIFY_FAILED"):
        transport.call("echo", {})


def test_a_server_certificate_must_match_its_host_name(
    authority: Authority, serve: Serve, connect: Connect
) -> None:
    server = serve(mutual_tls(authority, "shard", "shard-0.shards"))
    caller_security = mutual_tls(authority, "worker")
    named, other = (
        connect(server, dataclasses.replace(caller_security, name=f"shard-{n}.shards")) for n in (0, 1)
    )
    assert named.call("echo", {"a": 1})[0] == {"a": 1}
    with pytest.raises(TransportError, match=r"shard-1\.shards"):
        other.call("echo", {})


def test_plain_text_connections_are_refused(
    authority: Authority, serve: Serve, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    server = serve(mutual_tls(authority, "shard"))
    with pytest.raises(TransportError):
        connect(server, LinkSecurity()).call("echo", {})
    assert connect(server, mutual_tls(authority, "worker")).call("echo", {"still": 1})[0] == {"still": 1}
    assert "TLS handshake failed" in caplog.text
    with pytest.raises(TransportError):  # a client with certificates does not talk to a server without
        connect(serve(LinkSecurity()), mutual_tls(authority, "worker")).call("echo", {})


def test_certificates_are_renewed_without_a_restart(
    authority: Authority, serve: Serve, connect: Connect, tmp_path: Path
) -> None:
    worker, shard = mutual_tls(authority, "worker"), mutual_tls(authority, "shard")
    server = serve(shard)
    transport = connect(server, worker)
    transport.call("echo", {})
    (tmp_path / "next").mkdir()
    renewed = Authority(tmp_path / "next", "next")
    both = authority.pem.read_text() + renewed.pem.read_text()
    for name, at in (("worker", worker), ("shard", shard)):
        for source, target in zip(renewed.issue(name), (at.certificate, at.key), strict=True):
            Path(target).write_text(Path(source).read_text())
    authority.pem.write_text(both)  # both ends read this one file of authorities
    assert connect(server, worker).call("echo", {"new": 1})[0] == {"new": 1}
    assert transport.call("echo", {"old": 1})[0] == {"old": 1} and transport.num_connections_opened == 1


def test_half_written_files_leave_the_ones_of_before_in_force(
    authority: Authority, serve: Serve, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    worker, shard = mutual_tls(authority, "worker"), mutual_tls(authority, "shard")
    server = serve(shard)
    Path(shard.certificate).write_text("-----BEGIN CERT")
    assert connect(server, worker).call("echo", {"x": 1})[0] == {"x": 1}
    assert "stay in use" in caplog.text


@pytest.mark.parametrize("caller_tokens", [(), (OTHER,), (OTHER, TOKEN)])
def test_a_call_without_a_valid_token_is_refused(
    serve: Serve,
    connect: Connect,
    tmp_path: Path,
    caller_tokens: tuple[str, ...],
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = serve(LinkSecurity(token_file=write_tokens(tmp_path, "accepted", TOKEN)))
    caller_security = LinkSecurity(
        token_file=write_tokens(tmp_path, "caller_tokens", *caller_tokens) if caller_tokens else ""
    )
    with pytest.raises(UnavailableError, match="expected a valid token"):
        connect(server, caller_security).call("echo", {})
    assert "refused a client without a valid token" in caplog.text and TOKEN not in caplog.text


def test_an_unauthenticated_caller_cannot_send_large_data(serve: Serve, tmp_path: Path) -> None:
    server = serve(LinkSecurity(token_file=write_tokens(tmp_path, "accepted", TOKEN)))
    with socket.create_connection((server.host, server.port), timeout=10) as connection:
        connection.sendall(
            b"".join(frames.encode(frames.CALL, {"method": "echo"}, [np.zeros(64)]))[: frames.PREFIX_BYTES]
        )
        assert connection.recv(1) == b""  # closed after the sizes, before any byte of the payload


def test_tokens_are_rotated_without_a_restart(serve: Serve, connect: Connect, tmp_path: Path) -> None:
    accepted_file, sent_file = (
        write_tokens(tmp_path, "accepted", TOKEN),
        write_tokens(tmp_path, "sent", TOKEN),
    )
    server = serve(LinkSecurity(token_file=accepted_file))
    caller_security = LinkSecurity(token_file=sent_file)
    connect(server, caller_security).call("echo", {})
    write_tokens(tmp_path, "accepted", TOKEN, OTHER)
    connect(server, caller_security).call("echo", {})
    write_tokens(tmp_path, "sent", OTHER, TOKEN)
    connect(server, caller_security).call("echo", {})
    write_tokens(tmp_path, "accepted", OTHER)
    connect(server, caller_security).call("echo", {})
    write_tokens(tmp_path, "sent", TOKEN)
    with pytest.raises(UnavailableError):
        connect(server, caller_security).call("echo", {})


def test_a_server_without_tokens_accepts_a_token(serve: Serve, connect: Connect, tmp_path: Path) -> None:
    caller_security = LinkSecurity(token_file=write_tokens(tmp_path, "sent", TOKEN))
    assert connect(serve(LinkSecurity()), caller_security).call("echo", {"x": 1})[0] == {"x": 1}


def test_certificates_and_tokens_together(
    authority: Authority, serve: Serve, connect: Connect, tmp_path: Path
) -> None:
    file = write_tokens(tmp_path, "tokens", TOKEN)
    server = serve(mutual_tls(authority, "shard", token_file=file))
    assert connect(server, mutual_tls(authority, "worker", token_file=file)).call("echo", {"x": 1})[0] == {
        "x": 1
    }
    with pytest.raises(UnavailableError, match="expected a valid token"):
        connect(server, mutual_tls(authority, "other")).call("echo", {})


def test_an_address_that_others_reach_needs_certificates(authority: Authority, tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"set certificate, key and ca of \[link\], or insecure = true"):
        RpcServer(
            echo,
            "0.0.0.0",
            credentials=LinkCredentials(LinkSecurity(token_file=write_tokens(tmp_path, "t", TOKEN))),
        ).start()
    server = RpcServer(echo, "0.0.0.0", credentials=LinkCredentials(mutual_tls(authority, "shard"))).start()
    assert server.stop() == 0


def test_a_stopping_server_never_answers_in_plain_text(authority: Authority) -> None:
    """SSLSocket.shutdown drops the TLS layer; a later write would go out unencrypted."""
    entered, release = threading.Event(), threading.Event()

    def hold(
        method: str, header: Header, arrays: Sequence[np.ndarray]
    ) -> tuple[Header, Sequence[np.ndarray]]:
        entered.set()
        release.wait(10)
        return {"answer": 42}, []

    server = RpcServer(hold, credentials=LinkCredentials(mutual_tls(authority, "shard"))).start()
    transport = SocketTransport(server.address, credentials=LinkCredentials(mutual_tls(authority, "worker")))
    answers: list[Header] = []
    caller = threading.Thread(target=lambda: answers.append(transport.call("hold", {})[0]))
    caller.start()
    assert entered.wait(10)
    stopper = threading.Thread(target=server.stop, args=(5.0,))
    stopper.start()
    release.set()
    caller.join(10)
    stopper.join(10)
    transport.close()
    assert answers == [{"answer": 42}]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"certificate": "c.pem"}, "expected certificate, key and ca together, got no key, ca"),
        ({"name": "x"}, "expected certificate, key and ca"),
    ],
)
def test_settings_that_do_not_fit_together(given: dict[str, str], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        LinkSecurity(**given)


def test_an_encrypted_key_is_refused_without_a_question_at_the_terminal(
    authority: Authority, tmp_path: Path
) -> None:
    certificate, key = authority.issue("worker", password="secret")
    link = LinkSecurity(certificate=certificate, key=key, ca=str(authority.pem))
    with pytest.raises(SettingError, match="the key is encrypted"):
        LinkCredentials(link)
    with pytest.raises(SettingError, match="the key is encrypted"):
        TlsContext(TlsSettings(tls_certificate=certificate, tls_key=key))


def test_files_that_are_no_keys_are_refused_at_the_start(authority: Authority, tmp_path: Path) -> None:
    certificate, key = authority.issue("worker")
    other = authority.issue("other")
    authorities, short = str(authority.pem), "expected tokens of at least 16 characters"
    wrong: tuple[tuple[dict[str, str], str], ...] = (
        (
            {"certificate": certificate, "key": other[1], "ca": authorities},
            "certificate': expected PEM files",
        ),
        ({"certificate": certificate, "key": key, "ca": key}, "ca': expected a PEM file of authorities"),
        ({"token_file": str(tmp_path / "none")}, "token_file': expected a file of tokens"),
        ({"token_file": write_tokens(tmp_path, "short", "abc")}, short),
        ({"token_file": write_tokens(tmp_path, "empty", "", " ")}, short),
    )
    for given, message in wrong:
        with pytest.raises(SettingError, match=message):
            LinkCredentials(LinkSecurity(**given))
