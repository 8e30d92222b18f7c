"""What does a row cost that is in memory which several processes share?"""

from benchmarks.question import Question, Row, Subject

_HERE = "benchmarks.workloads.serving.row_gather"


def _gather(num_rows: int, width: int, num_keys: int) -> Row:
    sizes = (num_rows, width, num_keys)
    return Row(
        name=f"{num_keys} keys of {num_rows:,} rows, width {width}",
        unit="rows",
        clock="cpu",
        subjects=(
            Subject("shared, read-only", f"{_HERE}:shared", sizes),
            Subject("in this process, under a lock", f"{_HERE}:private", sizes, "before"),
            Subject("a cache, all there", f"{_HERE}:cached", sizes),
            Subject("copied, places known", f"{_HERE}:copied", sizes, "limit"),
        ),
    )


QUESTION = Question(
    name="row-gather",
    asks="What does a row cost that is in memory which several processes share?",
    rows=(_gather(10_000, 16, 300), _gather(1_000_000, 16, 300), _gather(1_000_000, 16, 3000)),
    means="""\
A gather of shared rows takes the index words of all keys first, then sequence, key, row and sequence again of each, both asked
for ahead; in this process it is places first, then rows. With few keys the call costs more than the rows; with rows beyond the
processor's caches, reaching each of them does, and small pages make that dearer: memory of one process has large ones, tmpfs
only where it is mounted or allowed so (`huge=`, shmem_enabled). Nobody writes while it is measured; keys whose row is being
replaced are read again (`rows_again`).""",
)
