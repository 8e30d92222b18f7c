"""What does it save to read, pull and push beside training?"""

from benchmarks.question import Question, Row, Subject

_HERE = "benchmarks.workloads.pipeline"


def _step(requests: int, candidates: int) -> Row:
    size = (requests, candidates)
    return Row(
        name=f"a step of {requests} requests of {candidates} candidates, two shards over loopback",
        unit="steps",
        shows="cost",
        subjects=(
            Subject("read ahead, staleness 1", f"{_HERE}:steps", (*size, 2, 1)),
            Subject("read ahead, staleness 0", f"{_HERE}:steps", (*size, 2, 0), "stage"),
            Subject("one after the other", f"{_HERE}:steps", (*size, 0, 0), "stage"),
            Subject("read ahead, rows that are there at once", f"{_HERE}:dense", (*size, 2), "limit"),
            Subject(
                "one after the other, rows that are there at once", f"{_HERE}:dense", (*size, 0), "limit"
            ),
            Subject("pull and push alone", f"{_HERE}:sparse", size, "limit"),
        ),
    )


QUESTION = Question(
    name="pipeline",
    asks="What does it save to read, pull and push beside training?",
    rows=(_step(64, 11), _step(512, 5)),
    slice_s=0.5,
    rounds=5,
    means="""\
By how much a step with real shards is slower than one whose rows are there at once is the share of it that waits for rows. The
larger of "rows that are there at once" and "pull and push alone" is what a step can't be shorter than.

The demo schema, samples in memory, two shards in processes of their own, all on the same cores as training: what is done beside
it takes its core from somebody. One torch thread. With staleness 1 rows are pulled while one push before their training is still
to come; with 0 every array is that of "one after the other".""",
)
