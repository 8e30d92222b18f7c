"""Ports, drawn for each start of a stack and held against other stacks of this machine.

They lie below the range from which the kernel takes ports of outgoing connections; otherwise a connection could take the port
of a program that is being restarted.
"""

from __future__ import annotations

import random
import socket
import urllib.request

from roostream.errors import SetupError

LOWEST, HIGHEST = 15_000, 32_000
HOST = "127.0.0.1"


class Ports:
    """The ports of one stack. A name a port keeps two stacks apart between drawing a port and listening on it.

    The names are those of sockets without a file: no folder that all users write to, and the kernel gives them back.
    """

    def __init__(self) -> None:
        self._held: dict[int, socket.socket] = {}

    def draw(self) -> int:
        """A free port, held until `release`.

        Raises:
            SetupError: none was found.
        """
        for port in random.sample(range(LOWEST, HIGHEST), 500):
            if self._hold(port):
                return port
        raise SetupError(
            f"no free port was found between {LOWEST} and {HIGHEST}; end programs that listen there"
        )

    def take(self, name: str, port: int) -> int:
        """A chosen port.

        Raises:
            SetupError: something listens there already.
        """
        if not self._hold(port):
            raise SetupError(f"port {port} for {name} is taken; choose another one, or let one be drawn")
        return port

    def release(self) -> None:
        for held in self._held.values():
            held.close()
        self._held.clear()

    def _hold(self, port: int) -> bool:
        if port in self._held or not is_free(port):
            return False
        held = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            held.bind(f"\0roostream-port-{port}")
        except OSError:
            held.close()
            return False
        self._held[port] = held
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
