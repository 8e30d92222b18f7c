"""What does an event cost in the join, and does it depend on how much is remembered?"""

from benchmarks.question import Question, Row, Subject

_HERE = "benchmarks.workloads.join_events"
_SIZE, _SMALL = (2_000, 500), (300, 75)


def _one_event(what: str, remembered: int, engagements: int) -> Row:
    return Row(
        name=f"one engagement, {what}",
        unit="events",
        shows="cost",
        clock="cpu",
        subjects=(
            Subject("join with its state's bytes", f"{_HERE}:one_event", (remembered, engagements)),
            Subject("reading the event", f"{_HERE}:read_one", (), "limit"),
        ),
    )


QUESTION = Question(
    name="joiner-core",
    asks="What does an event cost in the join, and does it depend on how much is remembered?",
    rows=(
        Row(
            name="a stream of 20,000 events, 10 a request, 500 users",
            unit="events",
            clock="cpu",
            subjects=(
                Subject("state machine", f"{_HERE}:joined", _SIZE),
                Subject("with reading the events", f"{_HERE}:read_and_joined", _SIZE, "stage"),
                Subject("reading alone", f"{_HERE}:parsed", _SIZE, "limit"),
            ),
        ),
        Row(
            name="a stream of 3,000 events, 10 a request, 75 users",
            unit="events",
            clock="cpu",
            subjects=(
                Subject("state machine", f"{_HERE}:joined", _SMALL),
                Subject("reading alone", f"{_HERE}:parsed", _SMALL, "limit"),
            ),
        ),
        Row(
            name="the demo's events, 3.4 a request, 20 candidates, 500 users",
            unit="events",
            clock="cpu",
            subjects=(
                Subject("state machine", f"{_HERE}:joined_as_in_the_demo", (6_000,)),
                Subject("reading alone", f"{_HERE}:parsed_as_in_the_demo", (6_000,), "limit"),
            ),
        ),
        *(_one_event(f"{n} remembered requests of the user", n, 5) for n in (10, 50, 200, 500)),
        *(_one_event(f"{n} engagements of its request", 1, n) for n in (10, 400, 4000)),
    ),
    means="""\
An event costs the same whether 10 or 500 requests of its user are remembered, and whether its request has 10 or 4 000
engagements: about twice what reading it costs. With one value a user, as it was before, it cost what was remembered.

The state machine alone was to take 150 thousand events a second. Over 3,000 events it does; over 20,000, of which nearly all
are in memory at once, it does not. What separates the two was counted (cachegrind with a 1 MiB last level, which other work on
the machine doesn't change), not timed: 38 and 41 thousand instructions an event, but 31 and 105 cache misses. 49 of the 105 go
away without Python's collector of cycles, which walks over what is remembered; programs run it rarely now
(`roostream.runtime.program.tune_garbage_collector`), this benchmark too. The rest is the state itself: a longer stream touches more memory than
the cache holds. The counts are of the code before requests had a budget, which adds 8 % more bytecode to an event.

Tried without effect that could be told from the noise of a shared machine: leaving out what marks a folded engagement, another
allocator, large pages.

One process, no Kafka, no Flink. The rows of one engagement are what the Flink operator does for it: take the state's bytes, join,
give bytes back. They say whether an event costs what it touches or what is remembered.""",
)
