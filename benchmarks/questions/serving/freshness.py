"""How long until what was learned changes a score?"""

from benchmarks.question import Question, Row, Subject

_HERE = "benchmarks.workloads.serving.freshness"

QUESTION = Question(
    name="freshness",
    asks="How long until what was learned changes a score?",
    rows=(
        Row(
            name="from a commit to the first answer by its version",
            unit="commits",
            shows="cost",
            subjects=(
                Subject("a serving program", f"{_HERE}:committed"),
                Subject("that looks all the time", f"{_HERE}:loaded", role="limit"),
            ),
        ),
        Row(
            name="from a click to another score of the item",
            unit="clicks",
            shows="cost",
            subjects=(
                Subject(
                    "rows at once, dense weights with a commit each 10 s", f"{_HERE}:engaged", (10_000, 4000)
                ),
                Subject("a commit each second", f"{_HERE}:engaged", (1000, 4000), "limit"),
            ),
        ),
    ),
    means="""\
The first row: a trainer's commit of the demo's model is linked into the store of a `roostream serving`, which looks once a
second, loads it, checks its sums and tries it with recent requests. The limit is what reading, checking and building the version
take.

The second row: a whole stack (Kafka, Flink, shards, worker, serving) without other traffic. A user is shown a list, clicks its
first item and asks for the next list, which closes the request; then a fixed request, with all of its features given, is scored
again and again (`/v1/explain`, which logs nothing) until a score differs. Its rows are published by the shards every 100 ms, so
a click is in the scores before any commit; a window of 4 s bounds what waits for heartbeats. The stages are means that the
programs tell of themselves. Scores are asked for only when those of the step before have been still for six seconds.""",
    slice_s=1.0,
    rounds=3,
)
