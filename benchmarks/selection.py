"""What does it cost to train on less of a log of clicks?

Six-fold cross-validation: trains on five parts and predicts the sixth, with a selection policy and with its
controls.

Uses the trainer's loop with one shard in the same process; the CPU time is that of training only.
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

from benchmarks.common.criteo_log import PARTS, has_criteo, part, schema
from benchmarks.common.dataset_paths import CRITEO, absent
from benchmarks.common.shard import local_client
from benchmarks.harness.benchmark import RUN, Benchmark, Row, Subject, SubjectResult, TurnResult, WholeTurn
from benchmarks.train_step import Silent
from roostream.models.config import RankerConfig
from roostream.runtime.clock import SystemClock
from roostream.runtime.kafka.consumer import MemoryConsumer
from roostream.schema.schema import Schema
from roostream.schema.settings import from_dict
from roostream.wire.decode import Decoder
from roostream.wire.records import Record
from trainer.config import LoopConfig
from trainer.loop import LoopDependencies, TrainLoop
from trainer.monitoring.progressive_metrics import Metrics, ScoredBatch
from trainer.record_source import RecordSource
from trainer.rows import Rows, ShardRows
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


_PARTITIONS = (("samples", 0),)


def build_loop(
    schema: Schema, records: list[Record], model: RankerConfig, settings: Mapping[str, Any], rows: Rows
) -> TrainLoop:
    """A training loop over samples of one partition, with offsets from 0. `settings`: of the loop, as in a
    worker's TOML; all batches have `batch_requests` requests."""
    given = {"first_batch_requests": settings["batch_requests"], "dedupe_horizon_ms": 1 << 40, **settings}
    clock = SystemClock()
    source = RecordSource(
        MemoryConsumer(_PARTITIONS, records),
        Decoder(schema, {schema.fingerprint: schema}.get),
        clock,
        max_wait_ms=0,
    )
    dependencies = LoopDependencies(source=source, rows=rows, outputs=Silent(), clock=clock)
    return TrainLoop(from_dict(LoopConfig, given), schema, model, dependencies)


_TRAINED: dict[str, float] = {}
"""Task → share of the requests that it trained; for controls that train as many."""


@contextlib.contextmanager
def rotations(
    settings: Mapping[str, Any],
    seed: int,
    max_parts: int = PARTS,
    max_inputs: int | None = None,
    model: Mapping[str, Any] | None = None,
    like: Mapping[str, Any] | None = None,
) -> Iterator[WholeTurn]:
    """`settings`: of the loop, as in a worker's TOML. A turn is all rotations; figures are their means.

    `max_inputs`: of each part; `model`: changed model settings; `like`: settings that were measured before in
    this process. As many requests are dropped as with those, per rotation and from the same step on.
    """
    task = _Task(settings, model or {}, seed)

    def turn() -> TurnResult:
        results = [_rotation(task, test, max_inputs, like) for test in range(max_parts)]
        figures = {name: float(np.mean([one[name] for one in results])) for name in results[0]}
        figures |= {f"log loss {test}": one["log loss"] for test, one in enumerate(results)}
        return TurnResult(figures["inputs"] * max_parts, figures["cpu_s"] * max_parts, figures)

    def warm_up() -> None:
        _rotation(task, 0, min(max_inputs or _WARM_UP, _WARM_UP), like)

    yield WholeTurn(turn, warm_up)


class _Task(NamedTuple):
    settings: Mapping[str, Any]
    model: Mapping[str, Any]
    seed: int

    def key(self, test: int, max_inputs: int | None) -> str:
        return json.dumps([self.settings, self.model, self.seed, test, max_inputs], sort_keys=True)

    def first_skip(self) -> int:
        """The first step that may skip requests."""
        selection = self.settings["selection"]
        if selection["policy"] != "slipstream":
            return 0
        return SlipstreamConfig(**selection["slipstream"]).last_snapshot + AHEAD


def _rotation(
    task: _Task, test: int, max_inputs: int | None, like: Mapping[str, Any] | None
) -> dict[str, float]:
    criteo = has_criteo()
    train = [
        record
        for number in range(PARTS)
        if number != test
        for record in part(number, criteo=criteo, max_records=max_inputs)
    ]
    with tempfile.TemporaryDirectory() as folder:
        loop = _loop(_renumbered(train), task, folder)
        began_s = time.process_time()
        if like is not None:
            _train_like(loop, task._replace(settings=like), test, max_inputs, len(train))
        while loop.step() or loop.finish():
            pass
        cpu_s = time.process_time() - began_s
        quality = _evaluate(loop, list(part(test, criteo=criteo, max_records=max_inputs)))
    total = loop.outcomes.total
    trained = _TRAINED[task.key(test, max_inputs)] = total["trained"] / total["taken"]
    report = loop.selection.report()
    deferred = {name: float(report[name] or 0) for name in ("row_deferred_share",) if name in report}
    return {
        **quality,
        **deferred,
        "inputs": len(train),
        "trained": trained,
        "steps": loop.num_steps,
        "cpu_s": cpu_s,
    }


def _train_like(loop: TrainLoop, other: _Task, test: int, max_inputs: int | None, num_inputs: int) -> None:
    """Take the steps in which the other skipped nothing, then keep as many requests as the other."""
    config, first_skip = loop.selection.config, other.first_skip()
    loop.selection.config = dataclasses.replace(config, policy="off")
    while loop.num_steps < first_skip and loop.step():
        pass
    rest = max(1 - first_skip * BATCH / num_inputs, 1 / num_inputs)
    kept = 1 - (1 - _TRAINED[other.key(test, max_inputs)]) / rest
    loop.selection.config = dataclasses.replace(config, keep=min(max(kept, 0.05), 1.0))


