"""Throughput of several workers at equal batches, and the part that summing gradients takes.

Worker processes train one model. `python -m benchmarks.workers JSON` is a worker process: it prints its
rendezvous address, reads lines with a number of turns, takes them, and prints their costs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Iterator

import psutil
import torch

from benchmarks.common import samples as data
from benchmarks.common.peer_process import Peer, start_peer
from benchmarks.common.shard import remote_client, shard_processes
from benchmarks.harness.benchmark import Benchmark, Row, Subject, TurnResult, WholeTurn
from benchmarks.pipeline import NUM_SHARDS, training_loop
from benchmarks.train_step import NUM_PARTITIONS
from trainer.lockstep import LockStep
from trainer.loop import TrainLoop
from trainer.pipeline.stage_timer import LOOP
from trainer.process_group import GroupSpec, ProcessGroup, TorchRendezvous
from trainer.rows import ShardRows

_HERE = "benchmarks.workers"
_WARM_TURNS = 10
_TRIAL_TURNS = 10
READ_AHEAD = 2  # as by default
_TIMEOUT_S = 60.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """One worker's share of a step."""

    worker: int
    workers: int
    requests: int  # of this one's batch
    candidates: int
    shards: list[str]
    rendezvous: str = ""  # address of worker 0; "" for worker 0
    trains: bool = True  # False: it only sums a bucket as large as that of a step


@dataclasses.dataclass(frozen=True, kw_only=True)
class Took:
    """Costs of some turns of one worker."""

    steps: int
    requests: int
    wall_s: float
    cpu_s: float
    reduce_s: float


class WorkerLoop:
    """A worker's training loop, in lock-step with other workers or alone."""

    def __init__(self, part: Part, loop: TrainLoop, reduction: ProcessGroup) -> None:
        self.part, self.loop, self.reduction = part, loop, reduction
        self.lockstep = LockStep(loop, reduction) if part.workers > 1 else None
        parameters = [p for p in loop.model.parameters() if p.requires_grad]
        self._bucket_N = torch.zeros(sum(p.numel() + 1 for p in parameters), dtype=torch.float64)
        self._requests, self._sum_s = 0, 0.0

    def take(self, turns: int) -> Took:
        """Take this many turns. The other workers take as many."""
        turn = self._turn if self.part.trains else self._sum
        requests, reduce_s, wall_s, cpu_s = (
            self.num_requests,
            self.reduce_s,
            time.perf_counter(),
            time.process_time(),
        )
        steps = sum(turn() for _ in range(turns))
        return Took(
            steps=steps,
            requests=self.num_requests - requests,
            wall_s=time.perf_counter() - wall_s,
            cpu_s=time.process_time() - cpu_s,
            reduce_s=self.reduce_s - reduce_s,
        )

    @property
    def num_requests(self) -> int:
        return self.loop.counts.requests if self.part.trains else self._requests

    @property
    def reduce_s(self) -> float:
        return self.loop.stages.seconds()["reduce", LOOP] if self.part.trains else self._sum_s

    def _turn(self) -> bool:
        return self.lockstep.turn().trains if self.lockstep else self.loop.step()

    def _sum(self) -> bool:
        began_s = time.perf_counter()
        self.reduction.sum(self._bucket_N.zero_())
        self._sum_s += time.perf_counter() - began_s
        self._requests += self.part.requests
        return True


@contextlib.contextmanager
def worker_loop(part: Part, place: TorchRendezvous) -> Iterator[WorkerLoop]:
    schema = data.demo_schema()
    size = (part.requests, part.candidates)
    with (
        remote_client(schema, part.shards, worker=part.worker, workers=part.workers) as client,
        training_loop(schema, ShardRows(client), size, READ_AHEAD, 0) as loop,
    ):
        loop.assign([p for p in range(NUM_PARTITIONS) if p % part.workers == part.worker])
        loop.reset()
        reduction = place.join(GroupSpec(1, part.worker, part.workers, part.rendezvous or place.address))
        try:
            yield WorkerLoop(part, loop, reduction)
        finally:
            reduction.leave()


