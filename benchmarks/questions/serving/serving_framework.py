"""What does the framework around a model cost a request?"""

from benchmarks.question import Question, Row, Subject

_HERE = "benchmarks.workloads.serving.frameworks"

QUESTION = Question(
    name="serving-framework",
    asks="What does the framework around a model cost a request?",
    rows=(
        Row(
            name="a body of 16 KB: 20 features of the request, 50 candidates of 8",
            unit="requests",
            shows="cost",
            clock="cpu",
            subjects=(
                Subject("ours, JSON", f"{_HERE}:ours", ("json",)),
                Subject("FastAPI + Pydantic, JSON", f"{_HERE}:fastapi_pydantic", ("json",), "peer"),
                Subject("raw route + msgspec, JSON", f"{_HERE}:raw_msgspec", ("json",), "limit"),
                Subject("ours, protobuf", f"{_HERE}:ours", ("protobuf",), "stage"),
            ),
        ),
    ),
    means="""\
From a body to its answer's bytes, with a model that has the scores already: routing, reading the body under its deadline,
checking names, types and numbers, columns in arrays, admission, the queue to the scoring thread (whose work is done in place
here), a small record for the log, the answer. FastAPI and Pydantic are given the same body, the same checks of types and finite
numbers, and the same answer; no admission, no deadline, no arrays, no log. The limit is a bare ASGI route that has msgspec decode
and encode.

Called as an ASGI application, without a socket: what uvicorn adds is the same for all. What is logged of the features is left
out.""",
)
