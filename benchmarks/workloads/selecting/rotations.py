"""Train on five parts, predict the sixth, for every part: with a policy, and with what it is compared with.

The loop is the product's own, with one shard in the same process; CPU time is of its training alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from benchmarks.question import Work
from benchmarks.workloads.selecting.logs import PARTS, has_criteo, part, schema
from benchmarks.workloads.selecting.loops import loop_over
from benchmarks.workloads.training_step import shard_client
from roostream.models.config import RankerConfig
from roostream.wire.decode import Decoder
from roostream.wire.records import Record
from trainer.loop import TrainLoop
from trainer.monitoring.progressive_metrics import Metrics
from trainer.rows import ShardRows
from trainer.selection.config import SlipstreamConfig
from trainer.selection.slipstream_policy import AHEAD

BATCH, _WARM_UP = 128, 200
MODEL = RankerConfig(
    request_layers=(8,),
    history_attention=False,
    cross_layers=2,
    cross_rank=16,
    width=64,
    list_layers=0,
    prior=0.03,
)


_TRAINED: dict[str, float] = {}
"""What a rotation trained, as a share of all: for those that train as many."""


@contextlib.contextmanager
def rotations(
    settings: Mapping[str, Any],
    seed: int,
    max_parts: int = PARTS,
    max_inputs: int | None = None,
    model: Mapping[str, Any] | None = None,
    like: Mapping[str, Any] | None = None,
) -> Iterator[Work]:
    """`settings`: of the loop, as in a worker's TOML. A step is all rotations, the first one a short one, to warm up; figures are
    means over them. `max_inputs`: of each part; `model`: others of its settings; `like`: settings asked before in this process,
    of whose requests as many are dropped, rotation by rotation, from the same step on."""
    figures: dict[str, float] = {}
    asked, whole = _Asked(settings, model or {}, seed), [False]

    def step() -> None:
        most, tests = (max_inputs, max_parts) if whole[0] else (min(max_inputs or _WARM_UP, _WARM_UP), 1)
        told = [_rotation(asked, test, most, like) for test in range(tests)]
        whole[0] = True
        figures.clear()
        figures.update({name: float(np.mean([one[name] for one in told])) for name in told[0]})
        figures.update({f"log loss {test}": one["log loss"] for test, one in enumerate(told)})

    def took_s() -> float:
        return figures["cpu_s"] * max_parts

    yield Work(step, lambda: figures["inputs"] * max_parts, lambda: dict(figures), took_s)


class _Asked(NamedTuple):
    settings: Mapping[str, Any]
    model: Mapping[str, Any]
    seed: int

    def key(self, test: int, most: int | None) -> str:
        return json.dumps([self.settings, self.model, self.seed, test, most], sort_keys=True)

    def begins(self) -> int:
        """Steps before any request is skipped."""
        its = self.settings["selection"]
        return (
            SlipstreamConfig(**its["slipstream"]).last_snapshot + AHEAD
            if its["policy"] == "slipstream"
            else 0
        )


def _rotation(asked: _Asked, test: int, most: int | None, like: Mapping[str, Any] | None) -> dict[str, float]:
    criteo = has_criteo()
    train = [
        record
        for number in range(PARTS)
        if number != test
        for record in part(number, criteo=criteo, most=most)
    ]
    with tempfile.TemporaryDirectory() as folder:
        loop = _loop(_renumbered(train), asked, folder)
        began_s = time.process_time()
        if like is not None:
            _train_like(loop, asked._replace(settings=like), test, most, len(train))
        while loop.step() or loop.finish():
            pass
        cpu_s = time.process_time() - began_s
        found = _judge(loop, list(part(test, criteo=criteo, most=most)))
    total = loop.outcomes.total
    trained = _TRAINED[asked.key(test, most)] = total["trained"] / total["taken"]
    report = loop.selection.report()
    deferred = {name: float(report[name] or 0) for name in ("row_deferred_share",) if name in report}
    return {
        **found,
        **deferred,
        "inputs": len(train),
        "trained": trained,
        "steps": loop.num_steps,
        "cpu_s": cpu_s,
    }


def _train_like(loop: TrainLoop, other: _Asked, test: int, most: int | None, num_inputs: int) -> None:
    """The steps in which the other skipped nothing; behind them as many are kept as there."""
    config, begins = loop.selection.config, other.begins()
    loop.selection.config = dataclasses.replace(config, policy="off")
    while loop.num_steps < begins and loop.step():
        pass
    rest = max(1 - begins * BATCH / num_inputs, 1 / num_inputs)
    kept = 1 - (1 - _TRAINED[other.key(test, most)]) / rest
    loop.selection.config = dataclasses.replace(config, keep=min(max(kept, 0.05), 1.0))


def _renumbered(records: list[Record]) -> list[Record]:
    return [record._replace(offset=n) for n, record in enumerate(records)]


def _loop(records: list[Record], asked: _Asked, folder: str) -> TrainLoop:
    given = {"batch_requests": BATCH, "seed": asked.seed, **asked.settings}
    return loop_over(
        schema(),
        records,
        dataclasses.replace(MODEL, **asked.model),
        given,
        ShardRows(shard_client(schema(), folder)),
    )


def _judge(loop: TrainLoop, records: list[Record]) -> dict[str, float]:
    metrics, decoder = Metrics(schema().tasks), Decoder(schema(), {schema().fingerprint: schema()}.get)
    for start in range(0, len(records), 1000):
        batch, _ = decoder.decode(records[start : start + 1000])
        score_BT = loop.scores(batch)
        metrics.update(score_BT, batch.label_BT, batch.weight_BT, batch.request_index_B, batch.time_ms_R)
    sums, report = metrics.sums()["click"], metrics.report()
    return {
        "log loss": sums["log_loss"] / sums["weight"],
        "ne": float(report["ne"]),  # type: ignore[arg-type]
        "auc": float(report["auc"]),  # type: ignore[arg-type]
    }
