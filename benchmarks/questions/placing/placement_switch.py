"""How long does nobody train while rows go from workers to shards?"""

from benchmarks.question import Question, Row, Subject

_HERE = "benchmarks.workloads.placing.switch"


def _row(rows: int, workers: int, shards: int) -> Row:
    return Row(
        name=f"{rows} rows of width 16, {workers} owners and {shards} in turns",
        unit="rows",
        subjects=(
            Subject("a commit by another map", f"{_HERE}:switched", (rows, workers, shards)),
            Subject("as many bytes in a file, synced", f"{_HERE}:written_alone", (rows, 16), "limit"),
        ),
    )


QUESTION = Question(
    name="placement-switch",
    asks="How long does nobody train while rows go from workers to shards?",
    rows=(_row(1_000_000, 2, 3), _row(1_000_000, 2, 4), _row(1_000_000, 1, 2)),
    slice_s=0.0,
    rounds=3,
    means="""\
`rows differ` must be 0: keys, rows, state and stamps are digested before and behind. The pause is what `placement apply` takes
without the start of a process: it reads what moves, checks it, writes it at its new owner, synced, and creates the manifest. What
stays isn't touched, so the time goes with the share of buckets that move. Restoring, which follows, is `recovery`'s question.""",
)
