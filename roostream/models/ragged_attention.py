"""Attention within consecutive segments on a CPU, forward and backward.

Nothing is padded; only the keys of a head are copied, transposed. Probabilities are not kept: the backward
pass recomputes them from the logarithm of the softmax's denominator. Sums follow the order of a segment's
queries and entries, so a segment's results have the same bits in any batch.

    s = q kᵀ / √C     p = softmax(s)     out = p v
    dv = pᵀ dout      dp = dout vᵀ       ds = p ⊙ (dp - Σ p ⊙ dp) / √C      dq = ds k      dk = dsᵀ q

Letters: R segments, Q queries and N entries of all, H heads; I queries and J entries of a segment, C width of
a head. Segment r has the queries starts_Q[r] .. starts_Q[r + 1] and the entries starts_N[r] .. starts_N[r +
1].
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from roostream.models.simd import (
    LANES,
    exponential,
    fused,
    kernel,
    larger,
    largest,
    load,
    product,
    spread,
    store,
    total,
)

QueryKeyValue = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Tensors that contain queries, keys and values: [Q, ...], [N, ...], [N, ...]."""
FirstColumns = tuple[int, int, int]
"""First column of queries, keys and values in those tensors."""
SegmentStarts = tuple[np.ndarray, np.ndarray]
"""starts_Q, starts_N: int64 [R + 1]."""
_QUERY_BLOCK = 32  # queries of a segment: their p stays near the processor, however long a list is


@kernel
def attend_ragged(
    tensors: QueryKeyValue,
    begins: FirstColumns,
    starts: SegmentStarts,
    out_QD: np.ndarray,
    log_QH: np.ndarray,
) -> None:
    """Write the attention output of each query, 0 if its segment has no entry, and the log denominators; D =
    H · C."""
    heads = log_QH.shape[1]
    width = out_QD.shape[1] // heads
    p, transposed = _buffers(out_QD, starts, width, _QUERY_BLOCK)
    for r in range(len(starts[0]) - 1):
        a, b, c, d = starts[0][r], starts[0][r + 1], starts[1][r], starts[1][r + 1]
        transposed_CJ = transposed[: width * (d - c)].reshape(width, d - c)
        for h in range(heads):
            k_JC, v_JC = (
                _head(tensors[1][c:d], begins[1], h, width),
                _head(tensors[2][c:d], begins[2], h, width),
            )
            _transpose(k_JC, transposed_CJ)
            for i in range(a, b, _QUERY_BLOCK):
                end = min(i + _QUERY_BLOCK, b)
                p_IJ = p[: (end - i) * (d - c)].reshape(end - i, d - c)
                product(_head(tensors[0][i:end], begins[0], h, width), transposed_CJ, p_IJ)
                if c < d:
                    _softmax(p_IJ, 1 / math.sqrt(width), log_QH[i:end, h])
                product(p_IJ, v_JC, _head(out_QD[i:end], 0, h, width))


@kernel
def attend_ragged_back(
    tensors: QueryKeyValue,
    begins: FirstColumns,
    starts: SegmentStarts,
    log_QH: np.ndarray,
    gradient_QD: np.ndarray,
    to: QueryKeyValue,
) -> None:
    """Backward pass of `attend_ragged`: writes the gradients of `tensors` into the same columns of `to`."""
    heads = log_QH.shape[1]
    width = gradient_QD.shape[1] // heads
    p, transposed = _buffers(gradient_QD, starts, width, len(gradient_QD))
    s, _ = _buffers(gradient_QD, starts, width, len(gradient_QD))
    for r in range(len(starts[0]) - 1):
        a, b, c, d = starts[0][r], starts[0][r + 1], starts[1][r], starts[1][r + 1]
        p_IJ = p[: (b - a) * (d - c)].reshape(b - a, d - c)
        s_IJ = s[: (b - a) * (d - c)].reshape(b - a, d - c)
        transposed_CJ = transposed[: width * (d - c)].reshape(width, d - c)
        for h in range(heads):
            q_IC = _head(tensors[0][a:b], begins[0], h, width)
            k_JC, v_JC = (
                _head(tensors[1][c:d], begins[1], h, width),
                _head(tensors[2][c:d], begins[2], h, width),
            )
            gradient_IC = _head(gradient_QD[a:b], 0, h, width)
            _transpose(k_JC, transposed_CJ)
            product(q_IC, transposed_CJ, p_IJ)
            _transpose(v_JC, transposed_CJ)
            product(gradient_IC, transposed_CJ, s_IJ)
            _softmax_back(p_IJ, 1 / math.sqrt(width), log_QH[a:b, h], s_IJ)
            product(s_IJ, k_JC, _head(to[0][a:b], begins[0], h, width))
            product(s_IJ.T, q_IC, _head(to[1][c:d], begins[1], h, width))
            product(p_IJ.T, gradient_IC, _head(to[2][c:d], begins[2], h, width))


