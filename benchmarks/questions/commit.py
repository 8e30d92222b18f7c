"""For how long does a commit hold up training, and where does its time go?"""

from benchmarks.question import Question, Row, Subject

_HERE = "benchmarks.workloads.commits"
_ROWS = (10_000, 100_000, 1_000_000)


def _spelt(rows: int) -> str:
    return f"{rows:,}".replace(",", " ")


def _stack(rows: int) -> Row:
    return Row(
        name=f"a commit of a running stack that holds {_spelt(rows)} rows",
        unit="commits",
        shows="cost",
        subjects=(
            Subject("every row changed", f"{_HERE}:commits", (rows, 1, True)),
            Subject("a second of training", f"{_HERE}:commits", (rows, 3, False), "stage"),
            Subject("the same bytes written and synced", f"{_HERE}:synced", (rows,), "limit"),
        ),
    )


def _shard(rows: int) -> Row:
    return Row(
        name=f"one shard's part, {_spelt(rows)} rows changed",
        unit="commits",
        shows="cost",
        subjects=(
            Subject("the shard", f"{_HERE}:of_a_shard", (rows,)),
            Subject("the same bytes written and synced", f"{_HERE}:synced_of_a_shard", (rows,), "limit"),
        ),
    )


QUESTION = Question(
    name="commit",
    asks="For how long does a commit hold up training, and where does its time go?",
    rows=(*map(_shard, _ROWS), *map(_stack, _ROWS)),
    rounds=1,
    keeps=f"{_HERE}:stack",
    means="""\
Training stands still from the worker's cut until it is told to go on: "cut" (the batch in hand, pushes acknowledged, predictions
flushed) and "freeze" (shards copy what has changed). What follows runs beside training: "write" (shards encode and sync their
rows, the worker its own part and the dense one), "link" (the manifest). The target is a pause of 50 ms at most, which at a commit
every 10 s would be 0.5 % of the time; a commit writes what has changed, so a second of training is the usual one and every row
the worst. The pause is counted by the worker's loop itself, the phases by the controller, whose members answer by heartbeats.

A shard alone has its parts in one process without calls: the copy under the lock for which pushes wait, encoding with
checksums, handing to the store, waiting for the disk, and reading a part back and forgetting old ones.

Broker, two shards, controller, one worker as a stack starts them, on the same cores; 500 requests/s of 20 candidates, demo
schema (rows of 16 with a state), no row expires; the rows held grow from table to table. The limit is one file of as many bytes,
written and synced in the same run.""",
)