def _renumbered(records: list[Record]) -> list[Record]:
    return [record._replace(offset=n) for n, record in enumerate(records)]


def _loop(records: list[Record], task: _Task, folder: str) -> TrainLoop:
    loop_settings = {"batch_requests": BATCH, "seed": task.seed, **task.settings}
    return build_loop(
        schema(),
        records,
        dataclasses.replace(MODEL, **task.model),
        loop_settings,
        ShardRows(local_client(schema(), folder)),
    )


def _evaluate(loop: TrainLoop, records: list[Record]) -> dict[str, float]:
    metrics, decoder = Metrics(schema().tasks), Decoder(schema(), {schema().fingerprint: schema()}.get)
    for start in range(0, len(records), 1000):
        batch, _ = decoder.decode(records[start : start + 1000])
        score_BT = loop.scores(batch)
        columns = batch.label_BT, batch.weight_BT, batch.request_index_B, batch.time_ms_R
        metrics.update(ScoredBatch(score_BT, *columns))
    sums, report = metrics.sums()["click"], metrics.report()
    return {
        "log loss": sums["log_loss"] / sums["weight"],
        "ne": float(report["ne"]),  # type: ignore[arg-type]
        "auc": float(report["auc"]),  # type: ignore[arg-type]
    }


_HERE = "benchmarks.selection:rotations"
_WITHOUT = absent(CRITEO)
_PARTS, _INPUTS = 6, 3500
_PROBED = {"score": "probe", "probe": 0.05}
_COURSE = {
    **{"warm_up_steps": 27, "snapshots": 4, "snapshot_steps": 5},
    **{"drop": 0.6, "hot_share": 0.8, "unvisited": "stale"},
}
_NEGATIVES = {"selection": {"policy": "negatives", "keep": 0.5, **_PROBED}}
_REFILLED = {"selection": {"policy": "negatives", "keep": 0.5, "score": "kept", "refill": True}}
_STALE = {"selection": {"policy": "slipstream", "slipstream": _COURSE, **_PROBED}}
_RANDOM = {"selection": {"policy": "random", **_PROBED}}
_NORMALIZED = {"normalize_rows": True}
OFF, NEGATIVES, STALE = "all of it", "negatives, weighted", "stale inputs"
REFILLED = f"{NEGATIVES}, batches refilled, with the others unscored"


def random_as(name: str) -> str:
    """The control of a subject."""
    return f"random, as many as {name}"


def _compared(results: Mapping[str, SubjectResult]) -> dict[str, float]:
    """Change of log loss in percent against training on everything, its ratio to the control's, and the
    number of rotations in which it is below the control's."""
    base = results[OFF]
    out: dict[str, float] = {}
    for name, result in results.items():
        if name != OFF:
            out[f"log loss of {name}, %"] = _change(result, base)
            out[f"cpu of {name}"] = result.figures["cpu_s"] / base.figures["cpu_s"]
    for name in results:
        control = results.get(random_as(name))
        if control is not None and _change(control, base):
            out[f"{name} / its random"] = _change(results[name], base) / _change(control, base)
            out[f"rotations in which {name} beat its random"] = sum(
                results[name].figures[f"log loss {test}"] < control.figures[f"log loss {test}"]
                for test in range(_PARTS)
            )
    return out


def _change(result: SubjectResult, base: SubjectResult) -> float:
    return 100 * (result.figures["log loss"] / base.figures["log loss"] - 1)


def _row(name: str, subjects: Mapping[str, Mapping[str, object]], model: Mapping[str, object]) -> Row:
    """Training on everything, each of `subjects`, and a control for those that are not refilled."""
    task = [Subject(OFF, _HERE, ({}, RUN, _PARTS, _INPUTS, model))]
    for what, settings in subjects.items():
        task.append(Subject(what, _HERE, (settings, RUN, _PARTS, _INPUTS, model)))
        if what != REFILLED:
            task.append(
                Subject(random_as(what), _HERE, (_RANDOM, RUN, _PARTS, _INPUTS, model, settings), "peer")
            )
    return Row(
        name=name,
        unit="inputs",
        shows="cost",
        time="CPU time of the loop",
        subjects=tuple(task),
        derives=_compared,
        skipped=_WITHOUT,
    )


BENCHMARK = Benchmark(
    name="selection",
    summary="What does it cost to train on less of a log of clicks?",
    rows=(
        _row("six rotations, a seed a run", {NEGATIVES: _NEGATIVES, REFILLED: _REFILLED, STALE: _STALE}, {}),
        _row("the same with normalized rows on both sides", {STALE: _STALE}, _NORMALIZED),
    ),
    slice_s=0.0,
    rounds=1,
    interpretation="""\
The first 3,500 impressions of each part of Criteo's sample are requests with one candidate; five parts are
trained once in batches of 128, and the sixth is predicted, for each of six rotations with a new seed each
run. Each policy's control drops as many requests by a hash of their ids. The target for half of the
requests without a click, dropped and reweighted: at most 0.45 of the control's loss of quality, and at most
0.60 of the CPU when batches are refilled and dropped requests are not scored. Slipstream (skip inputs whose
rows are stale) loses against its control here; with LayerNorm on both sides it wins in most rotations, with
a worse model and more CPU. "cpu" is that of the loop with one shard in the same process; of skipped
requests one in twenty is scored.""",
)
