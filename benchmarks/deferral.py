"""What does deferring gradients of slowly changing rows cost?

Trains EB-NeRD's week in time order, with and without deferred gradients, and scores each request before
training on it.

The losses are those of the second half, over the same requests. Dirty rows are rows that a push changed
within 20 steps, which a delta of 20 steps would publish.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from benchmarks.common.dataset_paths import CRITEO, EBNERD, absent
from benchmarks.common.public_logs import samples_of
from benchmarks.common.selection_loop import build_loop
from benchmarks.harness.benchmark import RUN, Benchmark, Row, Subject, SubjectResult, Work
from benchmarks.train_step import shard_client
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
    """Train on EB-NeRD in time order; `settings` are those of the training loop, as in a worker's TOML.

    One step trains all requests of `users` users. The first step is short and warms up. The CPU time covers
    training only; counting changed rows is left out.
    """
    schema, records = samples_of("EB-NeRD", users, history)
    figures: dict[str, float] = {}

    def step() -> None:
        most = len(records) if figures else min(_WARM_UP, len(records))
        with tempfile.TemporaryDirectory() as folder:
            rows = CountedRows(shard_client(schema, folder))
            given = {"batch_requests": BATCH, "seed": seed, **settings}
            figures.update(
                _trained(build_loop(schema, records[:most], RankerConfig(), given, rows), most, rows)
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


_HERE = "benchmarks.selection:rotations"
_IN_TIME_ORDER = "benchmarks.deferral:in_time_order"
OFF, STALE, RANDOM = "every push", "share .6, every 8th", "share .6, at random"


def _compared(told: Mapping[str, SubjectResult]) -> dict[str, float]:
    base = told[OFF].figures
    out: dict[str, float] = {}
    for name, its in told.items():
        if name != OFF:
            out[f"log loss of {name}, %"] = _change(its, told, "log loss")
            out[f"pushes saved by {name}"] = its.figures["row_deferred_share"]
            out[f"cpu of {name}"] = its.figures["cpu_s"] / base["cpu_s"]
    return out


def _in_rotations(told: Mapping[str, SubjectResult]) -> dict[str, float]:
    beaten = sum(
        told[STALE].figures[f"log loss {test}"] < told[RANDOM].figures[f"log loss {test}"]
        for test in range(6)
    )
    return {**_compared(told), "rotations in which staleness beat chance": beaten}


def _in_time_order(told: Mapping[str, SubjectResult]) -> dict[str, float]:
    return {
        **_compared(told),
        **{
            f"dirty rows of {name}, %": _change(told[name], told, "dirty rows")
            for name in told
            if name != OFF
        },
    }


def _change(its: SubjectResult, told: Mapping[str, SubjectResult], figure: str) -> float:
    """In percent of what it is where nothing waits."""
    return 100 * (its.figures[figure] / told[OFF].figures[figure] - 1)


def _waiting(share: float, choice: str) -> dict[str, object]:
    return {"deferral": {"share": share, "visits": 8, "choice": choice}}


_ASKED: dict[str, dict[str, object]] = {
    OFF: {},
    STALE: _waiting(0.6, "stale"),
    "share .9, every 8th": _waiting(0.9, "stale"),
    RANDOM: _waiting(0.6, "random"),
}

BENCHMARK = Benchmark(
    name="deferral",
    summary="What do rows lose whose gradients wait?",
    rows=(
        Row(
            name="rows of Criteo's sample, six rotations, a seed a run",
            unit="inputs",
            shows="cost",
            time="CPU time of the loop",
            subjects=tuple(
                Subject(name, _HERE, (settings, RUN, 6, 5000), "peer" if name == RANDOM else "ours")
                for name, settings in _ASKED.items()
            ),
            derives=_in_rotations,
            skipped=absent(CRITEO),
        ),
        Row(
            name="rows of EB-NeRD's week in time order, a seed a run",
            unit="inputs",
            shows="cost",
            time="CPU time of the loop",
            subjects=tuple(
                Subject(name, _IN_TIME_ORDER, (settings, RUN), "peer" if name == RANDOM else "ours")
                for name, settings in _ASKED.items()
            ),
            derives=_in_time_order,
            skipped=absent(EBNERD),
        ),
    ),
    slice_s=0.0,
    rounds=1,
    interpretation="""\
Gradients of hot rows that hardly move wait for up to eight visits. What that saves in pushes, what it costs in log loss, and
whether the same share of hot rows chosen at random costs more.

As the page of `selection`, with the first 5,000 impressions of each part: five parts trained, the sixth predicted, means over the
six, another seed in each run. `cpu` is the loop's own, deferral and all, so what is above 1 there is its price where pushes cost
next to nothing. Bytes pushed fall by the pushes saved; deltas fall by less, since one has a row once (docs/decisions/0068).

EB-NeRD: the shipped schema without what depends on the rest of the list, the default model, batches of 32, each request scored
before it is trained on; the loss is that of the last half of the week's requests. Dirty rows are those that 20 steps changed,
which is what deltas publish; counting them isn't in `cpu`.""",
)
