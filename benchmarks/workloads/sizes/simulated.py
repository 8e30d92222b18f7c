"""Training at sizes beyond a machine, simulated over the committed figures (roostream/cli/plan/simulation.py)."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

from benchmarks.question import Work
from roostream.cli.plan import measured
from roostream.cli.plan.simulation import Scene, SimulatedTraining, TrainingSimulation
from roostream.cli.plan.sizing import Costs, Load


@contextlib.contextmanager
def training(workers: int, shards: int, batch_requests: int, scene: dict[str, Any]) -> Iterator[Work]:
    """A turn is one simulation, each with another seed; its time is the simulated one. Requests."""
    load = Load(requests_per_s=1e6, rows=10**9, batch_requests=batch_requests)
    costs, seeds = Costs(load, measured.read()), itertools.count()
    told: list[SimulatedTraining] = []

    def simulate() -> None:
        told[:] = [
            TrainingSimulation(costs, Scene(workers=workers, shards=shards, **scene), next(seeds)).run()
        ]

    def figures() -> dict[str, float]:
        its = told[0]
        return {
            "a step's p50, ms": its.step_p50_s * 1e3,
            "p99, ms": its.step_p99_s * 1e3,
            "in calls %": its.calls_share * 100,
            "paused by commits %": its.paused_share * 100,
            "lost by machines lost %": its.lost_share * 100,
        }

    yield Work(simulate, lambda: told[0].steps * batch_requests, figures, lambda: told[0].seconds)
