"""What does serving still answer in time when more is asked than it can answer?"""

from benchmarks.question import Question, Role, Row, Subject

_OFFERED = "benchmarks.workloads.serving.overload:offered"
_SECONDS, _CANDIDATES = 5.0, 20
_ROLES: dict[float, Role] = {3.0: "ours", 1.0: "limit"}


def _at(times: float) -> Subject:
    return Subject(
        f"{times:g} × capacity", _OFFERED, (times, _SECONDS, _CANDIDATES), _ROLES.get(times, "stage")
    )


QUESTION = Question(
    name="serving-overload",
    asks="What does serving still answer in time when more is asked than it can answer?",
    rows=(
        Row(
            name="rank requests answered 200 within 1 s",
            unit="requests",
            subjects=tuple(map(_at, (3.0, 0.5, 1.0, 2.0))),
        ),
    ),
    means="""\
What was answered 200 within the deadline (1 s, the default), by how much was asked. The target is at least 90 % of the peak at
three times the capacity: the column that compares 3 × with 1 × and 2 × should say 0.9 or more. What is too much is answered 429
with Retry-After, unread.

`roostream serving` in a process of its own on loopback, the demo schema, 20 candidates a request (few: beside such an answer a
refusal is dear), initial rows; Kafka, Redis and the shards are away. The capacity is what four connections get that each ask
again as soon as they are answered. The load doesn't wait: requests at random times (Poisson) over kept connections, encoded
beforehand, from one thread over epoll that costs about 30 µs a request; times count from when a request was due. With two cores
serving has one and the load the other; a figure in which requests were sent late says that the load could not keep up. On a
machine that is busy with other work the requests answered for a second of serving's own CPU time are the better figure.""",
    slice_s=_SECONDS,
    rounds=3,
)
