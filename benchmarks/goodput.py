"""What share of the throughput remains with a kill every 60 s?"""

from benchmarks.harness.benchmark import Benchmark, Row, Subject

_HERE = "benchmarks.recovery:goodput"


def during(seconds: float, interval_ms: int = 10_000) -> Row:
    size = (seconds, interval_ms)
    return Row(
        name=f"requests trained and committed in {seconds:g} s, commits {interval_ms / 1000:g} s apart",
        unit="requests",
        subjects=(
            Subject("one kill of the worker", _HERE, (size[0], "worker", size[1])),
            Subject("nobody is killed", _HERE, (size[0], "", size[1]), "limit"),
        ),
    )


MEANS = """\
More samples wait than can be trained, so what is lost in a recovery is lost. The column that compares is the goodput: what is
trained with kills for each request that is trained without. A request counts when a commit at the end of the time has it.

A kill costs the time until the next step (the page of `recovery`) and what goes back to the last commit: half of the time between
two commits on average, and kills come half-way between two here. So goodput is about 1 - (recovery + interval / 2) / time
between kills, and a shorter `commit_interval_ms` is the way to more of it.
Both figures are of stacks of their own, and two stacks that nobody kills may train a quarter more or less on a machine that
others use. There the parts say more than the ratio: 1 - (next step behind a kill + what was trained again / requests/s) / time,
with 64 requests a step by then.

Broker, two shards, controller, one worker, as a stack starts and restarts them, on the same cores as what writes the samples; 20
candidates a request. The supervisor starts a program at once that lived for 2 s (by default 30 s)."""

BENCHMARK = Benchmark(
    name="goodput",
    summary="What is trained with a kill every 60 s?",
    rows=(during(60.0), during(60.0, 3_000)),
    rounds=1,
    interpretation=f"The target is 0.85 with a kill every 60 s.\n\n{MEANS}",
)
