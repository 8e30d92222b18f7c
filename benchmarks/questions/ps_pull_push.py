"""How many rows a second can be read and updated?"""

from benchmarks.question import Question, Row, Subject

_HERE = "benchmarks.workloads.rows"


def _rows(ids_a_table: int) -> tuple[Row, ...]:
    thousands = f"{26 * ids_a_table / 1000:g} k ids of 26 tables"
    return (
        Row(
            name=f"pull {thousands}",
            unit="rows",
            subjects=(
                Subject("shard in this process", f"{_HERE}:pull", ("here", ids_a_table)),
                Subject("shard over loopback", f"{_HERE}:pull", ("there", ids_a_table), "stage"),
                Subject("numpy indexing, keys are row numbers", f"{_HERE}:gather_numpy", (ids_a_table,), "limit"),
            ),
        ),
        Row(
            name=f"push and update {thousands}",
            unit="rows",
            subjects=(
                Subject("shard in this process", f"{_HERE}:push", ("here", ids_a_table)),
                Subject("shard over loopback", f"{_HERE}:push", ("there", ids_a_table), "stage"),
                Subject("torch sparse Adagrad, keys are row numbers", f"{_HERE}:adagrad_torch", (ids_a_table,), "peer"),
            ),
        ),
    )


QUESTION = Question(
    name="ps-pull-push",
    asks="How many rows a second can be read and updated?",
    rows=(*_rows(400), *_rows(4000)),
    means="""\
1.04 M rows of width 16 in 26 tables of one stack, Adagrad, one shard. A shard finds keys in its index; numpy and torch are given
row numbers, so they do less. A push checks gradients, updates rows, and marks them for the next commit before it answers.""",
)
