"""Interpreter of a tape (tape.py). One kernel computes on a CPU what the modules of a model compute.

Registers are matrices that lie one after the other in one array. An operation reads some columns and writes
some, so nothing is concatenated. Sums run over their index in order, so the result of a row does not depend
on other rows.

Letters: O operations, G registers, N rows of a register (R requests, B candidates or L entries of a
sequence), W its columns, I, K, J rows, inner and columns of a product, U rows of a stack, D their width, F
floats.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from roostream.models.ragged_attention import attend_ragged
from roostream.models.simd import LANES, fused, kernel, larger, load, short_kernel, spread, store, total

LINEAR, CROSS, NORM, BROADCAST, ATTEND_CANDIDATES, ATTEND_HISTORY = range(6)
PLAIN, RELU, ADDED = range(3)
"""What a linear layer does with its sums: writes them, writes the positive ones (ReLU), or adds them to the
output."""
OP, A, A_COLUMN, B, B_COLUMN, TO, TO_COLUMN, WIDTH_IN, WIDTH_OUT, WEIGHT, MODE = range(11)
"""Columns of an operation. A and B: registers read; TO: register written; WEIGHT: start of its weights, or a
sequence number; MODE: one of the modes above, the number of heads, or a third register read."""
_EPS = 1e-5  # of nn.LayerNorm


class RowGroups(NamedTuple):
    """Which rows belong to which request."""

    start_R1: np.ndarray  # int64: a request's candidates
    entry_SR1: np.ndarray  # int64: its entries in each sequence
    request_B: np.ndarray  # int64


@kernel
def run_tape(
    ops_O: np.ndarray, weights: np.ndarray, registers_G3: np.ndarray, rows: RowGroups, x: np.ndarray
) -> None:
    """Run the operations in order on the buffer `x`. `ops_O`: int64 [O, 11]. `registers_G3`: int64, start in
    `x`, rows and columns of each register."""
    for o in range(len(ops_O)):
        op = ops_O[o]
        a, out = _register(x, registers_G3[op[A]]), _register(x, registers_G3[op[TO]])
        a = a[:, op[A_COLUMN] : op[A_COLUMN] + op[WIDTH_IN]]
        out = out[:, op[TO_COLUMN] : op[TO_COLUMN] + op[WIDTH_OUT]]
        if op[OP] == LINEAR:
            size = (op[WIDTH_IN] + 1) * op[WIDTH_OUT]
            weight_KJ = weights[op[WEIGHT] : op[WEIGHT] + size].reshape(op[WIDTH_IN] + 1, op[WIDTH_OUT])
            _linear(a, weight_KJ, op[MODE], out)
        elif op[OP] == CROSS:
            _cross(a, _register(x, registers_G3[op[B]]), _register(x, registers_G3[op[MODE]]), out)
        elif op[OP] == NORM:
            _norm(a, weights[op[WEIGHT] : op[WEIGHT] + 2 * op[WIDTH_IN]].reshape(2, op[WIDTH_IN]), out)
        elif op[OP] == BROADCAST:
            for i in range(len(rows.request_B)):
                for j in range(0, op[WIDTH_IN], LANES):
                    left = op[WIDTH_IN] - j
                    store(out, i, j, left, load(a, rows.request_B[i], j, left, np.float32(0)))
        else:
            log_QH = np.empty((out.shape[0], op[MODE]), np.float32)
            width = op[WIDTH_OUT]
            if op[OP] == ATTEND_CANDIDATES:
                attend_ragged((a, a, a), (0, width, 2 * width), (rows.start_R1, rows.start_R1), out, log_QH)
            else:
                b = _register(x, registers_G3[op[B]])[:, op[B_COLUMN] :]
                starts = (rows.start_R1, rows.entry_SR1[op[WEIGHT]])
                attend_ragged((a, b, b), (0, 0, width), starts, out, log_QH)


@kernel
def _register(x: np.ndarray, place_3: np.ndarray) -> np.ndarray:
    begin, num_rows, width = place_3
    return x[begin : begin + num_rows * width].reshape(num_rows, width)


@kernel
def _linear(a_IK: np.ndarray, weight_KJ: np.ndarray, mode: int, out_IJ: np.ndarray) -> None:
    """Four rows and twice LANES columns at a time, so that eight sums are independent of each other; the last
    row of the weights is the bias."""
    rows, inner, columns = a_IK.shape[0], a_IK.shape[1], out_IJ.shape[1]
    zero = np.float32(0)
    for j in range(0, columns, 2 * LANES):
        next_j = j + LANES
        left, next_left = columns - j, columns - next_j  # of the second lanes perhaps none
        bias, next_bias = (
            load(weight_KJ, inner, j, left, zero),
            load(weight_KJ, inner, next_j, next_left, zero),
        )
        i = 0
        while i + 4 <= rows:
            s0 = s1 = s2 = s3 = bias
            t0 = t1 = t2 = t3 = next_bias
            for k in range(inner):
                b, c = load(weight_KJ, k, j, left, zero), load(weight_KJ, k, next_j, next_left, zero)
                a = spread(b, a_IK[i, k])
                s0, t0 = fused(a, b, s0), fused(a, c, t0)
                a = spread(b, a_IK[i + 1, k])
                s1, t1 = fused(a, b, s1), fused(a, c, t1)
                a = spread(b, a_IK[i + 2, k])
                s2, t2 = fused(a, b, s2), fused(a, c, t2)
                a = spread(b, a_IK[i + 3, k])
                s3, t3 = fused(a, b, s3), fused(a, c, t3)
            _write(out_IJ, i, j, left, mode, s0)
            _write(out_IJ, i + 1, j, left, mode, s1)
            _write(out_IJ, i + 2, j, left, mode, s2)
            _write(out_IJ, i + 3, j, left, mode, s3)
            _write(out_IJ, i, next_j, next_left, mode, t0)
            _write(out_IJ, i + 1, next_j, next_left, mode, t1)
            _write(out_IJ, i + 2, next_j, next_left, mode, t2)
            _write(out_IJ, i + 3, next_j, next_left, mode, t3)
            i += 4
        while i < rows:
            s0, t0 = bias, next_bias
            for k in range(inner):
                b, c = load(weight_KJ, k, j, left, zero), load(weight_KJ, k, next_j, next_left, zero)
                a = spread(b, a_IK[i, k])
                s0, t0 = fused(a, b, s0), fused(a, c, t0)
            _write(out_IJ, i, j, left, mode, s0)
            _write(out_IJ, i, next_j, next_left, mode, t0)
            i += 1


@kernel
def _write(out_IJ: np.ndarray, i: int, j: int, left: int, mode: int, sums: object) -> None:
    if mode == RELU:
        sums = larger(spread(sums, np.float32(0)), sums)
    elif mode == ADDED:
        sums = fused(load(out_IJ, i, j, left, np.float32(0)), spread(sums, np.float32(1)), sums)
    store(out_IJ, i, j, left, sums)


@kernel
def _cross(x0_NW: np.ndarray, y_NW: np.ndarray, x_NW: np.ndarray, out_NW: np.ndarray) -> None:
    """out = x0 ⊙ y + x."""
    width = out_NW.shape[1]
    for i in range(out_NW.shape[0]):
        for j in range(0, width, LANES):
            left = width - j
            zero = np.float32(0)
            x0, x = load(x0_NW, i, j, left, zero), load(x_NW, i, j, left, zero)
            store(out_NW, i, j, left, fused(x0, load(y_NW, i, j, left, zero), x))


@kernel
def _norm(x_NW: np.ndarray, gain_bias_2W: np.ndarray, out_NW: np.ndarray) -> None:
    """nn.LayerNorm of each row."""
    width = x_NW.shape[1]
    zero = np.float32(0)
    for i in range(x_NW.shape[0]):
        nothing = load(x_NW, i, 0, 0, zero)
        sums = nothing
        for j in range(0, width, LANES):
            sums = fused(load(x_NW, i, j, width - j, zero), spread(nothing, np.float32(1)), sums)
        mean = np.float32(total(sums) / np.float32(width))
        squares = nothing
        for j in range(0, width, LANES):
            off = fused(
                load(x_NW, i, j, width - j, mean), spread(nothing, np.float32(1)), spread(nothing, -mean)
            )
            squares = fused(off, off, squares)
        scale = np.float32(1 / math.sqrt(total(squares) / np.float32(width) + np.float32(_EPS)))
        for j in range(0, width, LANES):
            left = width - j
            off = fused(load(x_NW, i, j, left, zero), spread(nothing, np.float32(1)), spread(nothing, -mean))
            of_gain = fused(off, spread(nothing, scale), nothing)
            gain, bias = load(gain_bias_2W, 0, j, left, zero), load(gain_bias_2W, 1, j, left, zero)
            store(out_NW, i, j, left, fused(of_gain, gain, bias))


@short_kernel
def allocate(
    kind_G: np.ndarray,
    width_G: np.ndarray,
    num_candidates_R: np.ndarray,
    lengths_KR: np.ndarray,
    list_S: np.ndarray,
    start_SR1: np.ndarray,
    where_G3: np.ndarray,
) -> int:
    """Place all registers in one array and return its size.

    Writes `start_SR1`, the first candidate of each request and its first entry in each sequence (`list_S`:
    number of the sequence among the lists), and `where_G3`, start, rows and columns of each register.
    `kind_G`: 0 = a row per request, otherwise an index into `start_SR1` plus 1.
    """
    requests = len(num_candidates_R)
    for s in range(len(start_SR1)):
        start_SR1[s, 0] = 0
        for r in range(requests):
            length = lengths_KR[list_S[s - 1], r] if s else num_candidates_R[r]
            start_SR1[s, r + 1] = start_SR1[s, r] + length
    end = 0
    for g in range(len(kind_G)):
        rows = start_SR1[kind_G[g] - 1, requests] if kind_G[g] else requests
        where_G3[g, 0], where_G3[g, 1], where_G3[g, 2] = end, rows, width_G[g]
        end += rows * width_G[g]
    return end


@short_kernel
def write_rows(rows_UD: np.ndarray, index_N: np.ndarray, out_NW: np.ndarray, column: int) -> None:
    """Copy rows by number into the columns from `column` on."""
    width = rows_UD.shape[1]
    for i in range(len(index_N)):
        for j in range(0, width, LANES):
            store(out_NW, i, column + j, width - j, load(rows_UD, index_N[i], j, width - j, np.float32(0)))


@short_kernel
def write_time_buckets(
    table_TD: np.ndarray,
    length_R: np.ndarray,
    asked_ms_R: np.ndarray,
    time_ms_L: np.ndarray,
    step_ms: np.ndarray,
    out_LW: np.ndarray,
    column: int,
) -> None:
    """Vectors of the time bucket of each entry, as in roostream/models/inputs.py."""
    width, i = table_TD.shape[1], 0
    for r in range(len(length_R)):
        for _ in range(length_R[r]):
            # Unsigned, because a signed overflow has no defined result here; numpy wraps, as this does.
            gap_ms = np.int64(np.uint64(asked_ms_R[r]) - np.uint64(time_ms_L[i]))
            bucket = min(np.searchsorted(step_ms, abs(gap_ms), side="right"), len(table_TD) - 1)
            for j in range(0, width, LANES):
                store(out_LW, i, column + j, width - j, load(table_TD, bucket, j, width - j, np.float32(0)))
            i += 1


@short_kernel
def write_pooled_lists(
    rows_UD: np.ndarray,
    index_L: np.ndarray,
    weight_L: np.ndarray,
    lengths: tuple[np.ndarray, np.ndarray],
    lists_M5: np.ndarray,
    registers_G3: np.ndarray,
    x: np.ndarray,
) -> None:
    """All pooled lists of a stack.

    They lie one after the other in `index_L`, and in `weight_L` if any has weights. `lengths`: of both sides,
    int32 [K, N]. `lists_M5`: side, number within the side, whether it has weights, register and column of
    each list.
    """
    begin = 0
    for m in range(len(lists_M5)):
        side, k, weighted, register, column = lists_M5[m]
        length_N = lengths[1][k] if side else lengths[0][k]
        end = begin
        for n in range(len(length_N)):
            end += length_N[n]
        of_list_L = weight_L[begin:end] if weighted else weight_L[:0]
        out = _register(x, registers_G3[register])
        write_pooled(rows_UD, index_L[begin:end], length_N, of_list_L, out, column)
        begin = end


@short_kernel
def write_pooled(
    rows_UD: np.ndarray,
    index_L: np.ndarray,
    length_N: np.ndarray,
    weight_L: np.ndarray,
    out_NW: np.ndarray,
    column: int,
) -> None:
    """The mean of each row's list, 0 if empty; the weighted sum if there are weights."""
    width = rows_UD.shape[1]
    zero = np.float32(0)
    end = 0
    for n in range(len(length_N)):
        begin, end = end, end + length_N[n]
        share = np.float32(1 / max(length_N[n], 1))
        for j in range(0, width, LANES):
            left = width - j
            sums = load(out_NW, n, column + j, 0, zero)
            for i in range(begin, end):
                each = weight_L[i] if len(weight_L) else share
                sums = fused(load(rows_UD, index_L[i], j, left, zero), spread(sums, each), sums)
            store(out_NW, n, column + j, left, sums)


@short_kernel
def write_floats(
    float_NF: np.ndarray, present_NF: np.ndarray, present_KN: np.ndarray, out_NW: np.ndarray, column: int
) -> None:
    """Floats, then presence of the declared floats, then presence of the lists."""
    for n in range(len(float_NF)):
        at = column
        for f in range(float_NF.shape[1]):
            out_NW[n, at + f] = float_NF[n, f]
        at += float_NF.shape[1]
        for f in range(present_NF.shape[1]):
            out_NW[n, at + f] = np.float32(present_NF[n, f])
        at += present_NF.shape[1]
        for k in range(len(present_KN)):
            out_NW[n, at + k] = np.float32(present_KN[k, n])
