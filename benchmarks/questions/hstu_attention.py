"""How fast is HSTU's attention, by our kernels and by what else there is?"""

from benchmarks.device import no_device
from benchmarks.question import Question, Role, Row, Subject

_OPENS = "benchmarks.workloads.hstu_attention:attention"
_LONG = (128, 1000, 10, 4, 64)  # sequences, longest history, targets, heads, width of a head
_SHORT = (512, 100, 20, 2, 32)
_SMALL = (16, 200, 5, 1, 48)
_BLOCK = 32  # what training takes (trainer/device/hstu_attention.py)


def _named(dtype: str, backward: bool, of: str) -> str:
    return f"{of}, {dtype}, {'forward and backward' if backward else 'forward'}"


def _on_device(dtype: str, backward: bool, shape: tuple[int, ...], of: str) -> Row:
    def arguments(way: str) -> tuple[object, ...]:
        return (way, backward, dtype, "cuda", shape)

    return Row(
        name=_named(dtype, backward, of),
        unit="GFLOP",
        subjects=(
            Subject("our kernels", _OPENS, arguments("kernel")),
            Subject("the reference", _OPENS, arguments("reference"), "peer"),
            Subject("FlexAttention, softmax", _OPENS, arguments("flex"), "peer"),
            Subject("fused softmax, causal, padded, no bias", _OPENS, arguments("causal"), "limit"),
        ),
        skipped=no_device(),
    )


def _blocks() -> Row:
    def subject(block: int) -> Subject:
        role: Role = (
            "ours" if block == _BLOCK else "peer"
        )  # what one of another size can't do is told, and the others go on
        return Subject(f"blocks of {block}", _OPENS, ("kernel", True, "bfloat16", "cuda", _LONG, block), role)

    limit = Subject(
        "fused softmax, causal, padded, no bias", _OPENS, ("causal", True, "bfloat16", "cuda", _LONG), "limit"
    )
    return Row(
        name="our kernels by their blocks, bfloat16, forward and backward",
        unit="GFLOP",
        subjects=(*(subject(block) for block in (_BLOCK, 16, 64, 128)), limit),
        skipped=no_device(),
    )


def _on_host(backward: bool) -> Row:
    def arguments(way: str) -> tuple[object, ...]:
        return (way, backward, "float32", "cpu", _SMALL)

    return Row(
        name=_named("float32", backward, "on the host, one thread: 16 histories of at most 200, 5 targets"),
        unit="GFLOP",
        clock="cpu",
        subjects=(
            Subject("the reference", _OPENS, arguments("reference")),
            Subject("fused softmax, causal, padded, no bias", _OPENS, arguments("causal"), "limit"),
        ),
    )


_LONG_NAME = "128 histories of 100 to 1000, 10 targets, 4 heads of 64"
_SHORT_NAME = "512 histories of 10 to 100, 20 targets, 2 heads of 32"

QUESTION = Question(
    name="hstu-attention",
    asks="How fast is HSTU's attention, by our kernels and by what else there is?",
    rows=(
        *(
            _on_device(dtype, backward, _LONG, _LONG_NAME)
            for dtype in ("bfloat16", "float32")
            for backward in (False, True)
        ),
        _on_device("bfloat16", True, _SHORT, _SHORT_NAME),
        _blocks(),
        *(_on_host(backward) for backward in (False, True)),
    ),
    slice_s=0.2,
    rounds=5,
    means="""\
GFLOP are those of products of pairs that are seen, two forward and four more back, the same for everybody: what is padded, masked
or computed again earns nothing. A step is a call and the wait for its end. Histories are as long as it comes, evenly spread; all
have position and time biases, and all but the last subject compute them and their gradients. MiB are what a step needs at most
beside its inputs.

SiLU without a softmax can't be said to FlexAttention: its weights are exponentials over their sum, and a negative weight has no
logarithm. It has our mask and biases and a softmax in SiLU's place: the same products and reads, so a measure of what such a
mask costs, not of the same function. torch's fused attention has neither mask nor biases and is padded; it is how fast products
of these shapes are done at all. Neither is a kernel written for HSTU.

Products of float32 are not TF32 in our kernels.""",
)
