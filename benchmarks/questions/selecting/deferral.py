"""What do rows lose whose gradients wait?"""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.question import RUN, Question, Row, Subject, Told
from benchmarks.workloads.sharing.shared_data import CRITEO, EBNERD, absent

_HERE = "benchmarks.workloads.selecting.rotations:rotations"
_IN_TIME_ORDER = "benchmarks.workloads.selecting.time_order:in_time_order"
OFF, STALE, RANDOM = "every push", "share .6, every 8th", "share .6, at random"


def _compared(told: Mapping[str, Told]) -> dict[str, float]:
    base = told[OFF].figures
    out: dict[str, float] = {}
    for name, its in told.items():
        if name != OFF:
            out[f"log loss of {name}, %"] = _change(its, told, "log loss")
            out[f"pushes saved by {name}"] = its.figures["row_deferred_share"]
            out[f"cpu of {name}"] = its.figures["cpu_s"] / base["cpu_s"]
    return out


def _in_rotations(told: Mapping[str, Told]) -> dict[str, float]:
    beaten = sum(
        told[STALE].figures[f"log loss {test}"] < told[RANDOM].figures[f"log loss {test}"]
        for test in range(6)
    )
    return {**_compared(told), "rotations in which staleness beat chance": beaten}


def _in_time_order(told: Mapping[str, Told]) -> dict[str, float]:
    return {
        **_compared(told),
        **{
            f"dirty rows of {name}, %": _change(told[name], told, "dirty rows")
            for name in told
            if name != OFF
        },
    }


def _change(its: Told, told: Mapping[str, Told], figure: str) -> float:
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

QUESTION = Question(
    name="deferral",
    asks="What do rows lose whose gradients wait?",
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
    means="""\
Gradients of hot rows that hardly move wait for up to eight visits. What that saves in pushes, what it costs in log loss, and
whether the same share of hot rows chosen at random costs more.

As the page of `selection`, with the first 5,000 impressions of each part: five parts trained, the sixth predicted, means over the
six, another seed in each run. `cpu` is the loop's own, deferral and all, so what is above 1 there is its price where pushes cost
next to nothing. Bytes pushed fall by the pushes saved; deltas fall by less, since one has a row once (docs/decisions/0068).

EB-NeRD: the shipped schema without what depends on the rest of the list, the default model, batches of 32, each request scored
before it is trained on; the loss is that of the last half of the week's requests. Dirty rows are those that 20 steps changed,
which is what deltas publish; counting them isn't in `cpu`.""",
)
