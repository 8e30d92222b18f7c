# mypy: disable-error-code="no-untyped-def, no-untyped-call"
"""HSTU's pointwise attention on jagged sequences, as Triton kernels: what `trainer/device/hstu_attention.py`
calls.

Of one sequence and head, tokens i (queries) and j (keys), h entries of history and targets behind them
(models/sequence):

    s_ij = q_i · k_j + b_pos[pos_j - pos_i + P / 2] + b_time[bucket(|gap_j - next_i|)], pos = min(place, h)
    a_ij = SiLU(s_ij) / N_fixed where i sees j (j < h and j <= i, or j = i), else 0
    o_i  = Σ_j a_ij v_j

    dv_j = Σ_i a_ij do_i       ds_ij = (do_i · v_j) SiLU'(s_ij) / N_fixed       dq_i = Σ_j ds_ij k_j
                               dk_j = Σ_i ds_ij q_i
    db_pos[·], db_time[·] = Σ ds_ij of the pairs that have it

Keys of the history are taken block by block; a target's pair with itself is one product a row, so that a
target's key and value have their whole gradient there, and no gradient of a token needs an atomic addition.
Those of biases do: their last bits depend on the order of arrival. Products are in the type of q, k and v
(float32: not TF32), everything else is float32.

Letters: M queries and N keys of a block, C width of a head.
"""

import triton
import triton.language as tl


@triton.jit
def _bucket(gap, step_ptr, NUM_STEPS: tl.constexpr):
    """How many of the steps (int64, rising) are at most `gap` (int64, at least 0): a logarithm, put right by
    its neighbours."""
    seconds = tl.maximum(gap.to(tl.float32) / 1000.0, 1.0)
    near = (tl.log(seconds) / 0.301).to(tl.int32)
    near = tl.minimum(tl.maximum(near, 0), NUM_STEPS)
    below = tl.load(step_ptr + tl.maximum(near - 1, 0))
    near = tl.where((near > 0) & (gap < below), near - 1, near)
    above = tl.load(step_ptr + tl.minimum(near, NUM_STEPS - 1))
    return tl.where((near < NUM_STEPS) & (gap >= above), near + 1, near)


@triton.jit
def _rows(base_ptr, start, row_M, c_C, seen_M, stride, column, width):
    """[M, C] of a matrix with `stride`, from `column` on; 0 where there is nothing."""
    at = base_ptr + (start + row_M)[:, None] * stride + column + c_C[None, :]
    return tl.load(at, mask=seen_M[:, None] & (c_C < width)[None, :], other=0.0)


@triton.jit
def _put(base_ptr, start, row_M, c_C, seen_M, stride, column, width, x_MC):
    at = base_ptr + (start + row_M)[:, None] * stride + column + c_C[None, :]
    tl.store(at, x_MC.to(base_ptr.dtype.element_ty), mask=seen_M[:, None] & (c_C < width)[None, :])


@triton.jit
def _wide(x, WIDE: tl.constexpr):
    if WIDE:
        x = x.to(tl.float32)
    return x


@triton.jit
def _silu(s):
    return s / (1.0 + tl.exp(-s))


@triton.jit
def _silu_slope(s):
    p = 1.0 / (1.0 + tl.exp(-s))
    return p * (1.0 + s * (1.0 - p))


@triton.jit
def _bias(
    i_M, j_N, h, next_M, gap_N, pair_MN, pos_ptr, half, time_ptr, step_ptr,
    TIMES: tl.constexpr, NUM_STEPS: tl.constexpr,
):  # fmt: skip
    """float32 [M, N], and where its parts are read: 0 for pairs that aren't seen."""
    offset_MN = tl.where(pair_MN, tl.minimum(j_N, h)[None, :] - tl.minimum(i_M, h)[:, None] + half, 0)
    bias_MN = tl.load(pos_ptr + offset_MN).to(tl.float32)
    bucket_MN = offset_MN * 0
    if TIMES:
        bucket_MN = tl.where(
            pair_MN, _bucket(tl.abs(gap_N[None, :] - next_M[:, None]), step_ptr, NUM_STEPS), 0
        )
        bias_MN += tl.load(time_ptr + bucket_MN).to(tl.float32)
    return bias_MN, offset_MN, bucket_MN


