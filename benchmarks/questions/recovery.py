"""How soon is the next step trained behind a kill -9?"""

from benchmarks.question import Question, Row, Subject

_HERE = "benchmarks.workloads.stack_kills"
_KILLS = 2


def _killed(name: str, victim: str, role: str = "stage") -> Subject:
    return Subject(name, f"{_HERE}:recovery", (victim, _KILLS), role)  # type: ignore[arg-type]


QUESTION = Question(
    name="recovery",
    asks="How soon is the next step trained behind a kill -9?",
    rows=(
        Row(
            name="from the kill until the next step is trained",
            unit="kills",
            shows="cost",
            subjects=(
                _killed("the worker", "worker", "ours"),
                _killed("a shard", "shard-0"),
                _killed("the controller", "controller"),
                Subject("a new Python and a worker's imports", f"{_HERE}:imports", (), "limit"),
            ),
        ),
    ),
    rounds=1,
    means="""\
The target is 8 s behind a kill of the worker, its imports among them. The second table says where the time goes: until the stack
has a new process, until that one answers (it has imported what it needs), until the worker is restored, until it has trained the
next step. Whoever is killed, everyone goes back to the last commit; steps trained again were behind it. A controller that is
gone stops nobody: its kill costs what goes back, and training stands still only while everyone is restored.

Lost and trained twice are of the books at the end of each turn: samples below the commit's offsets against samples that its
parameters contain, and samples without a prediction. All of them are counted from the start of the stack.

Kills come half-way between two commits (10 s apart, the default). Broker, two shards that hold 100 000 rows and those of the
samples, controller, one worker, as a stack starts and restarts them, on the same cores; 500 requests/s of 20 candidates are
written all the time. The supervisor starts a program at once that lived for 2 s (by default 30 s: here kills come
more often than that). What was seen is looked at every 50 ms.""",
)
