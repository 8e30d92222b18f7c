"""Where does the time of one rank request go, in process?"""

from benchmarks.question import Question, Row, Subject

_HERE = "benchmarks.workloads.serving_request"
_STAGE = f"{_HERE}:stage"


def _request(candidates: int) -> Row:
    return Row(
        name=f"a request of {candidates} candidates",
        unit="requests",
        shows="cost",
        clock="cpu",
        subjects=(
            Subject("whole", _STAGE, ("whole", candidates)),
            Subject("through the endpoint, with the log", f"{_HERE}:endpoint", (candidates,), "stage"),
            Subject("parse", _STAGE, ("parse", candidates), "stage"),
            Subject("parse, fill, encode blocks", _STAGE, ("parse_and_encode", candidates), "stage"),
            Subject("values to batch", _STAGE, ("to_batch", candidates), "stage"),
            Subject("look up keys", _STAGE, ("look_up", candidates), "stage"),
            Subject("gather rows", _STAGE, ("gather", candidates), "stage"),
            Subject("gather, tensors", _STAGE, ("to_tensors", candidates), "stage"),
            Subject("forward pass alone", _STAGE, ("forward", candidates), "limit"),
        ),
    )


QUESTION = Question(
    name="serving-request",
    asks="Where does the time of one rank request go, in process?",
    rows=tuple(_request(n) for n in (20, 50, 200, 1000)),
    means="""\
The model's forward pass is the largest part and grows least with candidates; completing and encoding the blocks comes next, since
they are logged. Reading those blocks back into a batch costs a third of what it did when a sample was made of them first.

The demo schema; HTTP, Redis and Kafka left out, rows in the replica. "whole" is the body's bytes to the answer's bytes and the
record for the log. The stages are timed alone and don't add up to the whole: ordering, the impression and the answer are not
among them. The limit is the model's forward pass on inputs that are there already.""",
)
