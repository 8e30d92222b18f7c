"""EB-NeRD's week in time order, each request scored before it is trained on: with gradients that wait, and without.

What is compared are the last half's losses, over the same requests. Dirty rows are those that a push changed within 20 steps:
what a delta of as many steps would have to publish.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from benchmarks.question import Work
from benchmarks.workloads.selecting.loops import loop_over
from benchmarks.workloads.sharing.logs import samples_of
from benchmarks.workloads.training_step import shard_client
from param_server.client import Client
from roostream.models.config import RankerConfig
from roostream.wire.lookup import Lookup
from trainer.loop import TrainLoop
from trainer.rows import PushTimes, ShardRows

BATCH, EVERYBODY = 32, 1 << 30
_WARM_UP, _WINDOW = 256, 20


class CountedRows(ShardRows):
    """With what is pushed: of each 20 steps how many rows changed."""

    def __init__(self, client: Client) -> None:
        super().__init__(client)
        self.dirty, self._window, self._changed = 0, 0, set[tuple[int, int]]()
        self.counting_s = 0.0  # CPU time that counting took

    def end_window(self) -> None:
        """Count what has changed since the last one ended."""
        self.dirty += len(self._changed)
        self._changed.clear()

    def push(self, lookup: Lookup, gradients: Mapping[str, Tensor], times: PushTimes) -> None:
        super().push(lookup, gradients, times)
        began_s = time.thread_time()
        if times.step // _WINDOW != self._window:
            self.end_window()
            self._window = times.step // _WINDOW
        for stack in gradients:
            its = lookup.stacks[stack]
            self._changed.update(zip(its.table_U.tolist(), its.id_U.tolist(), strict=True))
        self.counting_s += time.thread_time() - began_s


@contextlib.contextmanager
def in_time_order(
    settings: Mapping[str, Any], seed: int, users: int = EVERYBODY, history: int = 50
) -> Iterator[Work]:
    """`settings`: of the loop, as in a worker's TOML. A step is all requests of so many users, the first one a short one, to warm
    up. CPU time is of training alone, without counting dirty rows."""
    schema, records = samples_of("EB-NeRD", users, history)
    figures: dict[str, float] = {}

    def step() -> None:
        most = len(records) if figures else min(_WARM_UP, len(records))
        with tempfile.TemporaryDirectory() as folder:
            rows = CountedRows(shard_client(schema, folder))
            given = {"batch_requests": BATCH, "seed": seed, **settings}
            figures.update(
                _trained(loop_over(schema, records[:most], RankerConfig(), given, rows), most, rows)
            )

    yield Work(step, lambda: figures["inputs"], lambda: dict(figures), lambda: figures["cpu_s"])


def _trained(loop: TrainLoop, requests: int, rows: CountedRows) -> dict[str, float]:
    began_s, at_half = time.process_time(), {"log_loss": 0.0, "weight": 0.0}
    while loop.step() or loop.finish():
        if loop.counts.requests <= requests // 2:
            at_half = dict(loop.partitions.metrics().sums()["click"])
    cpu_s = time.process_time() - began_s - rows.counting_s
    rows.end_window()
    sums = loop.partitions.metrics().sums()["click"]
    loss = (sums["log_loss"] - at_half["log_loss"]) / (sums["weight"] - at_half["weight"])
    report = loop.selection.report()
    deferred = {name: float(report[name] or 0) for name in ("row_deferred_share",) if name in report}
    return {
        "log loss": loss,
        **deferred,
        "dirty rows": float(rows.dirty),
        "inputs": float(requests),
        "cpu_s": cpu_s,
    }
