"""How fast are samples decoded into a batch, and blocks encoded?"""

from benchmarks.question import Question, Row, Subject

_HERE = "benchmarks.workloads.codec"


def _decode(candidates: int) -> Row:
    size = (64, candidates)
    return Row(
        name=f"decode 64 samples of {candidates} candidates",
        unit="samples",
        clock="cpu",
        subjects=(
            Subject("decoder", f"{_HERE}:decode_ours", size),
            Subject("plain protobuf + numpy", f"{_HERE}:decode_protobuf", size, "peer"),
            Subject("memcpy of the bytes", f"{_HERE}:copy_bytes", size, "limit"),
        ),
    )


QUESTION = Question(
    name="codec",
    asks="How fast are samples decoded into a batch, and blocks encoded?",
    rows=(
        _decode(20),
        _decode(200),
        Row(
            name="encode the blocks of 64 requests of 20 candidates",
            unit="requests",
            clock="cpu",
            subjects=(
                Subject("encoder", f"{_HERE}:encode_ours", (64, 20)),
                Subject("plain protobuf", f"{_HERE}:encode_protobuf", (64, 20), "peer"),
                Subject("memcpy of the bytes", f"{_HERE}:copy_blocks", (64, 20), "limit"),
            ),
        ),
    ),
    means="""\
Decoding is five to six times as fast as the plain way, encoding about as fast although it checks everything.

The demo schema, histories of 30. The decoder checks every shape, cap and number, which the plain one does not; it still has to
beat it, since every poll of a worker is decoded. What separates it from memcpy is the walk over fields, not the copying.""",
)
