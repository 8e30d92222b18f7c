"""Where each part of one running stack listens."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from infra.options import StackOptions
from infra.ports import HOST, Ports


@dataclasses.dataclass(frozen=True, kw_only=True)
class Endpoints:
    """Addresses are "host:port"; `flink` and `serving` are URLs; `metrics` is program → URL of its /metrics."""

    kafka: str
    redis: str
    flink: str
    serving: str
    controller: str
    shards: tuple[str, ...]
    metrics: dict[str, str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Places:
    """The ports behind the endpoints, and those that only the parts themselves use."""

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
        """Where everything is: what `options` name instead of an own one, our own by these ports."""
        metrics = {name: f"http://{HOST}:{port}/metrics" for name, port in self.metrics.items()}
        return Endpoints(
            kafka=options.kafka or address(self.kafka),
            redis=options.redis or address(self.redis),
            flink=f"http://{address(self.flink_rest)}",
            serving=f"http://{address(self.serving)}",
            controller=address(self.controller),
            shards=tuple(address(p) for p in self.shards),
            metrics=metrics,
        )


def address(port: int) -> str:
    return f"{HOST}:{port}"


def draw(ports: Ports, options: StackOptions, with_metrics: Iterable[str]) -> Places:
    """Ports for every part, and one of /metrics for each of `with_metrics`; those in `options.ports` are taken, the others drawn.

    Raises:
        SetupError: a chosen port is taken.
    """

    def port(name: str) -> int:
        return ports.take(name, options.ports[name]) if name in options.ports else ports.draw()

    shards = [f"shard-{i}" for i in range(options.num_shards)]
    return Places(
        kafka=port("kafka"),
        kafka_controller=ports.draw(),
        redis=port("redis"),
        flink_rpc=ports.draw(),
        flink_rest=port("flink"),
        task_managers=tuple(ports.draw() for _ in range(options.num_task_managers)),
        serving=port("serving"),
        controller=port("controller"),
        shards=tuple(port(s) for s in shards),
        metrics={name: ports.draw() for name in with_metrics},
    )
