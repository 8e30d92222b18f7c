"""What does it cost to find what requests of a batch share?"""

from typing import Literal

from benchmarks.question import Question, Row, Subject
from benchmarks.workloads.sharing.shared_data import EBNERD, absent

_FOUND = "benchmarks.workloads.sharing.finding:found"
_USERS = 60
_WAYS: tuple[tuple[str, Literal["ours", "stage", "limit"]], ...] = (
    ("look-up, deduplicated", "ours"),
    ("look-up", "stage"),
    ("partial, the history", "stage"),
    ("exact, all request-only features", "stage"),
    ("copy of the lists", "limit"),
)


def _row(history: int, requests: int) -> Row:
    return Row(
        name=f"histories of {history}, batches of {requests} requests",
        unit="requests",
        clock="cpu",
        subjects=tuple(
            Subject(name, _FOUND, (name, _USERS, history, requests), role) for name, role in _WAYS
        ),
        skipped=absent(EBNERD),
    )


QUESTION = Question(
    name="dedupe",
    asks="What does it cost to find what requests of a batch share?",
    rows=(_row(50, 64), _row(50, 364), _row(500, 364)),
    means="""\
Requests of 60 of EB-NeRD's users, clustered. exact: the index of all request-only features as one group (RecD's IKJT). partial:
spans of the history with its columns. The look-up hashes each entry that remains instead of each entry; deduplicated, both forms
are found first. RecD's readers pay 11 to 37 % more for conversion (§6.3).""",
)
