"""How many ranks does a second of CPU time answer, and how long does one take?"""

from benchmarks.question import Question, Role, Row, Subject

_HERE = "benchmarks.workloads.serving.end_to_end"
_LOADED = f"{_HERE}:under_load"
_SECONDS, _CANDIDATES = 3.0, 50


def _with(name: str, kind: str, form: str, role: Role, times: float) -> Subject:
    return Subject(name, _LOADED, (kind, form, times, _SECONDS, _CANDIDATES), role)


def _at(times: float, name: str) -> Row:
    return Row(
        name=f"requests a second of CPU time, {_CANDIDATES} candidates, {name}",
        unit="requests",
        time="CPU time of its programs",
        subjects=(
            _with("ours, JSON", "ours", "json", "ours", times),
            _with("FastAPI + Pydantic, JSON", "fastapi", "json", "peer", times),
            _with("LitServe, JSON", "litserve", "json", "peer", times),
            _with("ours, protobuf", "ours", "protobuf", "stage", times),
        ),
    )


QUESTION = Question(
    name="serving-e2e",
    asks="How many ranks does a second of CPU time answer, and how long does one take?",
    rows=(_at(0.0, "one connection"), _at(0.5, "at half of what each can answer"), _at(1.0, "at all of it")),
    keeps=f"{_HERE}:programs",
    means="""\
Requests answered 200 within a second, divided by the CPU time that the program took for them (of LitServe: of all its processes).
The targets: 1,000 in JSON, 1,500 in protobuf; p50 at most 2 ms and p99 at most 8 ms at half load. What is short of them, where
it goes and what the next factor would take: docs/decisions/0072.

Programs of their own on loopback: `roostream serving`, and the same ranker behind FastAPI with Pydantic and behind LitServe, each
as its tutorial has it, one worker. They type the same body, complete it, score it by the same code and pack the same record, one
request at a time; ours also admits, keeps deadlines, scores together what waited together, and writes the record to its log.
Before anything is timed one answer's scores are compared with those of the ranker in process.

The demo schema, initial rows; Kafka, Redis and the shards are away. One connection asks again as soon as it is answered. The
other loads don't wait: requests at random times (Poisson) over kept connections, encoded beforehand; times count from when a
request was due. What each can answer is what four connections get that ask again as soon as they are answered. With two cores a
program has one and the load the other; LitServe's processes share theirs. Programs that are not timed stand still.""",
    slice_s=_SECONDS,
    rounds=3,
)
