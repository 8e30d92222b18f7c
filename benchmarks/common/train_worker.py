"""A worker process of the workers benchmark: `python -m benchmarks.common.train_worker JSON`.

It prints its rendezvous address. Then it reads lines with a number of steps, runs the steps, and prints their
times.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator

import torch

from benchmarks.common import samples as data
from benchmarks.pipeline import client_of, training_loop
from benchmarks.train_step import NUM_PARTITIONS
from trainer.lockstep import LockStep
from trainer.loop import TrainLoop
from trainer.pipeline.stage_timer import LOOP
from trainer.process_group import GroupSpec, ProcessGroup, TorchRendezvous
from trainer.rows import ShardRows

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
    meet: str = ""  # where worker 0 is met; of worker 0 itself ""
    trains: bool = True  # False: it sums a bucket as large as a step's, and nothing else


@dataclasses.dataclass(frozen=True, kw_only=True)
class Took:
    """What so many turns of one worker took."""

    steps: int
    requests: int
    wall_s: float
    cpu_s: float
    reduce_s: float


class Trainee:
    """A worker's loop in lock-step with the others', or alone."""

    def __init__(self, part: Part, loop: TrainLoop, reduction: ProcessGroup) -> None:
        self.part, self.loop, self.reduction = part, loop, reduction
        self.lockstep = LockStep(loop, reduction) if part.workers > 1 else None
        parameters = [p for p in loop.model.parameters() if p.requires_grad]
        self._bucket_N = torch.zeros(sum(p.numel() + 1 for p in parameters), dtype=torch.float64)
        self._requests, self._sum_s = 0, 0.0

    def take(self, turns: int) -> Took:
        """So many turns; the others take as many."""
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
def trainee(part: Part, place: TorchRendezvous) -> Iterator[Trainee]:
    schema = data.demo_schema()
    size = (part.requests, part.candidates)
    with (
        client_of(schema, part.shards, worker=part.worker, workers=part.workers) as client,
        training_loop(schema, ShardRows(client), size, READ_AHEAD, 0) as loop,
    ):
        loop.assign([p for p in range(NUM_PARTITIONS) if p % part.workers == part.worker])
        loop.reset()
        reduction = place.join(GroupSpec(1, part.worker, part.workers, part.meet or place.address))
        try:
            yield Trainee(part, loop, reduction)
        finally:
            reduction.leave()


def answer(take: Callable[[int], Took]) -> None:
    """Until stdin ends."""
    for line in sys.stdin:
        print(json.dumps(dataclasses.asdict(take(int(line)))), flush=True)


def main() -> None:
    part = Part(**json.loads(sys.argv[1]))
    place = TorchRendezvous("127.0.0.1:0", device="cpu", timeout_s=_TIMEOUT_S)
    try:
        with trainee(part, place) as it:
            print(place.address, flush=True)
            answer(it.take)
    finally:
        place.close()


if __name__ == "__main__":
    main()
