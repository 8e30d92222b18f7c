"""What does it cost to train on less of a log of clicks?"""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.question import RUN, Question, Row, Subject, Told
from benchmarks.workloads.sharing.shared_data import CRITEO, absent

_HERE = "benchmarks.workloads.selecting.rotations:rotations"
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


def _compared(told: Mapping[str, Told]) -> dict[str, float]:
    """Change of log loss in percent against all of it, as a ratio to the control's, and in how many rotations it is below it."""
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


def _change(its: Told, base: Told) -> float:
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


QUESTION = Question(
    name="selection",
    asks="What does it cost to train on less of a log of clicks?",
    rows=(
        _row("six rotations, a seed a run", {NEGATIVES: _NEGATIVES, REFILLED: _REFILLED, STALE: _STALE}, {}),
        _row("the same with normalized rows on both sides", {STALE: _STALE}, _NORMALIZED),
    ),
    slice_s=0.0,
    rounds=1,
    means="""\
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
