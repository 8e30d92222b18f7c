"""What does a step cost where the workers hold the rows themselves?

A step of two workers whose rows are held by the workers, by shards, or by peers such as TorchRec.
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.common.exchange_ways import Shape
from benchmarks.common.exchange_worker import Took
from benchmarks.common.peer_process import Peer, peer_address, start_peer
from benchmarks.common.shared_setup import SharedSetup
from benchmarks.harness.benchmark import Benchmark, Row, Subject, SubjectResult, Work

WORKERS = 2


class Workers:
    """Processes that take as many steps each, one way after the other."""

    def __init__(self, opened: contextlib.ExitStack) -> None:
        self._opened = opened
        self._peers: list[Peer] = []
        with socket.create_server(("127.0.0.1", 0)) as free:
            rendezvous = f"127.0.0.1:{free.getsockname()[1]}"
        for index in range(WORKERS):
            self._peers.append(
                opened.enter_context(
                    start_peer("benchmarks.common.exchange_worker", json.dumps([index, WORKERS]))
                )
            )
        for peer in self._peers:
            peer.send_line(json.dumps({"meet": self._peers[0].address, "rendezvous": rendezvous}))

    def take(self, kind: str, shape: Shape, steps: int, shards: list[str]) -> list[Took]:
        for peer in self._peers:
            peer.send_line(json.dumps([kind, shape, steps, shards]))
        return [Took(*json.loads(peer.read_line())) for peer in self._peers]


@contextlib.contextmanager
def _workers() -> Iterator[Workers]:
    with contextlib.ExitStack() as opened:
        yield Workers(opened)


_together = SharedSetup(_workers)


def workers() -> contextlib.AbstractContextManager[Workers]:
    """What all rows of a run use."""
    return _together.open()


@contextlib.contextmanager
def exchanged(kind: str, shape: Any, steps: int) -> Iterator[Work]:
    """`kind`: "workers" | "shards" | "plain" | "torchrec table" | "torchrec row"; `steps` a turn. Units:
    steps, by whoever is slower. `differs` is against the way that was asked first."""
    its, told = Shape(*shape), list[Took]()
    with contextlib.ExitStack() as opened:
        together = opened.enter_context(workers())
        shards = [
            opened.enter_context(
                peer_address("benchmarks.common.exchange_shard", json.dumps([index, WORKERS, its]))
            )
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


_HERE = "benchmarks.placement_exchange:exchanged"
_STEPS = 13
OURS, PLAIN, TABLE, ROW = (
    "rows at the workers",
    "every id as often as it comes",
    "TorchRec, by tables",
    "TorchRec, by rows",
)


def _against(told: Mapping[str, SubjectResult]) -> dict[str, float]:
    best = min(told[name].cost_us for name in (TABLE, ROW))
    return {"the better TorchRec, in times of ours": best / told[OURS].cost_us}


def _row(zipf: float, valency: int) -> Row:
    size = ([8, 20_000, 32, 512, valency, zipf], _STEPS)
    return Row(
        name=f"8 tables of 20 000 rows of width 32, 512 examples a worker, {valency} ids each, Zipf {zipf:g}",
        unit="steps",
        shows="cost",
        subjects=(
            Subject(OURS, _HERE, ("workers", *size)),
            Subject("the same rows at two shards", _HERE, ("shards", *size), "stage"),
            Subject(TABLE, _HERE, ("torchrec table", *size), "peer"),
            Subject(ROW, _HERE, ("torchrec row", *size), "peer"),
            Subject(PLAIN, _HERE, ("plain", *size), "peer"),
        ),
        derives=_against,
    )


BENCHMARK = Benchmark(
    name="placement-exchange",
    summary="What does a step cost where the workers hold the rows themselves?",
    rows=(_row(1.05, 3), _row(1.05, 20), _row(0.6, 3)),
    slice_s=0.0,
    rounds=3,
    run_setup="benchmarks.placement_exchange:workers",
    interpretation="""\
Two worker processes, gloo over loopback, one torch thread each. A step: ids of eight lists, rows of all of them, pooled sums, a
gradient of these, and one row-wise Adagrad step of both workers' gradients. All begin with equal rows; "sums differ by" says how
far a way is from ours behind 16 updates: 1e-5 at most is asked for. A turn is 13 steps by the slower worker's clock.

**Rows at the workers** asks for each row once (`param_server/exchange`): two swaps for a pull, two for a push, frames with
checksums, rules and stamps of a shard. **Rows at two shards** are the same code with two more processes on the same cores.
**Every id as often as it comes** is torch's own `all_to_all_single` of plain tensors, without dedup, keys, frames or marks, and
its update is written in torch: what asking once saves stands beside it. **TorchRec** is its sharded collection with FBGEMM's
fused update; it returns pooled sums, which is less than rows where rows are more than bags. Its bytes aren't counted.""",
)
