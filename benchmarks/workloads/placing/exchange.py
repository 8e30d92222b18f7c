"""Two workers' rows: held by themselves, by shards, or by other engines; what a step of all of them takes."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from typing import Any

from benchmarks.question import Work
from benchmarks.workloads.placing.exchange_ways import Shape
from benchmarks.workloads.placing.exchange_worker import Took
from benchmarks.workloads.server import Peer, serving, talking
from benchmarks.workloads.shared import Shared

WORKERS = 2
_HERE = "benchmarks.workloads.placing"


class Workers:
    """Processes that take as many steps each, one way after the other."""

    def __init__(self, opened: contextlib.ExitStack) -> None:
        self._opened = opened
        self._peers: list[Peer] = []
        with socket.create_server(("127.0.0.1", 0)) as free:
            rendezvous = f"127.0.0.1:{free.getsockname()[1]}"
        for index in range(WORKERS):
            self._peers.append(
                opened.enter_context(talking(f"{_HERE}.exchange_worker", json.dumps([index, WORKERS])))
            )
        for peer in self._peers:
            peer.tell(json.dumps({"meet": self._peers[0].address, "rendezvous": rendezvous}))

    def take(self, kind: str, shape: Shape, steps: int, shards: list[str]) -> list[Took]:
        for peer in self._peers:
            peer.tell(json.dumps([kind, shape, steps, shards]))
        return [Took(*json.loads(peer.heard())) for peer in self._peers]


@contextlib.contextmanager
def _workers() -> Iterator[Workers]:
    with contextlib.ExitStack() as opened:
        yield Workers(opened)


_together = Shared(_workers)


def workers() -> contextlib.AbstractContextManager[Workers]:
    """What all rows of a run use."""
    return _together.of()


@contextlib.contextmanager
def exchanged(kind: str, shape: Any, steps: int) -> Iterator[Work]:
    """`kind`: "workers" | "shards" | "plain" | "torchrec table" | "torchrec row"; `steps` a turn. Units: steps, by whoever is
    slower. `differs` is against the way that was asked first."""
    its, told = Shape(*shape), list[Took]()
    with contextlib.ExitStack() as opened:
        together = opened.enter_context(workers())
        shards = [
            opened.enter_context(serving(f"{_HERE}.exchange_shard", json.dumps([index, WORKERS, its])))
            for index in range(WORKERS if kind == "shards" else 0)
        ]

        def step() -> None:
            told[:] = together.take(kind, its, steps, shards)

        def figures() -> dict[str, float]:
            sent = max(took.sent_bytes for took in told) / steps / 1e6
            found = {
                "sums differ by": max(took.differs for took in told),
                "ids a step": sum(took.ids for took in told) / steps,
            }
            return {**found, **({"MB sent a worker and step": sent} if sent else {})}

        yield Work(step, lambda: float(steps), figures, lambda: max(took.wall_s for took in told))
