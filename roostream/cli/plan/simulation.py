"""A deployment's training as discrete events, to see what sizes beyond this machine do: many shards and workers, stragglers,
losses, commits. Time is made up; costs are the measured ones (roostream/cli/plan/measured.py).

A step: every worker computes its part, then calls every shard for the next rows and with its gradients. A shard answers one call
after the other (first come, first served), and applies a step once the last worker's part of it is there. ShardRpcHandler of one worker
leave one after the other. So a step's calls are W x S, whatever its size.

    worker   compute · noise, seldom a straggler ─► S calls ─► waits for the slowest answer ─► the sum of gradients
    shard    waits for its calls, serves each: call + rows; applies the step
    events   a commit every so often (all wait for the slowest shard's copy) · a machine is lost (all go back to the last commit)
"""

from __future__ import annotations

import dataclasses
import heapq
from typing import NamedTuple

import numpy as np

from roostream.cli.plan.sizing import Costs

_MONTH_S = 30 * 86_400.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scene:
    """What is simulated. Chances and times that nothing measured are assumptions."""

    workers: int
    shards: int
    steps: int = 60  # that are simulated call by call
    hours: float = 6.0  # that are made of them, with commits and losses
    noise: float = 0.1  # sigma of a lognormal factor on everything computed
    straggles: float = (
        0.001  # chance that a worker's part, or a shard's, of one step takes `straggle` times as long
    )
    straggle: float = 10.0
    lost_after_s: float = _MONTH_S  # mean, of one machine
    replaced_s: float = 30.0  # a lost machine is started elsewhere, beside what restoring takes


class SimulatedTraining(NamedTuple):
    """What came of it; seconds are simulated ones."""

    seconds: float
    steps: int  # that count: those that were trained again are counted once
    step_p50_s: float
    step_p99_s: float
    calls_share: float  # of a step's time in calls and their queues, on average
    paused_share: float  # by commits
    lost_share: float  # by losses: what was trained again, and waiting

    @property
    def step_s(self) -> float:
        """Of wall time, all in all, for a step that counts."""
        return self.seconds / max(self.steps, 1)


def served(arrived_WS: np.ndarray, takes_WS: np.ndarray) -> np.ndarray:
    """When each of W calls to each of S servers is done, first come, first served: Lindley's recursion, unrolled.

    done[k] = max over j ≤ k of (arrived[j] + takes[j] + … + takes[k])
    """
    order_WS = np.argsort(arrived_WS, axis=0, kind="stable")
    arrived, takes = np.take_along_axis(arrived_WS, order_WS, 0), np.take_along_axis(takes_WS, order_WS, 0)
    total = np.cumsum(takes, axis=0)
    done = total + np.maximum.accumulate(arrived - (total - takes), axis=0)
    out = np.empty_like(done)
    np.put_along_axis(out, order_WS, done, 0)
    return out


class TrainingSimulation:
    """One deployment. Deterministic for a seed."""

    def __init__(self, costs: Costs, scene: Scene, seed: int = 0) -> None:
        self.costs, self.load, self.scene = costs, costs.load, scene
        self.rng = np.random.default_rng(seed)
        self._calls_s = 0.0

    def step(self) -> float:
        """Seconds of one step of all."""
        scene, costs = self.scene, self.costs
        own_s = self.load.batch_requests / scene.workers * costs.train_s
        ready_W = own_s * self._factors(scene.workers, 1)[:, 0]
        asked_W = self._called(ready_W, costs.figures["pull_row_us"] * 1e-6 * self.load.core)
        told_W = self._called(asked_W, costs.figures["push_row_us"] * 1e-6 * self.load.core)
        end_s = float(told_W.max()) + (costs.turn_s if scene.workers > 1 else 0.0)
        self._calls_s += float(told_W.max() - ready_W.max())
        return end_s

    def _called(self, ready_W: np.ndarray, row_s: float) -> np.ndarray:
        """When each worker has all its answers of one round of calls."""
        scene = self.scene
        num_W, num_S = scene.workers, scene.shards
        turn_WS = (
            np.arange(num_S)[None, :] + np.arange(num_W)[:, None] * max(num_S // num_W, 1)
        ) % num_S  # each begins elsewhere
        leaves_WS = ready_W[:, None] + (turn_WS + 1) * self.costs.call_s
        rows = self.load.batch_requests * self.load.touched / (num_W * num_S)
        takes_WS = (self.costs.call_s + rows * row_s) * self._factors(1, num_S) * np.ones((num_W, 1))
        return served(leaves_WS, takes_WS).max(axis=1)

    def _factors(self, *shape: int) -> np.ndarray:
        """Noise around 1, and stragglers."""
        sigma = self.scene.noise
        found = self.rng.lognormal(-sigma * sigma / 2, sigma, shape) if sigma else np.ones(shape)
        return np.where(self.rng.random(shape) < self.scene.straggles, found * self.scene.straggle, found)

    def pause_s(self, steps: int) -> float:
        """Of a commit behind so many steps: the cut, and the slowest shard's copy of what has changed."""
        changed = (
            min(steps * self.load.batch_requests * self.load.touched, self.load.rows) / self.scene.shards
        )
        copies_S = changed * self.costs.freeze_row_s * self._factors(self.scene.shards)
        return self.costs.of("cut_ms", 1e-3) + float(copies_S.max())

    def run(self) -> SimulatedTraining:
        """`scene.steps` steps call by call; then hours of commits and losses, in which a step takes as long as one of these."""
        scene, load = self.scene, self.load
        pool_s = np.array([self.step() for _ in range(scene.steps)])
        machines = scene.workers + scene.shards
        now_s, counted, committed, paused_s, lost_s, since_s = 0.0, 0, 0, 0.0, 0.0, 0.0
        due = [(load.commit_interval_s, "commit"), (self._lost_at_s(0.0, machines), "loss")]
        heapq.heapify(due)
        while now_s < scene.hours * 3600:
            took_s = float(pool_s[self.rng.integers(len(pool_s))])
            at_s, what = due[0]
            if what == "loss" and at_s < now_s + took_s:  # in the middle of this step
                since_s += max(at_s - now_s, 0.0)
                back_s = scene.replaced_s + self.costs.figures["shard_back_us"] * 1e-6
                now_s, lost_s, counted, since_s = (
                    max(at_s, now_s) + back_s,
                    lost_s + since_s + back_s,
                    committed,
                    0.0,
                )
                heapq.heapreplace(due, (self._lost_at_s(now_s, machines), "loss"))
                continue
            now_s, counted, since_s = now_s + took_s, counted + 1, since_s + took_s
            if what == "commit" and at_s <= now_s:
                pause_s = self.pause_s(counted - committed)
                now_s, paused_s, committed, since_s = now_s + pause_s, paused_s + pause_s, counted, 0.0
                heapq.heapreplace(due, (now_s + load.commit_interval_s, "commit"))
        shares = self._calls_s / max(float(pool_s.sum()), 1e-9), paused_s / now_s, lost_s / now_s
        return SimulatedTraining(
            now_s, counted, float(np.percentile(pool_s, 50)), float(np.percentile(pool_s, 99)), *shares
        )

    def _lost_at_s(self, now_s: float, machines: int) -> float:
        return now_s + float(self.rng.exponential(self.scene.lost_after_s / machines))
