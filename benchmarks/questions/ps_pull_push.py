"""How many rows a second can be read and updated?"""

from benchmarks.question import Question, Row, Subject

_HERE = "benchmarks.workloads.rows"


def _rows(ids_a_table: int) -> tuple[Row, ...]:
    thousands = f"{26 * ids_a_table / 1000:g} k ids of 26 tables"
    pull, push = (
        Subject("shard in this process", f"{_HERE}:{what}", ("here", ids_a_table))
        for what in ("pull", "push")
    )
    numpy = Subject("numpy indexing, keys are row numbers", f"{_HERE}:gather_numpy", (ids_a_table,), "limit")
    torch = Subject(
        "torch sparse Adagrad, keys are row numbers", f"{_HERE}:adagrad_torch", (ids_a_table,), "peer"
    )
    return (
        Row(name=f"pull {thousands}", unit="rows", clock="cpu", subjects=(pull, numpy)),
        Row(name=f"push and update {thousands}", unit="rows", clock="cpu", subjects=(push, torch)),
        *(_over_loopback(what, thousands, ids_a_table) for what in ("pull", "push")),
    )


def _over_loopback(what: str, thousands: str, ids_a_table: int) -> Row:
    return Row(
        name=f"{what} {thousands}, over loopback",
        unit="rows",
        subjects=(
            Subject("shard over loopback", f"{_HERE}:{what}", ("there", ids_a_table)),
            Subject("the same, certificates and a token", f"{_HERE}:{what}", ("secured", ids_a_table)),
            Subject("the same in this process", f"{_HERE}:{what}", ("here", ids_a_table), "limit"),
        ),
    )


QUESTION = Question(
    name="ps-pull-push",
    asks="How many rows a second can be read and updated?",
    rows=(*_rows(400), *_rows(4000)),
    means="""\
Reading rows comes to two thirds and more of plain indexing although keys are looked up; updating is three times as fast as
torch's sparse Adagrad. Over loopback a large pull or push is bound by copying; with `[link]`'s certificates and a token
(docs/operations/security.md) by what both ends encrypt.

1.04 M rows of width 16 in 26 tables of one stack, Adagrad, one shard. A shard finds keys in its index; numpy and torch are given
row numbers, so they do less. A push checks gradients, updates rows, and marks them for the next commit before it answers.""",
)
