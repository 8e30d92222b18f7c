"""Workers in processes of their own, one model: what a step of all of them takes, and what of it is summing."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Iterator

import psutil

from benchmarks.question import Work
from benchmarks.workloads.pipeline import shard_processes
from benchmarks.workloads.server import Peer, talking
from benchmarks.workloads.train_worker import Part, Took

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
            worker.tell(str(turns))
        self._took = [Took(**json.loads(worker.heard())) for worker in self._workers]
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
            peers.append(opened.enter_context(talking("benchmarks.workloads.train_worker", described)))
        its = Workers(peers, shards, 1)
        its = Workers(peers, shards, its.turns_of(seconds))
        yield Work(its.step, its.requests, its.figures)
