"""Ports of a stack, drawn at each start and reserved against other stacks on the machine, and the addresses
with these ports.

They lie below the kernel's range for outgoing connections. Otherwise a connection could take the port of a
program that is being restarted.
"""

from __future__ import annotations

import dataclasses
import http.client
import random
import socket
from collections.abc import Iterable

from infra.options import StackOptions
from roostream.errors import SetupError
from roostream.runtime.direct_http import open_direct

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Endpoints:
    """Addresses of one local stack, as "host:port"; `flink` and `serving` are URLs; `metrics` maps a program
    to the URL of its /metrics. Only Kafka's and Flink's own processes use `kafka_controller`, `flink_rpc` and
    `task_managers`."""

    kafka: str
    redis: str
    flink: str
    serving: str
    controller: str
    shards: tuple[str, ...]
    metrics: dict[str, str]
    kafka_controller: str = ""
    flink_rpc: str = ""
    task_managers: tuple[str, ...] = ()


def draw_endpoints(ports: Ports, options: StackOptions, with_metrics: Iterable[str]) -> Endpoints:
    """An address for every part that is not an external service of `options`, and a URL for the /metrics of
    each program in `with_metrics`. Ports in `options.ports` are used as given; the others are drawn. Raises
    SetupError: a given port is in use."""

    def address(name: str = "") -> str:
        taken = ports.take(name, options.ports[name]) if name in options.ports else ports.draw()
        return f"{HOST}:{taken}"

    return Endpoints(
        kafka=options.kafka or address("kafka"),
        kafka_controller=address(),
        redis=options.redis or address("redis"),
        flink_rpc=address(),
        flink=f"http://{address('flink')}",
        task_managers=tuple(address() for _ in range(options.num_task_managers)),
        serving=f"http://{address('serving')}",
        controller=address("controller"),
        shards=tuple(address(f"shard-{i}") for i in range(options.num_shards)),
        metrics={name: draw_metrics_url(ports) for name in with_metrics},
    )


def draw_metrics_url(ports: Ports) -> str:
    """A metrics address on a free port."""
    return f"http://{HOST}:{ports.draw()}/metrics"


def port_of(address: str) -> int:
    """The port of "host:port"."""
    return int(address.rpartition(":")[2])


def is_free(port: int) -> bool:
    """Whether a program can listen on this port now."""
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
        with open_direct(url, timeout_s) as answer:
            return 200 <= answer.status < 300
    except (OSError, ValueError, http.client.HTTPException):
        return False
