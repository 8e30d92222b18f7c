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
from benchmarks.common.shard import local_client
from benchmarks.harness.benchmark import RUN, Benchmark, Row, Subject, SubjectResult, TurnResult, WholeTurn
from benchmarks.selection import build_loop
from param_server.client import Client
from roostream.models.config import RankerConfig
from roostream.wire.lookup import Lookup
from trainer.loop import TrainLoop
from trainer.rows import PushTimes, ShardRows

BATCH, EVERYBODY = 32, 1 << 30
_WARM_UP, _WINDOW = 256, 20


class CountedRows(ShardRows):
    """Counts the rows that pushes change in windows of 20 steps."""

    def __init__(self, client: Client) -> None:
        super().__init__(client)
        self.dirty, self._window, self._changed = 0, 0, set[tuple[int, int]]()
        self.counting_s = 0.0  # CPU time that counting took

    def end_window(self) -> None:
        """Add the rows that have changed in this window."""
        self.dirty += len(self._changed)
        self._changed.clear()

    def push(self, lookup: Lookup, gradients: Mapping[str, Tensor], times: PushTimes) -> None:
        super().push(lookup, gradients, times)
        began_s = time.thread_time()
        if times.step // _WINDOW != self._window:
            self.end_window()
            self._window = times.step // _WINDOW
        for stack in gradients:
            keys = lookup.stacks[stack]
            self._changed.update(zip(keys.table_U.tolist(), keys.id_U.tolist(), strict=True))
        self.counting_s += time.thread_time() - began_s


@contextlib.contextmanager
def in_time_order(
    settings: Mapping[str, Any], seed: int, users: int = EVERYBODY, history: int = 50
) -> Iterator[WholeTurn]:
    """Train on EB-NeRD in time order; `settings` are those of the training loop, as in a worker's TOML.

    A turn trains all requests of `users` users. The CPU time covers training without counting rows.
    """
    schema, records = samples_of("EB-NeRD", users, history)

    def run(num_records: int) -> TurnResult:
        with tempfile.TemporaryDirectory() as folder:
            rows = CountedRows(local_client(schema, folder))
            loop_settings = {"batch_requests": BATCH, "seed": seed, **settings}
            loop = build_loop(schema, records[:num_records], RankerConfig(), loop_settings, rows)
            figures = _trained(loop, num_records, rows)
        return TurnResult(figures["inputs"], figures["cpu_s"], figures)

    yield WholeTurn(lambda: run(len(records)), warm_up=lambda: run(min(_WARM_UP, len(records))))


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


def _compared(results: Mapping[str, SubjectResult]) -> dict[str, float]:
    base = results[OFF].figures
    out: dict[str, float] = {}
    for name, result in results.items():
        if name != OFF:
            out[f"log loss of {name}, %"] = _change(result, results, "log loss")
            out[f"pushes saved by {name}"] = result.figures["row_deferred_share"]
            out[f"cpu of {name}"] = result.figures["cpu_s"] / base["cpu_s"]
    return out


def _in_rotations(results: Mapping[str, SubjectResult]) -> dict[str, float]:
    beaten = sum(
        results[STALE].figures[f"log loss {test}"] < results[RANDOM].figures[f"log loss {test}"]
        for test in range(6)
    )
    return {**_compared(results), "rotations in which staleness beat chance": beaten}


def _in_time_order(results: Mapping[str, SubjectResult]) -> dict[str, float]:
    return {
        **_compared(results),
        **{
            f"dirty rows of {name}, %": _change(results[name], results, "dirty rows")
            for name in results
            if name != OFF
        },
    }


def _change(result: SubjectResult, results: Mapping[str, SubjectResult], figure: str) -> float:
    """Change in percent against training without deferral."""
    return 100 * (result.figures[figure] / results[OFF].figures[figure] - 1)


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
Gradients of hot rows that hardly change wait for up to eight visits. The figures are the saved pushes, the
change of log loss, and a control that defers the same share of hot rows at random. The first row is set up
as on the page of `selection`, with the first 5,000 impressions of each part. The second trains EB-NeRD's
week in time order with the default model in batches of 32 and scores each request before it is trained; the
loss is that of the second half. "cpu" above 1 is the price of deferral where pushes cost almost nothing;
"dirty rows" are the rows that 20 steps changed, which a delta would publish (decision 0068).""",
)