@triton.jit
def _itself(
    q_MC, k_MC, i_M, next_M, gap_M, alone_M, pos_ptr, half, time_ptr, step_ptr,
    TIMES: tl.constexpr, NUM_STEPS: tl.constexpr,
):  # fmt: skip
    """A target's score with itself, [M], and the bucket of its time."""
    s_M = tl.sum(q_MC.to(tl.float32) * k_MC.to(tl.float32), axis=1) + tl.load(pos_ptr + half).to(tl.float32)
    bucket_M = i_M * 0
    if TIMES:
        bucket_M = tl.where(alone_M, _bucket(tl.abs(gap_M - next_M), step_ptr, NUM_STEPS), 0)
        s_M += tl.load(time_ptr + bucket_M).to(tl.float32)
    return s_M, bucket_M


@triton.jit
def forward_kernel(
    x_ptr, out_ptr, offset_ptr, history_ptr, gap_ptr, next_ptr, pos_ptr, time_ptr, step_ptr,
    half, num_blocks, width, scale,
    HEADS: tl.constexpr, TIMES: tl.constexpr, NUM_STEPS: tl.constexpr, WIDE: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Grid: (sequences · blocks of queries, heads). `x`: [S, 3 · HEADS · width], `out`: [S, HEADS ·
    width]."""
    sequence, block, head = tl.program_id(0) // num_blocks, tl.program_id(0) % num_blocks, tl.program_id(1)
    start = tl.load(offset_ptr + sequence)
    n = (tl.load(offset_ptr + sequence + 1) - start).to(tl.int32)
    h = tl.load(history_ptr + sequence).to(tl.int32)
    d, c_C = HEADS * width, tl.arange(0, C)
    i_M = block * M + tl.arange(0, M)
    there_M = i_M < n
    q_MC = _rows(x_ptr, start, i_M, c_C, there_M, 3 * d, head * width, width)
    next_M = tl.load(next_ptr + start + i_M, mask=there_M & TIMES, other=0)
    out_MC = tl.zeros((M, C), dtype=tl.float32)
    end = tl.where(block * M < n, tl.minimum(h, block * M + M), 0)
    for first in range(0, end, N):
        j_N = first + tl.arange(0, N)
        key_N = j_N < h
        k_NC = _rows(x_ptr, start, j_N, c_C, key_N, 3 * d, d + head * width, width)
        v_NC = _rows(x_ptr, start, j_N, c_C, key_N, 3 * d, 2 * d + head * width, width)
        gap_N = tl.load(gap_ptr + start + j_N, mask=key_N & TIMES, other=0)
        pair_MN = there_M[:, None] & key_N[None, :] & (j_N[None, :] <= i_M[:, None])
        bias_MN, _, _ = _bias(
            i_M, j_N, h, next_M, gap_N, pair_MN, pos_ptr, half, time_ptr, step_ptr, TIMES, NUM_STEPS
        )
        s_MN = tl.dot(_wide(q_MC, WIDE), tl.trans(_wide(k_NC, WIDE)), input_precision="ieee") + bias_MN
        a_MN = tl.where(pair_MN, _silu(s_MN) * scale, 0.0)
        out_MC += tl.dot(_wide(a_MN.to(v_NC.dtype), WIDE), _wide(v_NC, WIDE), input_precision="ieee")
    alone_M = there_M & (i_M >= h)
    k_MC = _rows(x_ptr, start, i_M, c_C, alone_M, 3 * d, d + head * width, width)
    v_MC = _rows(x_ptr, start, i_M, c_C, alone_M, 3 * d, 2 * d + head * width, width)
    gap_M = tl.load(gap_ptr + start + i_M, mask=alone_M & TIMES, other=0)
    s_M, _ = _itself(
        q_MC, k_MC, i_M, next_M, gap_M, alone_M, pos_ptr, half, time_ptr, step_ptr, TIMES, NUM_STEPS
    )
    out_MC += tl.where(alone_M, _silu(s_M) * scale, 0.0)[:, None] * v_MC.to(tl.float32)
    _put(out_ptr, start, i_M, c_C, there_M, d, head * width, width, out_MC)


@triton.jit
def query_kernel(
    x_ptr, do_ptr, dx_ptr, dpos_ptr, dtime_ptr, offset_ptr, history_ptr, gap_ptr, next_ptr, pos_ptr, time_ptr,
    step_ptr, half, num_blocks, width, scale,
    HEADS: tl.constexpr, TIMES: tl.constexpr, NUM_STEPS: tl.constexpr, WIDE: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Gradients of queries, of biases, and of targets' keys and values. Grid as `forward_kernel`."""
    sequence, block, head = tl.program_id(0) // num_blocks, tl.program_id(0) % num_blocks, tl.program_id(1)
    start = tl.load(offset_ptr + sequence)
    n = (tl.load(offset_ptr + sequence + 1) - start).to(tl.int32)
    h = tl.load(history_ptr + sequence).to(tl.int32)
    d, c_C = HEADS * width, tl.arange(0, C)
    i_M = block * M + tl.arange(0, M)
    there_M = i_M < n
    q_MC = _rows(x_ptr, start, i_M, c_C, there_M, 3 * d, head * width, width)
    do_MC = _rows(do_ptr, start, i_M, c_C, there_M, d, head * width, width)
    next_M = tl.load(next_ptr + start + i_M, mask=there_M & TIMES, other=0)
    dq_MC = tl.zeros((M, C), dtype=tl.float32)
    end = tl.where(block * M < n, tl.minimum(h, block * M + M), 0)
    for first in range(0, end, N):
        j_N = first + tl.arange(0, N)
        key_N = j_N < h
        k_NC = _rows(x_ptr, start, j_N, c_C, key_N, 3 * d, d + head * width, width)
        v_NC = _rows(x_ptr, start, j_N, c_C, key_N, 3 * d, 2 * d + head * width, width)
        gap_N = tl.load(gap_ptr + start + j_N, mask=key_N & TIMES, other=0)
        pair_MN = there_M[:, None] & key_N[None, :] & (j_N[None, :] <= i_M[:, None])
        bias_MN, offset_MN, bucket_MN = _bias(
            i_M, j_N, h, next_M, gap_N, pair_MN, pos_ptr, half, time_ptr, step_ptr, TIMES, NUM_STEPS
        )
        s_MN = tl.dot(_wide(q_MC, WIDE), tl.trans(_wide(k_NC, WIDE)), input_precision="ieee") + bias_MN
        da_MN = tl.dot(_wide(do_MC, WIDE), tl.trans(_wide(v_NC, WIDE)), input_precision="ieee")
        ds_MN = tl.where(pair_MN, da_MN * _silu_slope(s_MN) * scale, 0.0)
        dq_MC += tl.dot(_wide(ds_MN.to(k_NC.dtype), WIDE), _wide(k_NC, WIDE), input_precision="ieee")
        tl.atomic_add(dpos_ptr + offset_MN, ds_MN, mask=pair_MN)
        if TIMES:
            tl.atomic_add(dtime_ptr + bucket_MN, ds_MN, mask=pair_MN)
    alone_M = there_M & (i_M >= h)
    k_MC = _rows(x_ptr, start, i_M, c_C, alone_M, 3 * d, d + head * width, width).to(tl.float32)
    v_MC = _rows(x_ptr, start, i_M, c_C, alone_M, 3 * d, 2 * d + head * width, width).to(tl.float32)
    gap_M = tl.load(gap_ptr + start + i_M, mask=alone_M & TIMES, other=0)
    s_M, bucket_M = _itself(
        q_MC, k_MC, i_M, next_M, gap_M, alone_M, pos_ptr, half, time_ptr, step_ptr, TIMES, NUM_STEPS
    )
    da_M = tl.sum(do_MC.to(tl.float32) * v_MC, axis=1)
    ds_M = tl.where(alone_M, da_M * _silu_slope(s_M) * scale, 0.0)
    a_M = tl.where(alone_M, _silu(s_M) * scale, 0.0)
    tl.atomic_add(dpos_ptr + half + i_M * 0, ds_M, mask=alone_M)
    if TIMES:
        tl.atomic_add(dtime_ptr + bucket_M, ds_M, mask=alone_M)
    dq_MC += ds_M[:, None] * k_MC
    _put(dx_ptr, start, i_M, c_C, there_M, 3 * d, head * width, width, dq_MC)
    dk_MC, dv_MC = ds_M[:, None] * q_MC.to(tl.float32), a_M[:, None] * do_MC.to(tl.float32)
    _put(dx_ptr, start, i_M, c_C, alone_M, 3 * d, d + head * width, width, dk_MC)
    _put(dx_ptr, start, i_M, c_C, alone_M, 3 * d, 2 * d + head * width, width, dv_MC)


@triton.jit
def key_kernel(
    x_ptr, do_ptr, dx_ptr, offset_ptr, history_ptr, gap_ptr, next_ptr, pos_ptr, time_ptr, step_ptr,
    half, num_blocks, width, scale,
    HEADS: tl.constexpr, TIMES: tl.constexpr, NUM_STEPS: tl.constexpr, WIDE: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Gradients of the history's keys and values. Grid: (sequences · blocks of keys, heads)."""
    sequence, block, head = tl.program_id(0) // num_blocks, tl.program_id(0) % num_blocks, tl.program_id(1)
    start = tl.load(offset_ptr + sequence)
    n = (tl.load(offset_ptr + sequence + 1) - start).to(tl.int32)
    h = tl.load(history_ptr + sequence).to(tl.int32)
    d, c_C = HEADS * width, tl.arange(0, C)
    j_N = block * N + tl.arange(0, N)
    key_N = j_N < h
    k_NC = _rows(x_ptr, start, j_N, c_C, key_N, 3 * d, d + head * width, width)
    v_NC = _rows(x_ptr, start, j_N, c_C, key_N, 3 * d, 2 * d + head * width, width)
    gap_N = tl.load(gap_ptr + start + j_N, mask=key_N & TIMES, other=0)
    dk_NC = tl.zeros((N, C), dtype=tl.float32)
    dv_NC = tl.zeros((N, C), dtype=tl.float32)
    end = tl.where(block * N < h, n, 0)
    for first in range(block * N, end, M):
        i_M = first + tl.arange(0, M)
        there_M = i_M < n
        q_MC = _rows(x_ptr, start, i_M, c_C, there_M, 3 * d, head * width, width)
        do_MC = _rows(do_ptr, start, i_M, c_C, there_M, d, head * width, width)
        next_M = tl.load(next_ptr + start + i_M, mask=there_M & TIMES, other=0)
        pair_MN = there_M[:, None] & key_N[None, :] & (j_N[None, :] <= i_M[:, None])
        bias_MN, _, _ = _bias(
            i_M, j_N, h, next_M, gap_N, pair_MN, pos_ptr, half, time_ptr, step_ptr, TIMES, NUM_STEPS
        )
        s_MN = tl.dot(_wide(q_MC, WIDE), tl.trans(_wide(k_NC, WIDE)), input_precision="ieee") + bias_MN
        da_MN = tl.dot(_wide(do_MC, WIDE), tl.trans(_wide(v_NC, WIDE)), input_precision="ieee")
        ds_MN = tl.where(pair_MN, da_MN * _silu_slope(s_MN) * scale, 0.0)
        a_MN = tl.where(pair_MN, _silu(s_MN) * scale, 0.0)
        a_NM, ds_NM = tl.trans(_wide(a_MN.to(do_MC.dtype), WIDE)), tl.trans(_wide(ds_MN.to(q_MC.dtype), WIDE))
        dv_NC += tl.dot(a_NM, _wide(do_MC, WIDE), input_precision="ieee")
        dk_NC += tl.dot(ds_NM, _wide(q_MC, WIDE), input_precision="ieee")
    _put(dx_ptr, start, j_N, c_C, key_N, 3 * d, d + head * width, width, dk_NC)
    _put(dx_ptr, start, j_N, c_C, key_N, 3 * d, 2 * d + head * width, width, dv_NC)
