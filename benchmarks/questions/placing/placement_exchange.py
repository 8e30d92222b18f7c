"""What does a step cost where the workers hold the rows themselves?"""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.question import Question, Row, Subject, Told

_HERE = "benchmarks.workloads.placing.exchange:exchanged"
_STEPS = 13
OURS, PLAIN, TABLE, ROW = (
    "rows at the workers",
    "every id as often as it comes",
    "TorchRec, by tables",
    "TorchRec, by rows",
)


def _against(told: Mapping[str, Told]) -> dict[str, float]:
    best = min(told[name].cost_us for name in (TABLE, ROW))
    return {"the better TorchRec, in times of ours": best / told[OURS].cost_us}


def _row(zipf: float, valency: int) -> Row:
    size = ([8, 20_000, 32, 512, valency, zipf], _STEPS)
    return Row(
        name=f"8 tables of 20 000 rows of width 32, 512 examples a worker, {valency} ids each, Zipf {zipf:g}",
        unit="steps",
        shows="cost",
        subjects=(
            Subject(OURS, _HERE, ("workers", *size)),
            Subject("the same rows at two shards", _HERE, ("shards", *size), "stage"),
            Subject(TABLE, _HERE, ("torchrec table", *size), "peer"),
            Subject(ROW, _HERE, ("torchrec row", *size), "peer"),
            Subject(PLAIN, _HERE, ("plain", *size), "peer"),
        ),
        derives=_against,
    )


QUESTION = Question(
    name="placement-exchange",
    asks="What does a step cost where the workers hold the rows themselves?",
    rows=(_row(1.05, 3), _row(1.05, 20), _row(0.6, 3)),
    slice_s=0.0,
    rounds=3,
    keeps="benchmarks.workloads.placing.exchange:workers",
    means="""\
Two worker processes, gloo over loopback, one torch thread each. A step: ids of eight lists, rows of all of them, pooled sums, a
gradient of these, and one row-wise Adagrad step of both workers' gradients. All begin with equal rows; "sums differ by" says how
far a way is from ours behind 16 updates: 1e-5 at most is asked for. A turn is 13 steps by the slower worker's clock.

**Rows at the workers** asks for each row once (`param_server/exchange`): two swaps for a pull, two for a push, frames with
checksums, rules and stamps of a shard. **Rows at two shards** are the same code with two more processes on the same cores.
**Every id as often as it comes** is torch's own `all_to_all_single` of plain tensors, without dedup, keys, frames or marks, and
its update is written in torch: what asking once saves stands beside it. **TorchRec** is its sharded collection with FBGEMM's
fused update; it returns pooled sums, which is less than rows where rows are more than bags. Its bytes aren't counted.""",
)
