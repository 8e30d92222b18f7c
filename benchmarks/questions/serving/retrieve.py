"""What does it cost to find items, and to keep their vectors fresh?"""

import importlib.util

from benchmarks.question import Question, Row, Subject

_HERE = "benchmarks.workloads.serving.retrieve"
_NO_FAISS = "" if importlib.util.find_spec("faiss") else "package extra retrieval isn't installed"


def _exact(num_items: int) -> Row:
    return Row(
        name=f"100 of {num_items:,} items, every one compared",
        unit="searches",
        shows="cost",
        clock="cpu",
        subjects=(
            Subject("exact", f"{_HERE}:search", ("exact", num_items)),
            Subject("sorted whole", f"{_HERE}:search", ("sorted", num_items), "before"),
            Subject("the products alone", f"{_HERE}:search", ("products", num_items), "limit"),
        ),
    )


def _lists(num_items: int) -> Row:
    return Row(
        name=f"100 of {num_items:,} items, by a tenth of the lists",
        unit="searches",
        shows="cost",
        clock="cpu",
        skipped=_NO_FAISS,
        subjects=(
            Subject("lists, then vectors of now", f"{_HERE}:search", ("ivf", num_items)),
            Subject("faiss, every one compared", f"{_HERE}:search", ("flat", num_items), "peer"),
            Subject("exact", f"{_HERE}:search", ("exact", num_items), "before"),
        ),
    )


def _kept(num_items: int) -> Row:
    return Row(
        name=f"a catalogue of {num_items:,} items of the demo",
        unit="items",
        shows="cost",
        clock="cpu",
        subjects=(
            Subject("their vectors", f"{_HERE}:kept", ("vectors", num_items)),
            Subject("a look at their rows", f"{_HERE}:kept", ("look", num_items), "stage"),
            Subject("the tower alone", f"{_HERE}:kept", ("tower", num_items), "limit"),
        ),
    )


def _asked(num_items: int) -> Row:
    return Row(
        name=f"a request, {num_items:,} items of the demo, cascade",
        unit="requests",
        shows="cost",
        clock="cpu",
        subjects=(
            Subject("retrieve 100", f"{_HERE}:asked", ("retrieve", num_items)),
            Subject("recommend 10 of 100", f"{_HERE}:asked", ("recommend", num_items)),
            Subject("rank 10", f"{_HERE}:asked", ("rank", num_items), "stage"),
            Subject("the request's tower alone", f"{_HERE}:asked", ("tower", num_items), "limit"),
        ),
    )


QUESTION = Question(
    name="retrieve",
    asks="What does it cost to find items, and to keep their vectors fresh?",
    rows=(*map(_exact, (10_000, 100_000)), *map(_lists, (20_000, 100_000)), _kept(10_000), _asked(10_000)),
    means="""\
Comparing every item costs its products, and grows with the catalogue; lists cost a share of it, at the recall that stands beside
them (against comparing every one). A look at all rows is what a second of freshness costs where nothing has changed; a vector is
what an item costs whose rows have. A recommendation is a retrieval, a pass over what was found, and a rank of what is shown.

Vectors 32 wide around 500 directions; searches of the index alone, then requests in process: body to answer, without HTTP, Redis
and Kafka, rows in the replica.""",
)
