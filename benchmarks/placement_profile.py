"""What does it cost to count what tables are asked for?"""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.harness.benchmark import Benchmark, Row, Subject, SubjectResult

LOOK, STEP = "a look at a batch", "the step that it is beside"


def _share(told: Mapping[str, SubjectResult]) -> dict[str, float]:
    return {"of training, at 3 % of batches": 0.03 * told[LOOK].cost_us / told[STEP].cost_us}


BENCHMARK = Benchmark(
    name="placement-profile",
    summary="What does it cost to count what tables are asked for?",
    rows=(
        Row(
            name="a batch of 512 requests of 5 candidates",
            unit="batches",
            shows="cost",
            clock="cpu",
            subjects=(
                Subject(LOOK, "benchmarks.common.placement_plans:profiled", (512,)),
                Subject(STEP, "benchmarks.train_step:stage", ("forward_backward", 512, 5), "limit"),
            ),
            derives=_share,
        ),
    ),
    interpretation="""\
Counting is to take 1 % of training at most where 3 % of batches are looked at. It counts from the lookup that the step has made
anyway. The comparison is with the forward and backward pass alone, less than a step.""",
)
