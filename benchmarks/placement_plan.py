"""How long does a plan take, and how far from the best can it be?"""

from benchmarks.harness.benchmark import Benchmark, Row, Subject

_HERE = "benchmarks.common.placement_plans"


def _row(tables: int, owners: int, seed: int) -> Row:
    return Row(
        name=f"{tables} tables over {owners} owners, mix {seed}",
        unit="plans",
        shows="cost",
        clock="cpu",
        subjects=(
            Subject("greedy plan", f"{_HERE}:planned", (tables, owners, seed)),
            Subject("sorting as many pieces", f"{_HERE}:sorted_alone", (tables, owners, seed), "limit"),
        ),
    )


BENCHMARK = Benchmark(
    name="placement-plan",
    summary="How long does a plan take, and how far from the best can it be?",
    rows=tuple(
        _row(tables, owners, seed) for tables, owners in ((50, 8), (200, 32), (500, 128)) for seed in range(3)
    ),
    interpretation="""\
500 tables over 128 owners are to be planned within a second, the predicted step within 1.05 of a bound that no plan can be below,
where pieces of a table are even. So no solver is needed: at most the rest could be gained.

Tables are drawn log-uniform within the paper's ranges, their statistics given. "step / bound" divides two predictions of the same
assumed constants: it says how good the assignment is, not how long a step takes.""",
)
