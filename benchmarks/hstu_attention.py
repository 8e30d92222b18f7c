"""How fast is HSTU's attention, by our kernels and by what else there is?

HSTU's attention alone, forward or both ways: our kernels, the reference, and what torch has for attention
with a softmax.

Letters: R sequences, S tokens of all, N tokens of the longest, H heads, C width of a head, P position
differences, T buckets.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.harness.benchmark import Benchmark, Role, Row, Subject, Work
from benchmarks.harness.machine import no_device
from roostream.models.sequence.hstu import NUM_TIME_BUCKETS
from roostream.models.sequence.hstu_attention import pointwise_attention
from roostream.models.sequence.jagged_sequences import JaggedSequences, build_jagged_sequences
from trainer.device.hstu_attention import attention_in_blocks

_PADDED_BLOCK = 128  # a padded length is a multiple of it
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Shape(NamedTuple):
    """Sizes of a batch."""

    sequences: int
    longest: int  # of a history; lengths are between a tenth of it and it
    targets: int
    heads: int
    width: int  # of a head


class AttentionCase:
    """A batch of histories and targets with times, the same for every subject."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: str, *, backward: bool = False) -> None:
        rng = np.random.default_rng(0)
        self.shape, self.device, self.backward = shape, device, backward
        self.length_R = rng.integers(max(shape.longest // 10, 1), shape.longest + 1, shape.sequences)
        gap_ms_L = np.concatenate([np.sort(rng.integers(0, 30 * 86_400_000, n)) for n in self.length_R])
        num_targets_R = np.full(shape.sequences, shape.targets, dtype=np.int32)
        self.sequences: JaggedSequences = build_jagged_sequences(
            self.length_R, gap_ms_L, num_targets_R, shape.longest, device
        )
        torch.manual_seed(0)
        biases = (torch.randn(n) * 0.1 for n in (2 * shape.longest + 1, NUM_TIME_BUCKETS))
        self.position_bias_P, self.time_bias_T = (b.to(device).requires_grad_(backward) for b in biases)
        self.x_SD3 = torch.randn(int(self.sequences.tokens_R.sum()), 3 * shape.heads * shape.width).to(
            device, dtype
        )
        self.x_SD3.requires_grad_(backward)

    def gflop(self) -> float:
        """10⁹ FLOPs of the products of visible pairs: two forward, four more backward."""
        h_R, m = self.length_R.astype(np.float64), self.shape.targets
        pairs = float((h_R * (h_R + 1) / 2 + m * (h_R + 1)).sum())
        return pairs * self.shape.heads * self.shape.width * 2 * (6 if self.backward else 2) / 1e9

    def padded(self) -> list[Tensor]:
        """Queries, keys and values, [R, H, N, C] each."""
        tokens_R = self.sequences.tokens_R
        longest = -(-int(tokens_R.max()) // _PADDED_BLOCK) * _PADDED_BLOCK
        parts = torch.split(self.x_SD3.detach(), tokens_R.tolist())
        x_RND3 = torch.stack([F.pad(part, (0, 0, 0, longest - len(part))) for part in parts])
        split = x_RND3.view(len(parts), longest, 3, self.shape.heads, -1).permute(2, 0, 3, 1, 4)
        return [x.contiguous().requires_grad_(self.backward) for x in split]


def reference(case: AttentionCase) -> Callable[[], Tensor]:
    """Plain torch, padded in groups of similar lengths; bfloat16 by autocast, as in training."""

    def run() -> Tensor:
        with torch.autocast(
            case.device.partition(":")[0], torch.bfloat16, enabled=case.x_SD3.dtype == torch.bfloat16
        ):
            return pointwise_attention(case.x_SD3, *_rest(case))

    return run


def kernel(case: AttentionCase, block: int = 32) -> Callable[[], Tensor]:
    """Triton, jagged; `block`: queries, and keys, that a program takes at a time."""
    attend = attention_in_blocks(block)
    return lambda: attend(case.x_SD3, *_rest(case))


def _rest(case: AttentionCase) -> tuple[JaggedSequences, Tensor, Tensor, int, float]:
    return (
        case.sequences,
        case.position_bias_P,
        case.time_bias_T,
        case.shape.heads,
        float(case.shape.longest + 1),
    )


def flex(case: AttentionCase) -> Callable[[], Tensor]:
    """FlexAttention with the same mask and biases, and a softmax instead of SiLU; compiled on a device."""
    q, k, v = case.padded()
    jagged = case.sequences.jagged
    assert jagged.gap_S is not None and jagged.next_S is not None
    tokens_R, history_R = jagged.offset_R1.diff(), jagged.history_R
    seconds = [
        torch.stack(
            [
                F.pad(part, (0, q.shape[2] - len(part)))
                for part in torch.split(x_S, case.sequences.tokens_R.tolist())
            ]
        ).float()
        / 1000
        for x_S in (jagged.gap_S, jagged.next_S)
    ]
    gap_RN, next_RN = seconds
    half = len(case.position_bias_P) // 2

    def sees(r: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i < tokens_R[r]) & ((j == i) | ((j < i) & (j < history_R[r])))

    def biased(score: Tensor, r: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        offset = torch.minimum(j, history_R[r]) - torch.minimum(i, history_R[r]) + half
        gap = (gap_RN[r, j] - next_RN[r, i]).abs().clamp_min(1.0)
        bucket = (gap.log() / 0.301).to(torch.int32).clamp(0, NUM_TIME_BUCKETS - 1)
        return score + case.position_bias_P[offset] + case.time_bias_T[bucket]

    mask = create_block_mask(sees, len(tokens_R), None, q.shape[2], q.shape[2], device=case.device)
    attend = torch.compile(flex_attention, dynamic=False) if case.device != "cpu" else flex_attention
    return lambda: attend(q, k, v, score_mod=biased, block_mask=mask, scale=1.0)


def causal(case: AttentionCase) -> Callable[[], Tensor]:
    """torch's fused attention: softmax, causal, padded, without biases."""
    q, k, v = case.padded()
    return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)


WAYS = {"reference": reference, "kernel": kernel, "flex": flex, "causal": causal}


@contextlib.contextmanager
def attention(
    way: str, backward: bool, dtype: str, device: str, shape: Sequence[int], block: int = 0
) -> Iterator[Work]:
    """`way`: of WAYS; units are 10⁹ FLOPs. A step waits for the device. `block`: of `kernel`; 0 = the
    default."""
    torch.set_num_threads(1)
    case = AttentionCase(Shape(*shape), DTYPES[dtype], device, backward=backward)
    run = kernel(case, block) if block else WAYS[way](case)
    with torch.set_grad_enabled(backward):
        gradient = torch.ones_like(run())
    figures: dict[str, float] = {}
    on_device = device != "cpu"

    def step() -> None:
        began_s = time.perf_counter()
        if on_device:
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        with torch.set_grad_enabled(backward):
            out = run()
        if backward:
            out.backward(gradient)  # type: ignore[no-untyped-call]
        if on_device:
            torch.cuda.synchronize()
            figures["MiB beside its inputs"] = (torch.cuda.max_memory_allocated() - before) / (1 << 20)
        figures["ms"] = 1000 * (time.perf_counter() - began_s)

    yield Work(step, case.gflop(), lambda: figures)


_OPENS = "benchmarks.hstu_attention:attention"
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
        )  # what one of another size can't do is figures, and the others go on
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

BENCHMARK = Benchmark(
    name="hstu-attention",
    summary="How fast is HSTU's attention, by our kernels and by what else there is?",
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
    interpretation="""\
GFLOP counts the products of visible pairs, two forward and four more backward; padding, masked and
recomputed products do not count. A step is a call and the wait for its end; MiB are the peak memory beside
the inputs. Histories have evenly spread lengths, and all subjects but the last compute position and time
biases and their gradients. FlexAttention cannot express SiLU without a softmax, so it uses our mask and
biases with a softmax: the same products and reads, another function. torch's fused attention is padded and
has neither mask nor biases; it shows how fast such products run at all. Our kernels use float32 products
without TF32.""",
)
