"""What does reading a row from a bounded cache cost?"""

from benchmarks.question import Question, Row, Subject

_HERE = "benchmarks.workloads.serving.row_gather"


def _gather(num_rows: int, width: int, num_keys: int) -> Row:
    sizes = (num_rows, width, num_keys)
    return Row(
        name=f"{num_keys} keys of {num_rows:,} rows, width {width}",
        unit="rows",
        clock="cpu",
        subjects=(
            Subject("a cache, all there", f"{_HERE}:cached", sizes),
            Subject("a full replica", f"{_HERE}:private", sizes, "peer"),
            Subject("copied, places known", f"{_HERE}:copied", sizes, "limit"),
        ),
    )


QUESTION = Question(
    name="row-gather",
    asks="What does reading a row from a bounded cache cost?",
    rows=(_gather(10_000, 16, 300), _gather(1_000_000, 16, 300), _gather(1_000_000, 16, 3000)),
    means="""\
Rows of one lookup, gathered from a cache that holds all of them, from a full replica, and by a plain copy whose row numbers are
known. With few keys the call costs more than the rows. With a table beyond the processor's caches, reaching each row dominates.
Nobody writes while it is measured.""",
)
