"""The interface on a real socket, in a thread of the test's own process."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from roostream.runtime.thread_group import StopBudget
from serving.http import server as http_server
from serving.http.app import HttpInterface
from tests.serving.serving_cases import SCHEMA, Built, build
from tests.serving.serving_fakes import FakeRows


class LiveServing:
    """`stop` ends it as a signal would; `address` is where it answers."""

    def __init__(self, built: Built, stop_s: float = 20.0) -> None:
        self.built, self.app = built, HttpInterface(built.context)
        self.stop = threading.Event()
        self.budget = StopBudget(self.stop, stop_s)
        self._bound = http_server.bind("127.0.0.1:0")
        self.address: tuple[str, int] = self._bound.getsockname()
        self._turned = threading.Event()
        self._thread = threading.Thread(target=self._run)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.address[1]}"

    def start(self) -> None:
        self._bound.listen(256)
        self._thread.start()
        assert self._turned.wait(30)

    def end(self) -> None:
        self.stop.set()
        self._thread.join(60)
        assert not self._thread.is_alive()

    def connect(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=30)

    def _run(self) -> None:
        http_server.run(self.app, self._bound, self.budget, self._turned.set)
        self._bound.close()


@contextmanager
def serving_live(built: Built, stop_s: float = 20.0) -> Iterator[LiveServing]:
    """Started, and ended whatever the test does."""
    live = LiveServing(built, stop_s)
    live.start()
    try:
        yield live
    finally:
        live.end()
        built.close()


def live_of(home: Path, **settings: Any) -> AbstractContextManager[LiveServing]:
    """A process with fake rows and these settings."""
    return serving_live(build(home, FakeRows(SCHEMA), **settings))


def answer_of(connection: socket.socket) -> tuple[int, bytes]:
    """(status, all that comes until the other side closes); (0, b"") if it closes without a word."""
    received = b""
    try:
        while chunk := connection.recv(65536):
            received += chunk
    except ConnectionResetError:
        pass
    return (int(received.split(b" ", 2)[1]), received) if received else (0, b"")
