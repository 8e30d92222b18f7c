"""Serving on a real socket, in a thread of the test process."""

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
from tests.serving.serving_cases import SCHEMA, InProcessServing, build_serving
from tests.serving.serving_fakes import FakeRows


class LiveServing:
    """A serving process of serving_cases.py that listens on `address`. Setting `stop` ends it as a signal
    would."""

    def __init__(self, serving: InProcessServing, stop_s: float = 20.0) -> None:
        self.serving, self.app = serving, HttpInterface(serving.context)
        self.stop = threading.Event()
        self.budget = StopBudget(self.stop, stop_s)
        self._bound = http_server.bind("127.0.0.1:0")
        self.address: tuple[str, int] = self._bound.getsockname()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.address[1]}"

    def start(self) -> None:
        self._bound.listen(256)
        self._thread.start()
        assert self._started.wait(30)

    def end(self) -> None:
        self.stop.set()
        self._thread.join(60)
        assert not self._thread.is_alive()

    def connect(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=30)

    def _run(self) -> None:
        http_server.run(self.app, self._bound, self.budget, self._started.set)
        self._bound.close()


@contextmanager
def run_live_serving(serving: InProcessServing, stop_s: float = 20.0) -> Iterator[LiveServing]:
    """Start a serving on a free port, and stop it also after a failed test."""
    live = LiveServing(serving, stop_s)
    live.start()
    try:
        yield live
    finally:
        live.end()
        serving.close()


def start_live_serving(home: Path, **settings: Any) -> AbstractContextManager[LiveServing]:
    """Start a serving with fake rows and these settings."""
    return run_live_serving(build_serving(home, FakeRows(SCHEMA), **settings))


def read_answer(connection: socket.socket) -> tuple[int, bytes]:
    """Return (status, all bytes until the server closes the connection); (0, b"") if it sends nothing."""
    received = b""
    try:
        while chunk := connection.recv(65536):
            received += chunk
    except ConnectionResetError:
        pass
    return (int(received.split(b" ", 2)[1]), received) if received else (0, b"")
