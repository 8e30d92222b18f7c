"""HSTU's pointwise attention (Zhai et al. 2024, "Actions speak louder than words", §3.2).

    A V, with A = SiLU(Q Kᵀ + b_pos[position of j - position of i] + b_time[bucket of (i, j)]) / N_fixed ⊙ M

There is no softmax, so the intensity of a preference counts, not only its share. N_fixed is a constant, never
the longest sequence of a batch, so a request's result depends on no other.

`pointwise_attention` is plain torch on padded matrices. `attention_in_place` gives the same on a CPU without
padding, for models without times:

    s_ij = q_i · k_j + b[pos_j - pos_i]  pos = min(place, h)  a_ij = SiLU(s_ij) / N_fixed if i sees j, else 0
    out = a v   dv = aᵀ dout   ds = dout vᵀ ⊙ SiLU'(s) / N_fixed   dq = ds k   dk = dsᵀ q   db[·] = Σ ds

Its backward pass recomputes the scores. Sums follow the order of tokens and sequences, so results are
deterministic.

Letters: S tokens, R sequences, G sequences of a group, N tokens of its longest, I tokens of a sequence (as
queries and as keys), H heads, C width of a head, D = H · C, P position differences, T time buckets.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from roostream.models.embedding_ops import gather_rows
from roostream.models.sequence.jagged_sequences import JaggedSequences, Pairs
from roostream.models.simd import COMPILED, as_array, kernel, product


def pointwise_attention(
    query_key_value_SD3: Tensor,
    sequences: JaggedSequences,
    position_bias_P: Tensor,
    time_bias_T: Tensor | None,
    heads: int,
    divisor: float,
) -> Tensor:
    """[S, 3 · D] → A V, [S, D].

    `position_bias_P`: for position differences -(P // 2) .. P // 2; `time_bias_T`: for time buckets, None =
    no times; both are shared by all heads. `divisor`: N_fixed.
    """
    slots_SD3 = sequences.groups.pad(query_key_value_SD3)
    out = []
    for group, pairs in zip(sequences.groups.groups, sequences.pairs, strict=True):
        g, n = group.shape_GK
        # [G, H, N, C] each
        q, k, v = group.of_slots(slots_SD3).view(g, n, 3, heads, -1).permute(2, 0, 3, 1, 4)
        score_GHNN = (
            torch.matmul(q, k.transpose(-1, -2)) + _bias(pairs, position_bias_P, time_bias_T)[:, None]
        )
        a_GHNN = F.silu(score_GHNN) * (pairs.sees_GNN[:, None].to(score_GHNN.dtype) / divisor)
        out.append(torch.matmul(a_GHNN, v).transpose(1, 2).reshape(g * n, -1))
    if not out:
        return query_key_value_SD3[:, : query_key_value_SD3.shape[1] // 3]
    return sequences.groups.unpad(torch.cat(out))


def _bias(pairs: Pairs, position_bias_P: Tensor, time_bias_T: Tensor | None) -> Tensor:
    """[G, N, N]; its gradient is summed in the order of the pairs (embedding_ops.py)."""
    sources = [(position_bias_P[:, None], (pairs.offset_GNN + len(position_bias_P) // 2).flatten())]
    if time_bias_T is not None and pairs.bucket_GNN is not None:
        sources.append((time_bias_T[:, None], pairs.bucket_GNN.flatten()))
    return gather_rows(sources).sum(dim=1).view(pairs.offset_GNN.shape)


def attention_in_place(
    query_key_value_SD3: Tensor,
    sequences: JaggedSequences,
    position_bias_P: Tensor,
    time_bias_T: Tensor | None,
    heads: int,
    divisor: float,
) -> Tensor:
    """As `pointwise_attention`, which it calls if there are times or no kernel."""
    x_SD3 = query_key_value_SD3
    alike = x_SD3.dtype == position_bias_P.dtype and x_SD3.dtype in (torch.float32, torch.float64)
    if time_bias_T is not None or x_SD3.device.type != "cpu" or not (COMPILED and alike):
        return pointwise_attention(x_SD3, sequences, position_bias_P, time_bias_T, heads, divisor)
    start_R1 = np.concatenate([[0], np.cumsum(sequences.tokens_R)]).astype(np.int64)
    arguments = start_R1, sequences.lengths_R.astype(np.int64), heads, 1.0 / divisor
    out: Tensor = _InPlace.apply(x_SD3, position_bias_P, arguments)
    return out


class _InPlace(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_SD3: Tensor, bias_P: Tensor, arguments: tuple[np.ndarray, np.ndarray, int, float]
    ) -> Tensor:
        ctx.save_for_backward(x_SD3, bias_P)
        ctx.of = arguments
        out_SD = x_SD3.new_empty(len(x_SD3), x_SD3.shape[1] // 3)
        _attend(as_array(x_SD3), as_array(bias_P), *arguments, out_SD.numpy())
        return out_SD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_SD: Tensor) -> tuple[Tensor, Tensor, None]:
        x_SD3, bias_P = ctx.saved_tensors
        dx_SD3, dbias_P = x_SD3.new_empty(x_SD3.shape), bias_P.new_zeros(bias_P.shape)
        _attend_back(
            as_array(x_SD3), as_array(bias_P), *ctx.of, as_array(gradient_SD), dx_SD3.numpy(), dbias_P.numpy()
        )
        return dx_SD3, dbias_P, None


@kernel
def _attend(
    x_SD3: np.ndarray,
    bias_P: np.ndarray,
    start_R1: np.ndarray,
    history_R: np.ndarray,
    heads: int,
    scale: float,
    out_SD: np.ndarray,
) -> None:
    width = x_SD3.shape[1] // (3 * heads)
    square, transposed = _buffers(x_SD3, start_R1, width)
    for r in range(len(history_R)):
        x_ID3, n = x_SD3[start_R1[r] : start_R1[r + 1]], start_R1[r + 1] - start_R1[r]
        s_II, transposed_CI = square[: n * n].reshape(n, n), transposed[: width * n].reshape(width, n)
        for head in range(heads):
            q_IC, k_IC = _part(x_ID3, 0, head, width, heads), _part(x_ID3, 1, head, width, heads)
            v_IC = _part(x_ID3, 2, head, width, heads)
            transposed_CI[:] = k_IC.T
            product(q_IC, transposed_CI, s_II)
            for i in range(n):
                seen = _add_bias(s_II[i], i, history_R[r], bias_P)
                for j in range(n):
                    s = s_II[i, j]
                    s_II[i, j] = scale * s / (1 + math.exp(-s)) if j < seen or j == i else 0.0
            product(s_II, v_IC, _part(out_SD[start_R1[r] : start_R1[r + 1]], 0, head, width, heads))


@kernel
def _attend_back(
    x_SD3: np.ndarray,
    bias_P: np.ndarray,
    start_R1: np.ndarray,
    history_R: np.ndarray,
    heads: int,
    scale: float,
    gradient_SD: np.ndarray,
    dx_SD3: np.ndarray,
    dbias_P: np.ndarray,
) -> None:
    width = x_SD3.shape[1] // (3 * heads)
    square, transposed = _buffers(x_SD3, start_R1, width)
    other, _ = _buffers(x_SD3, start_R1, width)
    for r in range(len(history_R)):
        first, end, h = start_R1[r], start_R1[r + 1], history_R[r]
        x_ID3, dx_ID3, n = x_SD3[first:end], dx_SD3[first:end], end - first
        a_II, s_II = square[: n * n].reshape(n, n), other[: n * n].reshape(n, n)
        transposed_CI = transposed[: width * n].reshape(width, n)
        for head in range(heads):
            q_IC, k_IC = _part(x_ID3, 0, head, width, heads), _part(x_ID3, 1, head, width, heads)
            v_IC = _part(x_ID3, 2, head, width, heads)
            gradient_IC = _part(gradient_SD[first:end], 0, head, width, heads)
            transposed_CI[:] = k_IC.T
            product(q_IC, transposed_CI, a_II)
            transposed_CI[:] = v_IC.T
            product(gradient_IC, transposed_CI, s_II)
            for i in range(n):
                seen = _add_bias(a_II[i], i, h, bias_P)
                for j in range(n):
                    if j < seen or j == i:
                        s = a_II[i, j]
                        p = 1 / (1 + math.exp(-s))
                        a_II[i, j] = scale * s * p
                        s_II[i, j] *= scale * p * (1 + s * (1 - p))
                    else:
                        a_II[i, j] = s_II[i, j] = 0.0
                _back_to_bias(s_II[i], i, h, dbias_P)
            product(s_II, k_IC, _part(dx_ID3, 0, head, width, heads))
            product(s_II.T, q_IC, _part(dx_ID3, 1, head, width, heads))
            product(a_II.T, gradient_IC, _part(dx_ID3, 2, head, width, heads))


@kernel
def _add_bias(s_I: np.ndarray, i: int, h: int, bias_P: np.ndarray) -> int:
    """Add the biases to query i's scores; returns how many of the first keys it sees besides itself."""
    seen, middle = min(i + 1, h), len(bias_P) // 2
    for j in range(seen):
        s_I[j] += bias_P[middle + j - min(i, h)]
    if i >= seen:
        s_I[i] += bias_P[middle]
    return seen


@kernel
def _back_to_bias(ds_I: np.ndarray, i: int, h: int, dbias_P: np.ndarray) -> None:
    """Backward pass of `_add_bias`."""
    seen, middle = min(i + 1, h), len(dbias_P) // 2
    for j in range(seen):
        dbias_P[middle + j - min(i, h)] += ds_I[j]
    if i >= seen:
        dbias_P[middle] += ds_I[i]


@kernel
def _part(x_ID: np.ndarray, part: int, head: int, width: int, heads: int) -> Any:
    """A head's columns of queries (0), keys (1) or values (2)."""
    begin = (part * heads + head) * width
    return x_ID[:, begin : begin + width]


@kernel
def _buffers(like: np.ndarray, start_R1: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Buffers for the pairs and the transposed keys of the longest sequence."""
    longest = 0
    for r in range(len(start_R1) - 1):
        longest = max(longest, start_R1[r + 1] - start_R1[r])
    return np.empty(longest * longest, like.dtype), np.empty(width * longest, like.dtype)
