"""Where does the time of one training step go?"""

from benchmarks.question import Question, Row, Subject

_STAGE = "benchmarks.workloads.training_step:stage"


def _step(requests: int, candidates: int) -> Row:
    size = (requests, candidates)
    return Row(
        name=f"a step of {requests} requests of {candidates} candidates",
        unit="steps",
        shows="cost",
        clock="cpu",
        subjects=(
            Subject("whole", _STAGE, ("whole", *size)),
            Subject("decode", _STAGE, ("decode", *size), "stage"),
            Subject("look up keys", _STAGE, ("look_up", *size), "stage"),
            Subject("pull", _STAGE, ("pull", *size), "stage"),
            Subject("tensors", _STAGE, ("to_tensors", *size), "stage"),
            Subject("dense optimizer", _STAGE, ("adam", *size), "stage"),
            Subject("push", _STAGE, ("push", *size), "stage"),
            Subject("forward and backward alone", _STAGE, ("forward_backward", *size), "limit"),
        ),
    )


QUESTION = Question(
    name="train-step",
    asks="Where does the time of one training step go?",
    rows=(_step(512, 5),),
    slice_s=0.3,
    rounds=5,
    means="""\
The dense arithmetic is two thirds of a step at this size, decoding 5 %, everything about rows 1 %. By a profile, another eighth
is predictions and progressive metrics, which are not among the stages.

The demo schema, samples in memory, one shard in the same process, one thread. "whole" takes samples from the source, trains and
pushes; metrics and predictions are in it and are not a stage. The limit is the model's forward and backward pass on inputs that
are there already.""",
)
