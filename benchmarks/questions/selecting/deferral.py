"""What do rows lose whose gradients wait?"""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.question import Question, Row, Subject, Told
from benchmarks.workloads.sharing.shared_data import CRITEO, absent

_HERE = "benchmarks.workloads.selecting.rotations:rotations"
_WITHOUT = absent(CRITEO)
OFF = "every push"


def _compared(told: Mapping[str, Told]) -> dict[str, float]:
    base = told[OFF].figures
    out: dict[str, float] = {}
    for name, its in told.items():
        if name != OFF:
            out[f"log loss of {name}, %"] = 100 * (its.figures["log loss"] / base["log loss"] - 1)
            out[f"pushes saved by {name}"] = its.figures["row_deferred_share"]
            out[f"cpu of {name}"] = its.figures["cpu_s"] / base["cpu_s"]
    return out


def _row(seed: int) -> Row:
    def waiting(share: float) -> dict[str, object]:
        return {"deferral": {"share": share, "visits": 8}}

    return Row(
        name=f"rows of Criteo's sample, six rotations, seed {seed}",
        unit="inputs",
        shows="cost",
        clock="cpu",
        subjects=(
            Subject(OFF, _HERE, ({}, seed)),
            Subject("share .6, every 8th", _HERE, (waiting(0.6), seed)),
            Subject("share .9, every 8th", _HERE, (waiting(0.9), seed)),
            Subject("share .6, at random", _HERE, ({"deferral": {"share": 0.6, "visits": 8, "choice": "random"}}, seed), "peer"),
        ),
        derives=_compared,
        skipped=_WITHOUT,
    )


QUESTION = Question(
    name="deferral",
    asks="What do rows lose whose gradients wait?",
    rows=tuple(_row(seed) for seed in range(3)),
    slice_s=0.0,
    rounds=1,
    means="""\
Gradients of hot rows that hardly move wait for up to eight visits: about a third of the pushes are saved, for less than a tenth
of a percent of log loss; the same share of hot rows chosen at random loses more.

As the page of `selection`: five parts trained, the sixth predicted, means over the six. `cpu` is the loop's own, deferral
and all, so what is above 1 there is its price where pushes cost next to nothing. What it is for, bytes pushed and deltas
published, falls by the pushes saved.""",
)
