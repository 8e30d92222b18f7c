"""Where does the time of one rank request go, in process?"""

from benchmarks.question import Question, Row, Subject

_HERE = "benchmarks.workloads.serving.one_request"
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
            Subject(
                "through the endpoint, with the log, protobuf",
                f"{_HERE}:endpoint",
                (candidates, "protobuf"),
                "stage",
            ),
            Subject("parse", _STAGE, ("parse", candidates), "stage"),
            Subject("parse, fill, encode blocks", _STAGE, ("parse_and_encode", candidates), "stage"),
            Subject("values to batch", _STAGE, ("to_batch", candidates), "stage"),
            Subject("look up keys", _STAGE, ("look_up", candidates), "stage"),
            Subject("gather rows", _STAGE, ("gather", candidates), "stage"),
            Subject("its forward pass by modules", _STAGE, ("modules", candidates), "stage"),
            Subject("forward pass alone", _STAGE, ("forward", candidates), "limit"),
        ),
    )


QUESTION = Question(
    name="serving-request",
    asks="Where does the time of one rank request go, in process?",
    rows=tuple(_request(n) for n in (20, 50, 200, 1000)),
    means="""\
What is left is spread: the forward pass is one kernel (docs/decisions/0051); reading JSON, completing and encoding the blocks
that are logged, and writing the answer cost about as much each. "By modules" is what the forward pass cost before, with the
inputs that are made for modules; a user's own model goes that way. In protobuf a request saves what reading JSON costs and no
more; docs/decisions/0072 says where the rest goes, and what would make it less.

The demo schema; HTTP, Redis and Kafka left out, rows in the replica. "whole" is the body's bytes to the answer's bytes and the
record for the log. The stages are timed alone, each with the processor's caches to itself, and don't add up to the whole.
The limit is the model's forward pass on a batch and rows that are there already.""",
)
