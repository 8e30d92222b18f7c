"""How well do logged impressions compress, keyed by user or by request?"""

from benchmarks.question import Question, Row, Subject
from benchmarks.workloads.sharing.shared_data import EBNERD, absent

_COMPRESSED = "benchmarks.workloads.sharing.log_batches:compressed"
_USERS = 400


def _row(history: int, partitions: int) -> Row:
    return Row(
        name=f"histories of {history}, {partitions} partitions",
        unit="MB",
        clock="cpu",
        subjects=(
            Subject("by user", _COMPRESSED, ("user", _USERS, history, partitions)),
            Subject("by request", _COMPRESSED, ("request", _USERS, history, partitions), "peer"),
        ),
        skipped=absent(EBNERD),
    )


QUESTION = Question(
    name="logs",
    asks="How well do logged impressions compress, keyed by user or by request?",
    rows=(_row(50, 4), _row(50, 64), _row(500, 64)),
    slice_s=0.05,
    rounds=3,
    means="""\
What serving logs of all requests of 400 of EB-NeRD's users, in time order, in producer batches of 1 MB a partition (or what a
partition has), zstd 1 as Kafka's clients take it. Keyed by user, requests of a user are in the same partition, and its batches
repeat their histories; keyed by request they are spread. A producer that waits so long for a full batch of each partition is a
busy one: with fewer events a batch holds fewer visits of a user, and the difference is smaller. RecD's Scribe: 1.50 to 2.25.""",
)
