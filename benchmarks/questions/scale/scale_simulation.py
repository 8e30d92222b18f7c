"""What does training reach with a hundred workers and a thousand shards?"""

from typing import Any

from benchmarks.question import Question, Role, Row, Subject

_AT = "benchmarks.workloads.sizes.simulated:training"
_STEPS = 20


def _subject(
    workers: int, shards: int, batch: int, named: str = "", role: Role = "ours", **scene: Any
) -> Subject:
    words = (
        f"{workers} worker{'s' * (workers > 1)}, {shards:,} shard{'s' * (shards > 1)}, steps of {batch:,}",
        named,
    )
    return Subject(
        "; ".join(filter(None, words)), _AT, (workers, shards, batch, {"steps": _STEPS, **scene}), role
    )


QUESTION = Question(
    name="scale-simulation",
    asks="What does training reach with a hundred workers and a thousand shards? (simulated over measured costs)",
    rows=(
        Row(
            name="requests trained, simulated",
            unit="requests",
            time="simulated time",
            subjects=(
                _subject(100, 1000, 65_536),
                _subject(1, 2, 512, "as measured", "peer"),
                _subject(4, 4, 4096),
                _subject(16, 16, 4096),
                _subject(64, 16, 4096),
                _subject(100, 16, 4096),
                _subject(100, 100, 4096),
                _subject(100, 1000, 4096),
                _subject(100, 100, 65_536),
            ),
        ),
        Row(
            name="the same with one thing left out, or worse, simulated",
            unit="requests",
            time="simulated time",
            subjects=(
                _subject(100, 1000, 65_536),
                _subject(100, 1000, 65_536, "no stragglers", "limit", straggles=0.0),
                _subject(100, 1000, 65_536, "no machine is lost", "limit", lost_after_s=1e12),
                _subject(
                    100, 1000, 65_536, "a machine is lost a day after it was started", lost_after_s=86_400.0
                ),
                _subject(100, 1000, 65_536, "a lost machine takes 5 minutes", replaced_s=300.0),
            ),
        ),
    ),
    rounds=3,
    means="""\
Nothing here was run at this size: it is arithmetic over this machine's committed figures (`roostream plan` cites them), with
queues, stragglers, losses and commits as discrete events; a core is one of this machine's. Chances are assumed: of a worker's or
a shard's part of a step one in a thousand takes ten times as long, a machine is lost once in thirty days and is back after 30 s.

Two things end training long before a million requests a second. **ShardRpcHandler**: each worker calls each shard twice a step, one call
after the other, so a thousand shards cost a step more than its arithmetic unless steps are large: shards by memory, not by
number.
**The lockstep**: a step is as slow as the slowest of all, so a straggler in a thousand is one in every tenth step of 100 workers.
Losses and commits cost a few per cent. What follows from it is in docs/operations/scale.md.""",
)
