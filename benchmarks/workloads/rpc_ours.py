"""Our calls over TCP, to a server in a process of its own; as a module, that server."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from benchmarks.question import Work
from benchmarks.workloads.server import listen_until_told, serving
from runtime.rpc_client import SocketTransport
from runtime.rpc_server import RpcServer
from runtime.security.link_security import LinkKeys, LinkSecurity
from runtime.transport import Header

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
    with contextlib.ExitStack() as opened:
        folder = opened.enter_context(tempfile.TemporaryDirectory()) if secured else ""
        if secured:
            _make_keys(Path(folder))
        address = opened.enter_context(serving("benchmarks.workloads.rpc_ours", *filter(None, [folder])))
        transport = SocketTransport(address, keys=_keys(folder))
        opened.callback(transport.close)
        yield transport


def _keys(folder: str) -> LinkKeys:
    """Both ends show the same certificate, which is its own authority."""
    if not folder:
        return LinkKeys()
    at = Path(folder)
    own = {"certificate": str(at / "own.crt"), "key": str(at / "own.key"), "ca": str(at / "own.crt")}
    return LinkKeys(LinkSecurity(**own, token_file=str(at / "token")))


def _make_keys(folder: Path) -> None:
    (folder / "token").write_text("0123456789abcdef0123456789abcdef")
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    names = ("-subj", "/CN=bench", "-addext", "subjectAltName=IP:127.0.0.1")
    files = ("-keyout", str(folder / "own.key"), "-out", str(folder / "own.crt"))
    subprocess.run(("openssl", "req", "-x509", *curve, *names, *files), check=True, capture_output=True)


def _handle(method: str, header: Header, arrays: list[np.ndarray]) -> tuple[Header, Sequence[np.ndarray]]:
    if method == "give":
        return {}, [_GIVEN.setdefault(header["bytes"], np.ones(header["bytes"] // 4, np.float32))]
    return {}, arrays if method == "echo" else []


_GIVEN: dict[int, np.ndarray] = {}

if __name__ == "__main__":
    server = RpcServer(_handle, keys=_keys(sys.argv[1] if len(sys.argv) > 1 else "")).start()
    listen_until_told(server.address)
    server.stop()
