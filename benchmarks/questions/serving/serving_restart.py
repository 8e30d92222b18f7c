"""How many requests fail while serving is restarted?"""

from benchmarks.question import Question, Role, Row, Subject

_ROLLED = "benchmarks.workloads.serving.restart:rolled"
_RESTARTS, _FEW_RESTARTS, _CLIENTS, _CANDIDATES = 10, 3, 16, 20


def _with(name: str, restarts: int, drain_ms: int, role: Role) -> Subject:
    return Subject(name, _ROLLED, (restarts, _CLIENTS, drain_ms, _CANDIDATES), role)


QUESTION = Question(
    name="serving-restart",
    asks="How many requests fail while serving is restarted?",
    rows=(
        Row(
            name=f"rank requests of {_CLIENTS} clients over rolling restarts, answered 200",
            unit="requests",
            subjects=(
                _with("connections take leave", _RESTARTS, 1000, "ours"),
                _with("connections are closed at once, as uvicorn does", _FEW_RESTARTS, 0, "limit"),
            ),
        ),
    ),
    means="""\
A serving program is started on the port of one that answers (`reuse_port`); once it listens, the old one gets SIGTERM; ten
times (three, where connections are closed at once, which is soon seen).
Sixteen clients of Python's standard library keep their connections and ask on each again 50 ms after an answer. Nothing is tried
twice: whatever isn't a 200 counts as failed, also a connection that was closed under a request, which HTTP lets a client of an
idempotent request try again. The target: none. A client that is told with an answer that it was the connection's last opens
another one, which the kernel gives to the new program, since the old one no longer listens.

`roostream serving` in processes of its own on loopback, the demo schema, 20 candidates a request, initial rows; Kafka, Redis and
the shards are away. With two cores the programs have one, also while they start, which the p99 shows; the clients have the
other.""",
    slice_s=1.0,
    rounds=1,
)
