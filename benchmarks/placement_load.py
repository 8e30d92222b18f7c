"""How even are owners under each way to place rows, and can the simulator be believed?"""

from benchmarks.common.dataset_paths import CRITEO, absent
from benchmarks.common.simulated_load import VALIDITY
from benchmarks.harness.benchmark import Benchmark, Row, Subject

_HERE = "benchmarks.common.placement_plans"
_WAYS = ("row cyclic with offset", "row cyclic", "row hash", "table round robin", "hybrid")


def _mix(tables: int, seed: int) -> Row:
    return Row(
        name=f"{tables} tables over 128 owners, mix {seed}",
        unit="simulations",
        shows="cost",
        clock="cpu",
        subjects=tuple(
            Subject(way, f"{_HERE}:loaded", (tables, 128, way, seed), "ours" if at == 0 else "peer")
            for at, way in enumerate(_WAYS)
        ),
    )


BENCHMARK = Benchmark(
    name="placement-load",
    summary="How even are owners under each way to place rows, and can the simulator be believed?",
    rows=(
        *(
            Row(
                name=f"unique rows of 14 tables, draw {seed}",
                unit="comparisons",
                shows="cost",
                clock="cpu",
                subjects=(
                    Subject("expected", f"{_HERE}:foretold", (seed,)),
                    Subject("drawn 20 times", f"{_HERE}:drawn", (seed,), "peer"),
                ),
            )
            for seed in range(3)
        ),
        Row(
            name="unique rows of Criteo's 26 tables, batches of 256",
            unit="comparisons",
            shows="cost",
            clock="cpu",
            subjects=(
                Subject("from a profile of 4 batches", f"{_HERE}:foreseen", (256, 5000)),
                Subject("all of the later batches", f"{_HERE}:counted_all", (256, 5000), "peer"),
            ),
            skipped=absent(CRITEO),
        ),
        *(_mix(150, seed) for seed in range(3)),
    ),
    rounds=1,
    slice_s=0.0,
    interpretation=f"""\
Rows dealt out cyclically, each table from another owner on, are even to 1.05 or better, for nothing; whole tables are not.
Expected unique rows are to be within 2 % of drawn ones.

What a mix takes is the simulator's own time, and of no interest; its figures are the answer. `imbalance` is owners · most / sum
of bytes. What is to be believed of them: {VALIDITY}.
On two real processes such a model of time was wrong by 29 % in the median.""",
)
