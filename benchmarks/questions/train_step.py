"""Where does the time of one training step go?"""

from benchmarks.question import Question, Row, Subject

_WORKLOAD = "benchmarks.workloads.training_step"


def _step(name: str, stage: str, *size: int) -> Row:
    """`stage`: a function of the workload, called with the name of a stage and `size`."""
    return Row(
        name=name,
        unit="steps",
        shows="cost",
        clock="cpu",
        subjects=(
            Subject("whole", f"{_WORKLOAD}:{stage}", ("whole", *size)),
            Subject("decode", f"{_WORKLOAD}:{stage}", ("decode", *size), "stage"),
            Subject("look up keys", f"{_WORKLOAD}:{stage}", ("look_up", *size), "stage"),
            Subject("pull", f"{_WORKLOAD}:{stage}", ("pull", *size), "stage"),
            Subject("tensors", f"{_WORKLOAD}:{stage}", ("to_tensors", *size), "stage"),
            Subject("forward and backward", f"{_WORKLOAD}:{stage}", ("forward_backward", *size), "stage"),
            Subject("dense optimizer", f"{_WORKLOAD}:{stage}", ("adam", *size), "stage"),
            Subject("push", f"{_WORKLOAD}:{stage}", ("push", *size), "stage"),
            Subject("predictions", f"{_WORKLOAD}:{stage}", ("predict", *size), "stage"),
            Subject("progressive metrics", f"{_WORKLOAD}:{stage}", ("count", *size), "stage"),
            Subject("products of matrices alone", f"{_WORKLOAD}:{stage}", ("products", *size), "limit"),
        ),
    )


QUESTION = Question(
    name="train-step",
    asks="Where does the time of one training step go?",
    rows=(
        _step("a step of 512 requests of 5 candidates", "stage", 512, 5),
        _step("a step of 64 requests as EB-NeRD's, of 11 candidates and 50 entries", "ebnerd_stage", 64),
    ),
    slice_s=0.3,
    rounds=5,
    means="""\
The forward and backward pass is the largest part of a step by far; everything about rows is a few percent of it.

The demo's schema, and EB-NeRD's with lists as long as in that log; samples in memory, one shard in the same process, one thread.
"whole" takes samples from the source, trains, pushes, and says what it predicted; the stages are parts of it, taken alone on
inputs that are there already. The limit is the products of matrices of a forward and backward pass, each alone.""",
)