class Workers:
    """Worker processes that take the same number of turns."""

    def __init__(self, workers: list[Peer], shards: list[Peer]) -> None:
        self._workers, self._shards, self.turns = workers, shards, 1
        self._took: list[Took] = []
        self._wall_s = self._shards_cpu_s = 0.0

    def take(self, turns: int) -> None:
        before_s, wall_s = self._cpu_of_shards(), time.perf_counter()
        for worker in self._workers:
            worker.send_line(str(turns))
        self._took = [Took(**json.loads(worker.read_line())) for worker in self._workers]
        self._wall_s, self._shards_cpu_s = time.perf_counter() - wall_s, self._cpu_of_shards() - before_s

    def turns_of(self, seconds: float) -> int:
        """The number of turns that take about so long."""
        self.take(_WARM_TURNS)
        self.take(_TRIAL_TURNS)
        return max(int(_TRIAL_TURNS * seconds / self._wall_s), 1)

    def turn(self) -> TurnResult:
        self.take(self.turns)
        steps = max(took.steps for took in self._took) or 1
        cpu_s = sum(took.cpu_s for took in self._took)
        requests = sum(took.requests for took in self._took)
        figures = {
            "steps a second": steps / self._wall_s,
            "requests a step": requests / steps,
            "CPU ms a step, workers": 1e3 * cpu_s / steps,
            "CPU ms a step, shards": 1e3 * self._shards_cpu_s / steps,
            "in the sum %": 100
            * sum(took.reduce_s for took in self._took)
            / sum(took.wall_s for took in self._took),
            "cores in use": (cpu_s + self._shards_cpu_s) / self._wall_s,
        }
        return TurnResult(requests, None, figures)

    def _cpu_of_shards(self) -> float:
        return sum(sum(psutil.Process(shard.pid).cpu_times()[:2]) for shard in self._shards)


@contextlib.contextmanager
def trained(workers: int, requests: int, candidates: int, seconds: float) -> Iterator[WholeTurn]:
    """Units: requests. `requests`: of a step of all workers; `seconds`: approximate length of a turn."""
    yield from _work(workers, requests, candidates, seconds, trains=True)


@contextlib.contextmanager
def summed(workers: int, requests: int, candidates: int, seconds: float) -> Iterator[WholeTurn]:
    """Only the gradient sums of the same number of steps."""
    yield from _work(workers, requests, candidates, seconds, trains=False)


def _work(
    workers: int, requests: int, candidates: int, seconds: float, *, trains: bool
) -> Iterator[WholeTurn]:
    with contextlib.ExitStack() as opened:
        shards = opened.enter_context(shard_processes(str(data.DEMO), NUM_SHARDS))
        part = Part(
            worker=0,
            workers=workers,
            requests=requests // workers,
            candidates=candidates,
            shards=[shard.address for shard in shards],
            trains=trains,
        )
        peers: list[Peer] = []
        for worker in range(workers):
            own_part = dataclasses.replace(part, worker=worker, rendezvous=peers[0].address if peers else "")
            described = json.dumps(dataclasses.asdict(own_part))
            peers.append(opened.enter_context(start_peer(_HERE, described)))
        running = Workers(peers, shards)
        running.turns = running.turns_of(seconds)
        yield WholeTurn(running.turn)


_SECONDS = 3.0


def _batch(requests: int, candidates: int) -> Row:
    size = (requests, candidates, _SECONDS)
    return Row(
        name=f"steps of {requests} requests of {candidates} candidates, all workers together",
        unit="requests",
        subjects=(
            Subject("2 workers", f"{_HERE}:trained", (2, *size)),
            Subject("1 worker", f"{_HERE}:trained", (1, *size), "stage"),
            Subject("4 workers", f"{_HERE}:trained", (4, *size), "stage"),
            Subject("2 workers, the sum alone", f"{_HERE}:summed", (2, *size), "limit"),
        ),
    )


BENCHMARK = Benchmark(
    name="workers",
    summary="What do several workers train, at equal batches, and what of it is summing?",
    rows=(_batch(64, 11), _batch(512, 5)),
    slice_s=_SECONDS,
    rounds=3,
    interpretation="""\
A step has the same number of requests for any number of workers; each trains its part of the batch. Workers
and two shards are processes on the same cores, so several workers gain only what one leaves idle; "CPU ms a
step" tells what cores of their own would give. "In the sum" is the share of a worker's loop in the
all-reduce of gradients (float64, gloo), mostly waiting for the slowest. "The sum alone" reduces buckets of
the same size without training. Samples are in memory, one torch thread a worker.""",
)


def main() -> None:
    part = Part(**json.loads(sys.argv[1]))
    place = TorchRendezvous("127.0.0.1:0", device="cpu", timeout_s=_TIMEOUT_S)
    try:
        with worker_loop(part, place) as worker:
            print(place.address, flush=True)
            for line in sys.stdin:
                print(json.dumps(dataclasses.asdict(worker.take(int(line)))), flush=True)
    finally:
        place.close()


if __name__ == "__main__":
    main()
