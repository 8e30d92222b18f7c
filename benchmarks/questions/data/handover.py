"""How long is nothing trained between the archive and the stream?"""

from benchmarks.question import Question, Row, Subject

_HERE = "benchmarks.workloads.warehouse.hand_over"
_FEW, _MANY = 2_000, 16_000


def _row(requests: int, *others: Subject) -> Row:
    return Row(
        name=f"{requests // 1000} 000 samples from files, then the topic",
        unit="pauses",
        shows="cost",
        subjects=(
            Subject("handed over", f"{_HERE}:handed_over", (requests,)),
            *others,
            Subject("a commit alone, while training goes on", f"{_HERE}:committed", (requests,), "limit"),
        ),
        time="without a step",
    )


QUESTION = Question(
    name="handover",
    asks="How long is nothing trained between the archive and the stream?",
    rows=(
        _row(_FEW),
        _row(_MANY, Subject("the worker ended and started again", f"{_HERE}:restarted", (_MANY,), "stage")),
    ),
    rounds=1,
    means="""\
A stack's own programs: broker, two shards, controller, one worker, and before them an archiver until all samples lie in files.
They close within the minutes of the run, so all of their ids are among those of the last hour that the worker reads from the
files before it goes on with the stream: as many as an hour of a site can bring is the dear case.

Handed over: from the last step of the files until the first of the stream, as the worker's metrics show it, looked at about fifty
times a second. Its parts follow each other: until the controller begins the commit; that commit's phases, in which all of it is
trained and the offsets are those of the table's version (cut, freeze, write, link); the next incarnation, claimed and restored
from that commit; the first batch. Whoever trains an archive and has no hand-over ends the program and begins another one: that
restart is timed in the second stack, with the same parts, from when the worker is asked to end. A hand-over can't take less than
a commit. The last line is one that is asked for: most of it runs beside training (page of `commit`).

`lost` and `trained twice` are of the books behind each pause: all samples below the offsets that are committed, what parameters
contain by their own count, and predictions in the topic by their samples' ids.""",
)
