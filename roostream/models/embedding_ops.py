"""Gather rows by number, pool them in bags, and sum gradients back to the rows.

On a CPU, gradients are summed in the order of the entries, so results are deterministic. Other devices use
torch's layers.

Letters: U rows, D width of a row, L entries, S bags, C columns of all sources side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from roostream.models.simd import COMPILED, LANES, as_array, fused, kernel, load, spread, store


def gather_rows(sources: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Gather the rows of each source (rows [U, D], index int64 [L]) and return them side by side, [L, C]. U
    may be 0 if L is."""
    if not _has_kernel(sources[0][0]):
        return torch.cat([rows_UD.index_select(0, index_L) for rows_UD, index_L in sources], dim=1)
    out: Tensor = _Gather.apply(
        [index_L for _, index_L in sources], *(_as_supported_type(rows_UD) for rows_UD, _ in sources)
    )
    return out


def pool_bags(rows_UD: Tensor, index_L: Tensor, offset_S1: Tensor, weight_L: Tensor | None) -> Tensor:
    """Return [S, D]: the mean of the rows of each bag, 0 if empty; with `weight_L`, the weighted sum. Weights
    get no gradient."""
    if not _has_kernel(rows_UD):
        mode = "mean" if weight_L is None else "sum"
        return F.embedding_bag(
            index_L, rows_UD, offset_S1, mode=mode, per_sample_weights=weight_L, include_last_offset=True
        )
    rows_UD = _as_supported_type(rows_UD)
    if weight_L is None:
        weight_L = rows_UD.new_empty(len(index_L))
        _share(offset_S1.numpy(), weight_L.numpy())
    out: Tensor = _PoolBags.apply(rows_UD, index_L, offset_S1, weight_L)
    return out


def _has_kernel(x: Tensor) -> bool:
    return COMPILED and x.device.type == "cpu"


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, indices: list[Tensor], *tables: Tensor) -> Tensor:
        ctx.indices, ctx.shapes = indices, [rows_UD.shape for rows_UD in tables]
        out_LC = tables[0].new_empty(len(indices[0]), sum(rows_UD.shape[1] for rows_UD in tables))
        column = 0
        for rows_UD, index_L in zip(tables, indices, strict=True):
            _take(as_array(rows_UD), index_L.numpy(), column, out_LC.numpy())
            column += rows_UD.shape[1]
        return out_LC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_LC: Tensor) -> tuple[Tensor | None, ...]:
        out: list[Tensor | None] = [None]
        column, source = 0, as_array(gradient_LC)
        for index_L, shape_UD, needed in zip(ctx.indices, ctx.shapes, ctx.needs_input_grad[1:], strict=True):
            out.append(gradient_LC.new_zeros(shape_UD) if needed else None)
            if needed:
                _add(source, index_L.numpy(), column, out[-1].numpy())  # type: ignore[union-attr]
            column += shape_UD[1]
        return tuple(out)


class _PoolBags(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_UD: Tensor, index_L: Tensor, offset_S1: Tensor, weight_L: Tensor) -> Tensor:
        ctx.entries, ctx.shape = (index_L.numpy(), offset_S1.numpy(), weight_L.numpy()), rows_UD.shape
        out_SD = rows_UD.new_empty(len(offset_S1) - 1, rows_UD.shape[1])
        _pool(as_array(rows_UD), *ctx.entries, out_SD.numpy())
        return out_SD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_SD: Tensor) -> tuple[Tensor | None, ...]:
        out_UD = gradient_SD.new_zeros(ctx.shape)
        _unpool(as_array(gradient_SD), *ctx.entries, out_UD.numpy())
        return out_UD, None, None, None


def _as_supported_type(rows_UD: Tensor) -> Tensor:
    """bfloat16 as float32, because numpy and the kernels do not know bfloat16."""
    return rows_UD.float() if rows_UD.dtype == torch.bfloat16 else rows_UD


@kernel
def _take(rows_UD: np.ndarray, index_L: np.ndarray, column: int, out_LC: np.ndarray) -> None:
    width = rows_UD.shape[1]
    for i in range(len(index_L)):
        for j in range(0, width, LANES):
            store(out_LC, i, column + j, width - j, load(rows_UD, index_L[i], j, width - j, 0.0))


@kernel
def _add(gradient_LC: np.ndarray, index_L: np.ndarray, column: int, out_UD: np.ndarray) -> None:
    """Backward pass of `_take`."""
    width = out_UD.shape[1]
    for i in range(len(index_L)):
        for j in range(0, width, LANES):
            added = load(gradient_LC, i, column + j, width - j, 0.0)
            before = load(out_UD, index_L[i], j, width - j, 0.0)
            store(out_UD, index_L[i], j, width - j, fused(added, spread(added, 1.0), before))


@kernel
def _share(offset_S1: np.ndarray, out_L: np.ndarray) -> None:
    """Share of each entry in the mean of its bag."""
    for s in range(len(offset_S1) - 1):
        for i in range(offset_S1[s], offset_S1[s + 1]):
            out_L[i] = 1 / (offset_S1[s + 1] - offset_S1[s])


@kernel
def _pool(
    rows_UD: np.ndarray, index_L: np.ndarray, offset_S1: np.ndarray, weight_L: np.ndarray, out_SD: np.ndarray
) -> None:
    width = rows_UD.shape[1]
    for s in range(len(offset_S1) - 1):
        for j in range(0, width, LANES):
            total = spread(load(out_SD, s, j, 0, 0.0), 0.0)
            for i in range(offset_S1[s], offset_S1[s + 1]):
                total = fused(load(rows_UD, index_L[i], j, width - j, 0.0), spread(total, weight_L[i]), total)
            store(out_SD, s, j, width - j, total)


@kernel
def _unpool(
    gradient_SD: np.ndarray,
    index_L: np.ndarray,
    offset_S1: np.ndarray,
    weight_L: np.ndarray,
    out_UD: np.ndarray,
) -> None:
    """Backward pass of `_pool`."""
    width = out_UD.shape[1]
    for s in range(len(offset_S1) - 1):
        for j in range(0, width, LANES):
            gradient = load(gradient_SD, s, j, width - j, 0.0)
            for i in range(offset_S1[s], offset_S1[s + 1]):
                row = load(out_UD, index_L[i], j, width - j, 0.0)
                store(out_UD, index_L[i], j, width - j, fused(gradient, spread(row, weight_L[i]), row))


def precompile() -> None:
    """Compile the kernels into numba's cache."""
    rows_UD, index_L = torch.ones(2, 1, requires_grad=True), torch.tensor([0, 1])
    gather_rows([(rows_UD, index_L)]).sum().backward()  # type: ignore[no-untyped-call]
    pool_bags(rows_UD, index_L, index_L, None).sum().backward()  # type: ignore[no-untyped-call]
