"""Does anybody notice when the model is swapped?"""

from collections.abc import Mapping

from benchmarks.question import Question, Row, Subject, Told

_UNDER_LOAD = "benchmarks.workloads.serving.swap:under_load"
_TIMES, _SWAPPING_S, _STEADY_S, _CANDIDATES = 0.5, 36.0, 12.0, 20
_SWAPPING, _STEADY = "a swap a second", "no swap"


def _slower(told: Mapping[str, Told]) -> Mapping[str, float]:
    return {
        "p99 with swaps / without": told[_SWAPPING].figures["p99, ms"]
        / max(told[_STEADY].figures["p99, ms"], 1e-9)
    }


QUESTION = Question(
    name="serving-swap",
    asks="Does anybody notice when the model is swapped?",
    rows=(
        Row(
            name="rank requests at half of the capacity, answered 200 within 1 s",
            unit="requests",
            subjects=(
                Subject(_SWAPPING, _UNDER_LOAD, (True, _TIMES, _SWAPPING_S, _CANDIDATES)),
                Subject(_STEADY, _UNDER_LOAD, (False, _TIMES, _STEADY_S, _CANDIDATES), "limit"),
            ),
            derives=_slower,
        ),
    ),
    means="""\
A commit a second is written into the store that a serving program follows: manifest and dense file are verified, the model is
built, tried with 32 recent requests, and swapped, all in a thread beside the requests. The second table is of a turn: three of
36 s are a run with about 100 swaps. Versions have two sets of weights in turns, and each answer's scores are compared with those
of the version that it names (1e-5). The targets: no failed request (anything but 200), and a p99 of at most 1.5 times that of the
turns without a swap, in the same run. Failures that are 429, with swaps and without, say that other work has the core.

`roostream serving` in a process of its own on loopback, the demo schema and the default model, 20 candidates a request, initial
rows; Kafka, Redis and the shards are away. The load is that of serving-overload at half of the capacity: requests at random
times, counted from when they were due. With two cores serving has one, for requests and swaps; the load, which also writes the
commits, has the other. A trainer commits each 10 s by default: ten times as seldom.""",
    slice_s=_SWAPPING_S,
    rounds=3,
)
