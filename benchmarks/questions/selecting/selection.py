"""What does it cost to train on less of a log of clicks?"""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.question import Question, Row, Subject, Told
from benchmarks.workloads.sharing.shared_data import CRITEO, absent

_HERE = "benchmarks.workloads.selecting.rotations:rotations"
_WITHOUT = absent(CRITEO)
_COURSE = {"warm_up_steps": 78, "snapshots": 4, "snapshot_steps": 13, "drop": 0.3, "unvisited": "stale"}
OFF, RANDOM = "all of it", "random, as many"


def _compared(told: Mapping[str, Told]) -> dict[str, float]:
    """Relative change of log loss in percent, and its ratio to the random control's."""
    base = told[OFF].figures["log loss"]
    change = {name: 100 * (its.figures["log loss"] / base - 1) for name, its in told.items() if name != OFF}
    out = {f"log loss of {name}, %": value for name, value in change.items()}
    out |= {f"cpu of {name}": its.figures["cpu_s"] / told[OFF].figures["cpu_s"] for name, its in told.items() if name != OFF}
    for name, value in change.items():
        if name != RANDOM and change[RANDOM]:
            out[f"{name} / random"] = value / change[RANDOM]
    return out


def _row(what: str, seed: int, ours: str, settings: Mapping[str, object], control: Mapping[str, object]) -> Row:
    return Row(
        name=f"{what}, six rotations, seed {seed}",
        unit="inputs",
        shows="cost",
        clock="cpu",
        subjects=(
            Subject(OFF, _HERE, ({}, seed)),
            Subject(ours, _HERE, (settings, seed)),
            Subject(RANDOM, _HERE, (control, seed), "peer"),
        ),
        derives=_compared,
        skipped=_WITHOUT,
    )


def _negatives(seed: int) -> Row:
    unscored = {"score": "probe", "probe": 0.05}
    return _row(
        "half of the requests without a click",
        seed,
        "negatives, weighted",
        {"selection": {"policy": "negatives", "keep": 0.5, **unscored}},
        {"selection": {"policy": "random", "keep": 0.516, **unscored}},
    )


def _slipstream(seed: int) -> Row:
    unscored = {"score": "probe", "probe": 0.05}
    return _row(
        "Slipstream at .3 of the hot inputs",
        seed,
        "stale inputs",
        {"selection": {"policy": "slipstream", "slipstream": _COURSE, **unscored}},
        {"selection": {"policy": "random", "keep": 0.9, **unscored}},
    )


QUESTION = Question(
    name="selection",
    asks="What does it cost to train on less of a log of clicks?",
    rows=(*(_negatives(seed) for seed in range(3)), *(_slipstream(seed) for seed in range(3))),
    slice_s=0.0,
    rounds=1,
    means="""\
Half of the requests without a click dropped by weight cost less than half of what as many dropped at random cost (to be .45 at
most). Skipping inputs with stale rows is shown beside its control and promises nothing: on this log it has not been better.

Criteo's sample, each impression a request with one candidate: five parts trained once, in batches of 128, the sixth predicted,
for each of the six. Figures are means over the six; the loss is a log loss, its change relative to training on all of it.
`cpu` is the loop's own, with one shard in the same process; of what is skipped one in twenty is scored. Slipstream begins late
in a log of 390 steps, so it skips less of all inputs than of hot ones: `trained` says how many were, and the control drops about
as many.""",
)
