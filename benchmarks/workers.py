"""What do several workers train, at equal batches, and what of it is summing?

Several worker processes train one model: the time of a common step, and the part that gradient summation
takes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Iterator

import psutil

from benchmarks.common.peer_process import Peer, start_peer
from benchmarks.common.train_worker import Part, Took
from benchmarks.harness.benchmark import Benchmark, Row, Subject, Work
from benchmarks.pipeline import shard_processes

_WARM_TURNS = 10
_TRIAL_TURNS = 10


class Workers:
    """Processes that take as many turns each; figures are of the last of them."""

    def __init__(self, workers: list[Peer], shards: list[Peer], turns: int) -> None:
        self._workers, self._shards, self._turns = workers, shards, turns
        self._took: list[Took] = []
        self._wall_s = self._shards_cpu_s = 0.0

    def take(self, turns: int) -> None:
        before_s, wall_s = self._cpu_of_shards(), time.perf_counter()
        for worker in self._workers:
            worker.send_line(str(turns))
        self._took = [Took(**json.loads(worker.read_line())) for worker in self._workers]
        self._wall_s, self._shards_cpu_s = time.perf_counter() - wall_s, self._cpu_of_shards() - before_s

    def turns_of(self, seconds: float) -> int:
        """How many turns take about so long."""
        self.take(_WARM_TURNS)
        self.take(_TRIAL_TURNS)
        return max(int(_TRIAL_TURNS * seconds / self._wall_s), 1)

    def step(self) -> None:
        self.take(self._turns)

    def requests(self) -> float:
        return float(sum(took.requests for took in self._took))

    def figures(self) -> dict[str, float]:
        steps = max(took.steps for took in self._took) or 1
        cpu_s = sum(took.cpu_s for took in self._took)
        return {
            "steps a second": steps / self._wall_s,
            "requests a step": self.requests() / steps,
            "CPU ms a step, workers": 1e3 * cpu_s / steps,
            "CPU ms a step, shards": 1e3 * self._shards_cpu_s / steps,
            "in the sum %": 100
            * sum(took.reduce_s for took in self._took)
            / sum(took.wall_s for took in self._took),
            "cores in use": (cpu_s + self._shards_cpu_s) / self._wall_s,
        }

    def _cpu_of_shards(self) -> float:
        return sum(sum(psutil.Process(shard.pid).cpu_times()[:2]) for shard in self._shards)


@contextlib.contextmanager
def trained(workers: int, requests: int, candidates: int, seconds: float) -> Iterator[Work]:
    """Units: requests. `requests`: of a step, all workers together; `seconds`: about what a turn takes."""
    yield from _work(workers, requests, candidates, seconds, trains=True)


@contextlib.contextmanager
def summed(workers: int, requests: int, candidates: int, seconds: float) -> Iterator[Work]:
    """As many requests as if each sum were the step of a batch: what a step can't be shorter than."""
    yield from _work(workers, requests, candidates, seconds, trains=False)


def _work(workers: int, requests: int, candidates: int, seconds: float, *, trains: bool) -> Iterator[Work]:
    with contextlib.ExitStack() as opened:
        shards = opened.enter_context(shard_processes())
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
            own = dataclasses.replace(part, worker=worker, meet=peers[0].address if peers else "")
            described = json.dumps(dataclasses.asdict(own))
            peers.append(opened.enter_context(start_peer("benchmarks.common.train_worker", described)))
        its = Workers(peers, shards, 1)
        its = Workers(peers, shards, its.turns_of(seconds))
        yield Work(its.step, its.requests, its.figures)


_HERE = "benchmarks.workers"
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
Workers and shards are processes of their own on the same cores: as many of these as the machine has can be in use, whatever the
number of workers. So what several workers can win here is what one worker leaves idle, and they are worth it where each has a
core of its own. CPU ms a step say what that would give: a step of W workers takes at least a W-th of what all of them spend.

A step is as large for any number of workers: each has its part of the batch. "In the sum" is what a worker's loop spends in the
all-reduce of a turn (gradients and words, float64), most of it waiting for whoever is last. The sum alone is that of buckets of
the same size, by as many processes that do nothing else.

The demo schema, samples in memory, two shards over loopback, gloo over loopback, one torch thread a worker, read ahead as by
default. One worker alone sums with nobody.""",
)
