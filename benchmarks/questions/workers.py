"""What do several workers train, at equal batches, and what of it is summing?"""

from benchmarks.question import Question, Row, Subject

_HERE = "benchmarks.workloads.training_workers"
_SECONDS = 3.0


def _batch(requests: int, candidates: int) -> Row:
    size = (requests, candidates, _SECONDS)
    return Row(
        name=f"steps of {requests} requests of {candidates} candidates, all workers together",
        unit="requests",
        subjects=(
            Subject("2 workers", f"{_HERE}:trained", (2, *size)),
            Subject("1 worker", f"{_HERE}:trained", (1, *size), "stage"),
            Subject("4 workers", f"{_HERE}:trained", (4, *size), "stage"),
            Subject("2 workers, the sum alone", f"{_HERE}:summed", (2, *size), "limit"),
        ),
    )


QUESTION = Question(
    name="workers",
    asks="What do several workers train, at equal batches, and what of it is summing?",
    rows=(_batch(64, 11), _batch(512, 5)),
    slice_s=_SECONDS,
    rounds=3,
    means="""\
Workers and shards are processes of their own on the same cores: as many of these as the machine has can be in use, whatever the
number of workers. So what several workers can win here is what one worker leaves idle, and they are worth it where each has a
core of its own. CPU ms a step say what that would give: a step of W workers takes at least a W-th of what all of them spend.

A step is as large for any number of workers: each has its part of the batch. "In the sum" is what a worker's loop spends in the
all-reduce of a turn (gradients and words, float64), most of it waiting for whoever is last. The sum alone is that of buckets of
the same size, by as many processes that do nothing else.

The demo schema, samples in memory, two shards over loopback, gloo over loopback, one torch thread a worker, read ahead as by
default. One worker alone sums with nobody.""",
)