@kernel
def _head(x: np.ndarray, begin: int, h: int, width: int) -> Any:
    """Columns of a head."""
    return x[:, begin + h * width : begin + (h + 1) * width]


@kernel
def _buffers(
    like: np.ndarray, starts: SegmentStarts, width: int, together: int
) -> tuple[np.ndarray, np.ndarray]:
    """Buffers for probabilities and transposed keys of the largest segment."""
    max_entries, longest = 0, 0
    for r in range(len(starts[0]) - 1):
        num_entries = starts[1][r + 1] - starts[1][r]
        max_entries = max(max_entries, min(starts[0][r + 1] - starts[0][r], together) * num_entries)
        longest = max(longest, num_entries)
    return np.empty(max_entries, like.dtype), np.empty(width * longest, like.dtype)


@kernel
def _transpose(x_JC: np.ndarray, out_CJ: np.ndarray) -> None:
    """out = xᵀ."""
    for j in range(x_JC.shape[0]):
        for c in range(x_JC.shape[1]):
            out_CJ[c, j] = x_JC[j, c]


@kernel
def _softmax(s_IJ: np.ndarray, factor: float, log_I: np.ndarray) -> None:
    """Softmax of each row of factor · s, in place, J > 0."""
    n = s_IJ.shape[1]
    for i in range(s_IJ.shape[0]):
        max_lanes = load(s_IJ, i, 0, n, -np.inf)
        for j in range(LANES, n, LANES):
            max_lanes = larger(load(s_IJ, i, j, n - j, -np.inf), max_lanes)
        top = largest(max_lanes) * factor
        zero, one = spread(max_lanes, 0.0), spread(max_lanes, 1.0)
        scale, below = spread(max_lanes, factor), spread(max_lanes, -top)
        sums = zero
        for j in range(0, n, LANES):
            e = exponential(fused(load(s_IJ, i, j, n - j, -np.inf), scale, below))
            store(s_IJ, i, j, n - j, e)
            sums = fused(e, one, sums)
        everything = total(sums)
        log_I[i] = top + math.log(everything)
        share = spread(max_lanes, 1 / everything)
        for j in range(0, n, LANES):
            store(s_IJ, i, j, n - j, fused(load(s_IJ, i, j, n - j, 0.0), share, zero))


@kernel
def _softmax_back(p_IJ: np.ndarray, factor: float, log_I: np.ndarray, s_IJ: np.ndarray) -> None:
    """`p_IJ`: scores before the factor, replaced by p; `s_IJ`: gradient of p, replaced by that of the
    scores."""
    n = p_IJ.shape[1]
    for i in range(p_IJ.shape[0]):
        none = load(p_IJ, i, 0, 0, 0.0)
        zero, one = spread(none, 0.0), spread(none, 1.0)
        scale, below = spread(none, factor), spread(none, -log_I[i])
        sums = zero
        for j in range(0, n, LANES):
            p = exponential(fused(load(p_IJ, i, j, n - j, -np.inf), scale, below))
            store(p_IJ, i, j, n - j, p)
            sums = fused(p, load(s_IJ, i, j, n - j, 0.0), sums)
        mean = spread(none, -total(sums))
        for j in range(0, n, LANES):
            of_score = fused(
                load(p_IJ, i, j, n - j, 0.0), fused(load(s_IJ, i, j, n - j, 0.0), one, mean), zero
            )
            store(s_IJ, i, j, n - j, fused(of_score, scale, zero))
