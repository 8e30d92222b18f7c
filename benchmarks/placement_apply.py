"""What does an applied placement plan change in a step of workers that hold the rows?

Two and four worker processes with rows in TorchRec's collections, as in initial-torchrec, on tables with
uneven traffic.
"""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.harness.benchmark import Benchmark, Row, Subject, SubjectResult
from benchmarks.initial_torchrec import WORKERS

_SUBJECT = "benchmarks.initial_torchrec:exchanged"
_STEPS = 13
ROUND_ROBIN, TORCHREC, PLAN = (
    "tables round robin",
    "TorchRec's planner with profiles",
    "`placement plan`",
)


def _against(results: Mapping[str, SubjectResult]) -> dict[str, float]:
    dealt = results[ROUND_ROBIN]
    return {
        f"steps/s of {name} against tables round robin": dealt.cost_us / results[name].cost_us
        for name in (TORCHREC, PLAN)
    }


def _row(workers: int) -> Row:
    size = ([8, 20_000, 32, 64, 5, 10, 1.05, True], _STEPS, workers)
    return Row(
        name=f"{workers} workers, 8 tables of width 32 with uneven traffic, 64 requests of 5 a worker",
        unit="steps",
        shows="cost",
        subjects=(
            Subject(TORCHREC, _SUBJECT, ("profiled", *size)),
            Subject(ROUND_ROBIN, _SUBJECT, ("tables", *size), "peer"),
            Subject(PLAN, _SUBJECT, ("plan", *size), "stage"),
        ),
        derives=_against,
    )


BENCHMARK = Benchmark(
    name="placement-apply",
    summary="What does an applied placement plan change in a step of workers that hold the rows?",
    rows=(_row(WORKERS), _row(2 * WORKERS)),
    slice_s=0.0,
    rounds=1,
    interpretation="""\
Worker processes over gloo on loopback, one torch thread each; table n has ids in proportion to 1 / (n + 1),
Zipf 1.05. Plans are made from the distinct rows a step of the first worker, as profiles give them. Imbalance
is N · max B / Σ B over the bytes of ids, rows and gradients that each owner exchanged with all workers,
itself included; it was counted. On a machine with two cores four workers share them, so a step takes as long
as all work together, and balance can hardly make it shorter; with a machine a worker it does.""",
)
