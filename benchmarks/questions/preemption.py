"""Does a worker that has to go commit what it trained, and how soon is it gone?"""

from benchmarks.question import Question, Row, Subject

_HERE = "benchmarks.workloads.stack_leaves"
_COUNT = 4

QUESTION = Question(
    name="preemption",
    asks="Does a worker that has to go commit what it trained, and how soon is it gone?",
    rows=(
        Row(
            name="from the notice until the worker's process has ended",
            unit="preemptions",
            shows="cost",
            subjects=(
                Subject("30 s notice", f"{_HERE}:preempted", (30.0, _COUNT)),
                Subject("5 s notice", f"{_HERE}:preempted", (5.0, _COUNT), "stage"),
                Subject("a commit that is asked for", f"{_HERE}:committed", (_COUNT,), "limit"),
            ),
        ),
    ),
    rounds=1,
    means="""\
The target is that every epoch commits at 30 s notice; at 5 s, the least that is accepted, the share is reported. Committed means
that a manifest of the same incarnation came behind the notice and has what was trained since the last one; an epoch is what one
process of the worker trained. The shares are of the preemptions of one run (the least of all runs stands beside them).

Each preemption is asked for as `roostream preempt worker` does, a second behind a commit; the stack starts the worker again, and
the next one comes a second behind the first commit that has what is new. Lost and trained twice are of the books, as on the page
of `recovery`.

Broker, two shards that hold 100 000 rows and those of the samples, controller, one worker as a stack starts them, on the same
cores; 500 requests/s of 20 candidates are written all the time.""",
)
