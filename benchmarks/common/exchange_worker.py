"""A worker process of placement-exchange: `python -m benchmarks.common.exchange_worker JSON`.

It prints its address and reads the address of worker 0. Then it reads lines with a way, a shape, a number of
steps and the shards' addresses, runs the steps together with the other workers, and prints the times.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import sys
import tempfile
import time
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from benchmarks.common.exchange_ways import (
    Asked,
    Batch,
    PlainExchange,
    Shape,
    TorchRecSharded,
    Way,
    batches_of,
)
from benchmarks.common.shard import empty_shard
from benchmarks.pipeline import client_of
from param_server.row_exchange import RowExchange
from roostream.runtime.address import parse_address
from trainer.process_group import GroupSpec, TorchRendezvous
from trainer.rows import ShardRows

CHECKED = 16  # updates behind which all ways' sums are compared
_TIMEOUT_S = 60.0


class Took(NamedTuple):
    """What so many steps took."""

    wall_s: float
    sent_bytes: int  # 0 = not counted
    differs: float  # the most that a sum differs from ours behind CHECKED updates
    ids: int


class ExchangeWorker:
    """Its ways are made when they are first asked for, and checked against the first of their shape."""

    def __init__(
        self,
        index: int,
        workers: int,
        place: TorchRendezvous,
        told: dict[str, Any],
        opened: contextlib.ExitStack,
    ) -> None:
        self.index, self.workers, self.place, self.told, self.opened = index, workers, place, told, opened
        self._ways: dict[tuple[str, Shape], tuple[Way, float]] = {}
        self._expected: dict[Shape, Tensor] = {}
        self._batches: dict[Shape, list[Batch]] = {}

    def take(self, kind: str, shape: Shape, steps: int, shards: list[str]) -> Took:
        """The others take as many."""
        if shape not in self._batches:
            self._batches[shape] = batches_of(shape, self.index)
        batches = self._batches[shape]
        if (kind, shape) not in self._ways:
            self._ways[kind, shape] = self._checked(self._made(kind, shape, shards), shape)
        way, differs = self._ways[kind, shape]
        sent = way.sent_bytes
        dist.barrier()
        began_s = time.perf_counter()
        for n in range(steps):
            way.step(batches[n % len(batches)])
        wall_s = time.perf_counter() - began_s
        ids = sum(sum(map(len, batches[n % len(batches)].id_TL)) for n in range(steps))
        return Took(wall_s, way.sent_bytes - sent, differs, ids)

    def _made(self, kind: str, shape: Shape, shards: list[str]) -> Way:
        if kind == "workers":
            store = self.opened.enter_context(tempfile.TemporaryDirectory())
            shard = empty_shard(
                shape.schema, store, publishing=False, index=self.index, num_shards=self.workers
            )
            about = f" rows {len(self._ways)}"
            peers = self.place.join(GroupSpec(1, self.index, self.workers, self.told["meet"], about))
            self.opened.callback(peers.leave)
            rows = RowExchange(shard, peers)
            rows.set_incarnation(1, self.workers)
            return Asked(shape, ShardRows(rows))
        if kind == "shards":
            client = client_of(shape.schema, shards, worker=self.index, workers=self.workers)
            return Asked(shape, ShardRows(self.opened.enter_context(client)))
        if kind == "plain":
            return PlainExchange(shape)
        return TorchRecSharded(shape, kind.removeprefix("torchrec "))

    def _checked(self, way: Way, shape: Shape) -> tuple[Way, float]:
        """It begins where all ways begin, and so many updates later all have the same sums."""
        batches = self._batches[shape]
        for n in range(CHECKED):
            way.step(batches[n % len(batches)])
        out_TED = way.step(batches[CHECKED % len(batches)])
        if not bool(torch.isfinite(out_TED).all()):
            raise ArithmeticError("sums are not finite")
        expected = self._expected.setdefault(shape, out_TED)
        return way, float((out_TED - expected).abs().max())


def main() -> None:
    index, workers = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    answers, sys.stdout = sys.stdout, sys.stderr
    place = TorchRendezvous("127.0.0.1:0", device="cpu", timeout_s=_TIMEOUT_S)
    with contextlib.ExitStack() as opened:
        opened.callback(place.close)
        print(place.address, file=answers, flush=True)
        told = json.loads(sys.stdin.readline())
        host, port = parse_address(told["rendezvous"])
        store = c10d.TCPStore(
            host, port, is_master=index == 0, timeout=datetime.timedelta(seconds=_TIMEOUT_S)
        )
        dist.init_process_group("gloo", store=store, rank=index, world_size=workers)
        opened.callback(dist.destroy_process_group)
        worker = ExchangeWorker(index, workers, place, told, opened)
        for line in sys.stdin:
            kind, shape, steps, shards = json.loads(line)
            print(json.dumps(worker.take(kind, Shape(*shape), steps, shards)), file=answers, flush=True)


if __name__ == "__main__":
    main()
