"""Ports of a stack, drawn at each start and reserved against other stacks on the machine.

They lie below the kernel's range for outgoing connections. Otherwise a connection could take the port of a
program that is being restarted.
"""

from __future__ import annotations

import random
import socket
import urllib.request

from roostream.errors import SetupError

MIN_PORT, MAX_PORT = 15_000, 32_000
HOST = "127.0.0.1"


class Ports:
    """The ports of one stack. A named socket per port reserves it between drawing the port and listening on
    it.

    The sockets are in Linux's abstract namespace: no shared folder is needed, and the kernel frees the names.
    """

    def __init__(self) -> None:
        self._reserved: dict[int, socket.socket] = {}

    def draw(self) -> int:
        """A free port, reserved until `release`.

        Raises:
            SetupError: no port is free.
        """
        for port in random.sample(range(MIN_PORT, MAX_PORT), 500):
            if self._reserve(port):
                return port
        raise SetupError(
            f"found no free port between {MIN_PORT} and {MAX_PORT}; end programs that listen there"
        )

    def take(self, name: str, port: int) -> int:
        """Reserve a given port.

        Raises:
            SetupError: the port is in use.
        """
        if not self._reserve(port):
            raise SetupError(
                f"port {port} for {name} is in use; choose another port, or leave the choice to the stack"
            )
        return port

    def release(self) -> None:
        for reservation in self._reserved.values():
            reservation.close()
        self._reserved.clear()

    def _reserve(self, port: int) -> bool:
        if port in self._reserved or not is_free(port):
            return False
        reservation = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            reservation.bind(f"\0roostream-port-{port}")
        except OSError:
            reservation.close()
            return False
        self._reserved[port] = reservation
        return True


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def is_listening(address: str, timeout_s: float = 0.5) -> bool:
    """Whether something accepts connections at `host:port`."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout_s).close()
    except OSError:
        return False
    return True


def responds_ok(url: str, timeout_s: float = 1.0) -> bool:
    """Whether a GET of `url` returns a 2xx status."""
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as answer:
            return 200 <= answer.status < 300
    except (OSError, ValueError):
        return False
