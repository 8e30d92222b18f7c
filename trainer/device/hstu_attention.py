"""HSTU's attention with Triton kernels, in place of roostream/models/sequence/hstu_attention.py.

Triton is imported only when a model is given this attention.

Letters: S tokens, R sequences, D width, P position differences, T time buckets.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from roostream.errors import SetupError
from roostream.models.candidate_groups import placed
from roostream.models.inputs import BUCKET_MS
from roostream.models.sequence.hstu import HstuLayer
from roostream.models.sequence.jagged_sequences import JaggedSequences

BLOCK = 32  # queries, and keys, per program; a power of two
_MIN_COLUMNS = 16  # columns of a product


def use_triton_attention(model: nn.Module) -> None:
    """Make all HSTU layers of the model compute attention with the kernels.

    Raises:
        SetupError: Triton is not installed.
    """
    kernels()
    for module in model.modules():
        if isinstance(module, HstuLayer):
            module.attention = kernel_attention


def attention_in_blocks(block: int) -> Callable[..., Tensor]:
    """As `pointwise_attention`, for float32 or bfloat16. Gradients of biases are summed in arbitrary order.

    `block`: number of queries, and of keys, that a program processes at a time, a power of two from 16 on.
    """

    def attend(
        query_key_value_SD3: Tensor,
        sequences: JaggedSequences,
        position_bias_P: Tensor,
        time_bias_T: Tensor | None,
        heads: int,
        divisor: float,
    ) -> Tensor:
        if not len(query_key_value_SD3):
            return query_key_value_SD3[:, : query_key_value_SD3.shape[1] // 3]
        arguments = _LaunchArgs(sequences, heads, divisor, block)
        out: Tensor = _Attention.apply(
            query_key_value_SD3.contiguous(), position_bias_P, time_bias_T, arguments
        )
        return out

    return attend


kernel_attention = attention_in_blocks(BLOCK)


@functools.cache
def kernels() -> ModuleType:
    """The module of Triton kernels. Raises SetupError: Triton is not installed."""
    try:
        from trainer.device import hstu_triton_kernels as hstu_kernel
    except ImportError as error:
        raise SetupError(
            f'attention: expected Triton for "triton", got {error}; set attention = "reference"'
        ) from None
    return hstu_kernel


@functools.cache
def _bucket_bounds(device: torch.device) -> Tensor:
    return placed(BUCKET_MS, device)


def is_interpreted() -> bool:
    """Triton's interpreter runs on a CPU; it has no bfloat16 products, so they are computed in float32."""
    return os.environ.get("TRITON_INTERPRET") == "1"


class _LaunchArgs(NamedTuple):
    """Arguments shared by all launches for a batch."""

    sequences: JaggedSequences
    heads: int
    divisor: float
    block: int


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_SD3: Tensor, pos_P: Tensor, time_T: Tensor | None, arguments: _LaunchArgs
    ) -> Tensor:
        out_SD = x_SD3.new_empty(len(x_SD3), x_SD3.shape[1] // 3)
        ctx.save_for_backward(x_SD3, pos_P, time_T)
        ctx.of = arguments
        _launch("forward_kernel", (x_SD3, out_SD), (pos_P, time_T), ctx.of)
        return out_SD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_SD: Tensor) -> tuple[Tensor | None, ...]:
        x_SD3, pos_P, time_T = ctx.saved_tensors
        do_SD, dx_SD3 = gradient_SD.to(x_SD3.dtype).contiguous(), torch.empty_like(x_SD3)
        dpos_P = torch.zeros_like(pos_P, dtype=torch.float32)
        dtime_T = dpos_P if time_T is None else torch.zeros_like(time_T, dtype=torch.float32)
        _launch("query_kernel", (x_SD3, do_SD, dx_SD3, dpos_P, dtime_T), (pos_P, time_T), ctx.of)
        _launch("key_kernel", (x_SD3, do_SD, dx_SD3), (pos_P, time_T), ctx.of)
        return dx_SD3, dpos_P.to(pos_P), None if time_T is None else dtime_T.to(time_T), None


def _launch(
    name: str, tensors: tuple[Tensor, ...], biases: tuple[Tensor, Tensor | None], arguments: _LaunchArgs
) -> None:
    """One program per block of every sequence, as if all were as long as the longest; superfluous programs do
    nothing."""
    (pos_P, time_T), (sequences, heads, divisor, block) = biases, arguments
    x_SD3, jagged = tensors[0], sequences.jagged
    width = x_SD3.shape[1] // 3 // heads
    num_blocks = -(-jagged.longest // block)
    times = time_T is not None and jagged.gap_S is not None and jagged.next_S is not None
    gap_S, next_S = (jagged.gap_S, jagged.next_S) if times else (jagged.offset_R1, jagged.offset_R1)
    # Of another device than the current one Triton would launch on the wrong one.
    with torch.cuda.device_of(x_SD3):  # type: ignore[no-untyped-call]
        getattr(kernels(), name)[(num_blocks * (len(jagged.offset_R1) - 1), heads)](
            *tensors,
            jagged.offset_R1,
            jagged.history_R,
            gap_S,
            next_S,
            pos_P,
            pos_P if time_T is None else time_T,
            _bucket_bounds(x_SD3.device),
            len(pos_P) // 2,
            num_blocks,
            width,
            1.0 / divisor,
            HEADS=heads,
            TIMES=times,
            NUM_STEPS=len(BUCKET_MS),
            WIDE=is_interpreted(),
            C=max(_MIN_COLUMNS, 1 << (width - 1).bit_length()),
            M=block,
            N=block,
        )
