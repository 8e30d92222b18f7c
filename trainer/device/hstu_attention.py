"""HSTU's attention by the kernels of hstu_kernel.py, in the place of models/sequence/pointwise_attention.py.

Triton is imported when a model is given this attention, by nobody else.

Letters: S tokens, R sequences, D width, P position differences, T buckets of time.
"""

from __future__ import annotations

import functools
import os
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from models.candidate_groups import placed
from models.inputs import BUCKET_MS
from models.sequence.hstu import SequentialUnit
from models.sequence.jagged_targets import JaggedTargets
from roo.errors import SetupError

_BLOCK = {"M": 32, "N": 32}  # queries, keys
_LEAST = 16  # columns of a product


def give_kernel(model: nn.Module) -> None:
    """Its HSTU layers, if it has any, compute attention by the kernels from now on.

    Raises:
        SetupError: Triton isn't there.
    """
    kernels()
    for module in model.modules():
        if isinstance(module, SequentialUnit):
            module.attention = kernel_attention


def kernel_attention(
    query_key_value_SD3: Tensor,
    sequences: JaggedTargets,
    position_bias_P: Tensor,
    time_bias_T: Tensor | None,
    heads: int,
    divisor: float,
) -> Tensor:
    """As `pointwise_attention`, of float32 or bfloat16. Gradients of biases are added up in whatever order they come."""
    if not len(query_key_value_SD3):
        return query_key_value_SD3[:, : query_key_value_SD3.shape[1] // 3]
    out: Tensor = _Attention.apply(query_key_value_SD3.contiguous(), position_bias_P, time_bias_T, sequences, heads, divisor)
    return out


@functools.cache
def kernels() -> ModuleType:
    """Raises SetupError: Triton isn't there."""
    try:
        from trainer.device import hstu_kernel
    except ImportError as error:
        raise SetupError(f'attention: expected Triton for "triton", got {error}; set attention = "reference"') from None
    return hstu_kernel


@functools.cache
def _steps(device: torch.device) -> Tensor:
    return placed(BUCKET_MS, device)


def is_interpreted() -> bool:
    """Triton's interpreter runs kernels on a CPU, and knows no product of bfloat16: it is taken in float32 there."""
    return os.environ.get("TRITON_INTERPRET") == "1"


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_SD3: Tensor, pos_P: Tensor, time_T: Tensor | None, sequences: JaggedTargets, heads: int, divisor: float
    ) -> Tensor:
        out_SD = x_SD3.new_empty(len(x_SD3), x_SD3.shape[1] // 3)
        ctx.save_for_backward(x_SD3, pos_P, time_T)
        ctx.of = sequences, heads, divisor
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
        return dx_SD3, dpos_P.to(pos_P), None if time_T is None else dtime_T.to(time_T), None, None, None


def _launch(
    name: str, tensors: tuple[Tensor, ...], biases: tuple[Tensor, Tensor | None], of: tuple[JaggedTargets, int, float]
) -> None:
    """A program for every block of every sequence, as if each were the longest: those behind a sequence's end do nothing."""
    (pos_P, time_T), (sequences, heads, divisor) = biases, of
    x_SD3, jagged = tensors[0], sequences.jagged
    width = x_SD3.shape[1] // 3 // heads
    num_blocks = -(-jagged.longest // _BLOCK["M"])
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
            _steps(x_SD3.device),
            len(pos_P) // 2,
            num_blocks,
            width,
            1.0 / divisor,
            HEADS=heads,
            TIMES=times,
            NUM_STEPS=len(BUCKET_MS),
            WIDE=is_interpreted(),
            C=max(_LEAST, 1 << (width - 1).bit_length()),
            **_BLOCK,
        )
