"""How much sooner is the past trained from files than from Kafka?"""

from benchmarks.question import Question, Row, Subject

_HERE = "benchmarks.workloads.warehouse.train_files"
_ALONE = "benchmarks.workloads.warehouse.read_alone"
_REQUESTS, _READ = 10_000, 30_000

QUESTION = Question(
    name="train-warehouse",
    asks="How much sooner is the past trained from files than from Kafka?",
    rows=(
        Row(
            name="10,000 requests of 20 candidates",
            unit="requests",
            subjects=(
                Subject("roostream train, from files", f"{_HERE}:from_files", (_REQUESTS,)),
                Subject(
                    "the same in batches of 64 from the first on",
                    f"{_HERE}:from_files",
                    (_REQUESTS, 64),
                    "stage",
                ),
                Subject("the same in batches of 512", f"{_HERE}:from_files", (_REQUESTS, 512), "stage"),
                Subject("a stack's worker, from Kafka", f"{_HERE}:from_kafka", (_REQUESTS,), "peer"),
            ),
        ),
        Row(
            name="30,000 requests of 20 candidates, read and not trained",
            unit="requests",
            subjects=(
                Subject("the session's source, from files", f"{_ALONE}:from_files", (_READ,)),
                Subject("a worker's source, from Kafka", f"{_ALONE}:from_kafka", (_READ,), "peer"),
            ),
        ),
    ),
    rounds=1,
    means="""\
The demo's schema and default model, the same samples. From files: one process that has the controller, two shards and the worker,
from its begin to the commit that holds everything; no socket, no broker, nothing published or predicted. From Kafka: the stack's
own programs (broker, two shards, controller, worker) on the same cores, from when the topic has all samples to when all are
trained, without commits. Both in batches of 8 that grow by one each 1,024 requests; the two lines with other batches are other
models, of fewer steps (docs/decisions/0086). What the joiner takes before that isn't counted: a log's replay through a stack
takes that too.""",
)
