"""Is a reader slower than it was? A captured session, read again."""

from benchmarks.question import Question, Row, Subject
from benchmarks.workloads.sharing.shared_data import EBNERD, absent

_AGAIN = "benchmarks.workloads.warehouse.session_replay:read_again"
_USERS, _HISTORY = 300, 50


def _row(name: str, share: float) -> Row:
    ways = (("as it is", 0.0), ("3 % slower on purpose", 0.03), ("10 % slower on purpose", 0.1))
    return Row(
        name=name,
        unit="requests",
        clock="cpu",
        subjects=tuple(
            Subject(way, _AGAIN, (slower, share, _USERS, _HISTORY), "peer" if slower else "ours")
            for way, slower in ways
        ),
        skipped=absent(EBNERD),
    )


QUESTION = Question(
    name="session-replay",
    asks="Is a reader of the warehouse slower than it was?",
    rows=(_row("30 % of the features", 0.3), _row("a tenth of the features", 0.1)),
    rounds=31,
    means="""\
What a session read of a table of 300 of EB-NeRD's users, read again with a dummy trainer that only counts. The others are the
same reader slowed on purpose: a control. A ratio that is far from 1.03 and 1.10 there says that this machine can't tell so
little apart now. `--against COMMIT` puts the reader of another commit in turns with this one; any warehouse's own sessions are
compared by `roostream replay session` (docs/warehouse.md).""",
)
