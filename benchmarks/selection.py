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
from benchmarks.common.selection_loop import build_loop
from benchmarks.harness.benchmark import RUN, Benchmark, Row, Subject, SubjectResult, Work
from benchmarks.train_step import shard_client
from roostream.models.config import RankerConfig
from roostream.wire.decode import Decoder
from roostream.wire.records import Record
from trainer.loop import TrainLoop
from trainer.monitoring.progressive_metrics import Metrics, ScoredBatch
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
    """`settings`: of the loop, as in a worker's TOML. A step is all rotations, the first one a short one, to
    warm up; figures are means over them. `max_inputs`: of each part; `model`: others of its settings; `like`:
    settings asked before in this process, of whose requests as many are dropped, rotation by rotation, from
    the same step on."""
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
    return build_loop(
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


def _compared(told: Mapping[str, SubjectResult]) -> dict[str, float]:
    """Change of log loss in percent against all of it, as a ratio to the control's, and in how many rotations
    it is below it."""
    base = told[OFF]
    out: dict[str, float] = {}
    for name, its in told.items():
        if name != OFF:
            out[f"log loss of {name}, %"] = _change(its, base)
            out[f"cpu of {name}"] = its.figures["cpu_s"] / base.figures["cpu_s"]
    for name in told:
        control = told.get(random_as(name))
        if control is not None and _change(control, base):
            out[f"{name} / its random"] = _change(told[name], base) / _change(control, base)
            out[f"rotations in which {name} beat its random"] = sum(
                told[name].figures[f"log loss {test}"] < control.figures[f"log loss {test}"]
                for test in range(_PARTS)
            )
    return out


def _change(its: SubjectResult, base: SubjectResult) -> float:
    return 100 * (its.figures["log loss"] / base.figures["log loss"] - 1)


def _row(name: str, subjects: Mapping[str, Mapping[str, object]], model: Mapping[str, object]) -> Row:
    """All of it, each of `subjects`, and a control for those that aren't refilled."""
    asked = [Subject(OFF, _HERE, ({}, RUN, _PARTS, _INPUTS, model))]
    for what, settings in subjects.items():
        asked.append(Subject(what, _HERE, (settings, RUN, _PARTS, _INPUTS, model)))
        if what != REFILLED:
            asked.append(
                Subject(random_as(what), _HERE, (_RANDOM, RUN, _PARTS, _INPUTS, model, settings), "peer")
            )
    return Row(
        name=name,
        unit="inputs",
        shows="cost",
        time="CPU time of the loop",
        subjects=tuple(asked),
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
Half of the requests without a click dropped by weight is to cost .45 at most of what as many dropped at random cost, in log
loss, and to leave .60 of the CPU at most where batches are refilled and nothing of the others is scored. Skipping inputs with
stale rows (Slipstream, at .6 of the hot ones) is shown beside its control and promises nothing: here it is worse than chance.
With LayerNorm on both sides, which the paper has on one, it is better than chance in most rotations, of a model that predicts
worse than without; its loop took more CPU than training on all of it.

The first 3,500 impressions of each part of Criteo's sample, each a request with one candidate: five parts trained once, in
batches of 128, the sixth predicted, for each of the six. Every run has a seed of its own, so least .. most is over seeds;
figures are means over the rotations. The loss is a log loss, its change relative to training on all of it. The control drops as
many requests, rotation by rotation, by a hash of their ids. `cpu` is the loop's own, with one shard in the same process; of
what is skipped one in twenty is scored, in a pass of its own (none "with the others unscored"). A batch that isn't refilled is
a step of half a batch, whose fixed part is the same; refilled, chunks are read larger and there are fewer steps. A kept
negative's weight of 2 makes steps larger, which helps on this log by itself (docs/decisions/0066). In a log of 137 steps few
inputs have rows that were all seen before: an input is hot here if 80 % of its rows are. Slipstream begins to skip behind step
58, and so does its control; `trained` says how many were.""",
)
