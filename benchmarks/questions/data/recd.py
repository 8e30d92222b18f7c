"""What do clustering, deduplicated look-ups and deduplicated compute give training?"""

from typing import Literal

from benchmarks.question import Question, Row, Subject
from benchmarks.workloads.sharing.shared_data import EBNERD, absent
from benchmarks.workloads.sharing.steps import derived

_CLIMBED = "benchmarks.workloads.sharing.ladder:climbed"
_IMPRESSIONS = 4096
_STEPS: tuple[tuple[str, Literal["ours", "stage", "peer"]], ...] = (
    ("requests, clustered, shared", "ours"),
    ("requests, clustered", "stage"),
    ("requests, shared", "stage"),
    ("requests", "stage"),
    ("impressions, clustered, IKJT", "peer"),
    ("impressions, clustered", "peer"),
    ("impressions, mixed", "peer"),
)


def _row(architecture: str, history: int, users: int) -> Row:
    return Row(
        name=f"{architecture}, histories of {history}, {users} users",
        unit="impressions",
        clock="cpu",
        subjects=tuple(
            Subject(name, _CLIMBED, (architecture, name, users, history, _IMPRESSIONS), role)
            for name, role in _STEPS
        ),
        derives=derived,
        skipped=absent(EBNERD),
    )


QUESTION = Question(
    name="recd",
    asks="What do clustering, deduplicated look-ups and deduplicated compute give training?",
    rows=(_row("late", 50, 60), _row("late", 500, 30), _row("late with HSTU", 50, 20)),
    rounds=2,
    means="""\
The same impressions, all requests of some of EB-NeRD's users (about 15 each), trained in batches of about 4 096 impressions, the
paper's. mixed: impressions in random order. clustered: those of a user next to each other, which alone changes nothing but which
rows a batch needs. IKJT: equal rows are found in the step and trained once (all of RecD's exact form, floats included). requests:
as our logs have them, where IKJT has nothing left to find. shared: what requests share beside (partial IKJT: histories that moved
on), looked up once and multiplied once; in time order few requests of a user meet in a batch, clustered many do.

History ids are those that a batch's look-up hashes; rows pulled are the same in all forms of the same batches, since ids are made
unique anyway. FLOPs are those of matrix products, both ways. CPU time, one thread, a shard in the same process. The paper's
ladder, on GPUs and against impressions: clustering 1.0, look-ups 1.34, compute 2.42, larger batches 2.48.""",
)
