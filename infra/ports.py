"""Ports, drawn for each start of a stack and held against other stacks of this machine.

They lie below the range from which the kernel takes ports of outgoing connections; otherwise a connection could take the port
of a program that is being restarted.
"""

from __future__ import annotations

import fcntl
import os
import random
import socket
import tempfile
import urllib.request
from pathlib import Path
from typing import IO

from roo.errors import SetupError

LOWEST, HIGHEST = 15_000, 32_000
HOST = "127.0.0.1"


class Ports:
    """The ports of one stack. A file lock a port keeps two stacks apart between drawing a port and listening on it."""

    def __init__(self) -> None:
        self._held: dict[int, IO[str]] = {}

    def draw(self) -> int:
        """A free port, held until `release`.

        Raises:
            SetupError: none was found.
        """
        for port in random.sample(range(LOWEST, HIGHEST), 500):
            if self._hold(port):
                return port
        raise SetupError(f"no free port was found between {LOWEST} and {HIGHEST}; end programs that listen there")

    def take(self, name: str, port: int) -> int:
        """A chosen port.

        Raises:
            SetupError: something listens there already.
        """
        if not self._hold(port):
            raise SetupError(f"port {port} for {name} is taken; choose another one, or let one be drawn")
        return port

    def release(self) -> None:
        for file in self._held.values():
            file.close()
        self._held.clear()

    def _hold(self, port: int) -> bool:
        if port in self._held or not is_free(port):
            return False
        folder = Path(tempfile.gettempdir()) / f"roostream-ports-{os.getuid()}"
        folder.mkdir(exist_ok=True, mode=0o700)
        file = (folder / str(port)).open("w")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return False
        self._held[port] = file
        return True


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def answers(address: str, timeout_s: float = 0.5) -> bool:
    """Whether something accepts connections at `host:port`."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout_s).close()
    except OSError:
        return False
    return True


def responds(url: str, timeout_s: float = 1.0) -> bool:
    """Whether a GET of `url` is answered with success."""
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as answer:
            return 200 <= answer.status < 300
    except (OSError, ValueError):
        return False
