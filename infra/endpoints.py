"""Addresses and ports of one local stack."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from infra.options import StackOptions
from infra.ports import HOST, Ports


@dataclasses.dataclass(frozen=True, kw_only=True)
class Endpoints:
    """Addresses are "host:port"; `flink` and `serving` are URLs; `metrics` maps a program to the URL of its
    /metrics."""

    kafka: str
    redis: str
    flink: str
    serving: str
    controller: str
    shards: tuple[str, ...]
    metrics: dict[str, str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PortMap:
    """The ports behind the endpoints, and the internal ports of Kafka and Flink."""

    kafka: int
    kafka_controller: int
    redis: int
    flink_rpc: int
    flink_rest: int
    task_managers: tuple[int, ...]
    serving: int
    controller: int
    shards: tuple[int, ...]
    metrics: dict[str, int]

    def endpoints(self, options: StackOptions) -> Endpoints:
        """The external Kafka or Redis that `options` name, and the stack's own programs by these ports."""
        return Endpoints(
            kafka=options.kafka or local_address(self.kafka),
            redis=options.redis or local_address(self.redis),
            flink=f"http://{local_address(self.flink_rest)}",
            serving=f"http://{local_address(self.serving)}",
            controller=local_address(self.controller),
            shards=tuple(local_address(p) for p in self.shards),
            metrics={name: f"http://{local_address(port)}/metrics" for name, port in self.metrics.items()},
        )


def local_address(port: int) -> str:
    return f"{HOST}:{port}"


def draw_ports(ports: Ports, options: StackOptions, with_metrics: Iterable[str]) -> PortMap:
    """A port for every part, and one for the /metrics of each program in `with_metrics`.

    Ports in `options.ports` are used as given; the others are drawn.

    Raises:
        SetupError: a given port is in use.
    """

    def port(name: str) -> int:
        return ports.take(name, options.ports[name]) if name in options.ports else ports.draw()

    return PortMap(
        kafka=port("kafka"),
        kafka_controller=ports.draw(),
        redis=port("redis"),
        flink_rpc=ports.draw(),
        flink_rest=port("flink"),
        task_managers=tuple(ports.draw() for _ in range(options.num_task_managers)),
        serving=port("serving"),
        controller=port("controller"),
        shards=tuple(port(f"shard-{i}") for i in range(options.num_shards)),
        metrics={name: ports.draw() for name in with_metrics},
    )
