"""How fast does a poll become a batch?"""

from benchmarks.question import Question, Row, Subject

_HERE = "benchmarks.workloads.poll_decode"


def _decode(requests: int, candidates: int) -> Row:
    size = (requests, candidates)
    return Row(
        name=f"a poll of {requests} samples of {candidates} candidates",
        unit="samples",
        clock="cpu",
        subjects=(
            Subject("chunk", f"{_HERE}:ours", size),
            Subject("protobuf-python + numpy", f"{_HERE}:protobuf", size, "peer"),
            Subject("memcpy of the bytes", f"{_HERE}:memcpy", size, "limit"),
        ),
    )


QUESTION = Question(
    name="decode",
    asks="How fast does a poll become a batch?",
    rows=(_decode(64, 11), _decode(512, 5), _decode(64, 200)),
    means="""\
From a poll's messages to the batch that is trained on, with rejects and progress; the other way parses message by message with
protobuf-python (upb) and puts the same columns together with numpy, without checking anything. The codec's page has the decoder
alone, and what encoding costs.

The demo schema, histories of 30.""",
)
