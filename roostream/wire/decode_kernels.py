"""Kernels that check and fill a batch from noted spans (roostream/wire/proto_kernels.py): each reads only inside them.

Letters: M blocks, P parts, F floats, K list features, S writers' schemas, R samples, N rows out of a side (R or B), T labels.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from roostream.wire.proto_fields import BLOCK, SAMPLE
from roostream.wire.proto_kernels import any_beyond, any_infinite, any_not_above_zero, i64, u32
from roostream.wire.records import MAX_WEIGHT

OK, BAD_SHAPE, NON_FINITE, OVERSIZED, BAD_NUMBER = range(5)
MOST = int(np.float32(MAX_WEIGHT).view(np.uint32))  # non-negative floats are ordered as their bits are
ONE = int(np.float32(1).view(np.uint32))
_FINITE_FLOATS = (
    SAMPLE.labels,
    SAMPLE.propensities,
    SAMPLE.weight,
    SAMPLE.event_values,
    SAMPLE.labels_before,
)


class Plan(NamedTuple):
    """How one side's blocks are read: a row for each schema that wrote some, padded with -1."""

    num_floats_S: np.ndarray  # int64: floats as written
    num_lists_S: np.ndarray
    float_to_SF: np.ndarray  # int64: the reader's index of a written float, -1 = gone
    list_to_SK: np.ndarray
    streams_SK3: np.ndarray  # int64: arrays of a list's length that it puts into ids, weights, times
    max_len_K: np.ndarray  # int64, the reader's


class Blocks(NamedTuple):
    """M blocks of one side, and which rows of them go where."""

    spans_M: np.ndarray  # int64 [M, 7, 2]: fields of Block
    rows_M: np.ndarray  # int64
    select_M: np.ndarray  # int64 [M, 2]: span of the fixed32 rows in use; empty = all
    out_M: np.ndarray  # int64: first row out
    plan_M: np.ndarray  # int64: row of Plan

    def take(self, index: np.ndarray) -> Blocks:
        return Blocks(*(a[index] for a in self))


@njit(cache=True, nogil=True)
def check_parts(
    buf: np.ndarray,
    select_P: np.ndarray,
    rows_P: np.ndarray,
    max_rows: int,
    used_P: np.ndarray,
    status_P: np.ndarray,
) -> None:
    """Number of rows in use; the selected ones must ascend and lie in the block."""
    for p in range(len(rows_P)):
        selected_rows = (select_P[p, 1] - select_P[p, 0]) // 4
        used_P[p] = selected_rows if selected_rows else rows_P[p]
        if rows_P[p] > max_rows:
            status_P[p] = OVERSIZED
        elif selected_rows:
            last = np.int64(-1)
            for at in range(select_P[p, 0], select_P[p, 1], 4):
                row = u32(buf, at)
                if row <= last or row >= rows_P[p]:
                    status_P[p] = BAD_SHAPE
                last = row


@njit(cache=True, nogil=True)
def check_sample(buf: np.ndarray, spans: np.ndarray, labels: int, used: int, max_candidates: int) -> int:
    """A status: column lengths agree with the candidates, events with each other, numbers are finite and in bounds."""
    size = spans[:, 1] - spans[:, 0]
    n = size[SAMPLE.item_ids] // 8
    if n > max_candidates:
        return OVERSIZED
    if used != n or size[SAMPLE.labels] != 4 * n * labels:
        return BAD_SHAPE
    if size[SAMPLE.labels_before] and size[SAMPLE.labels_before] != 4 * n * labels:
        return BAD_SHAPE
    if size[SAMPLE.scores] and size[SAMPLE.scores] != 4 * n * labels:
        return BAD_SHAPE
    for number in (SAMPLE.positions, SAMPLE.propensities):
        if size[number] and size[number] != 4 * n:
            return BAD_SHAPE
    if not has_event_shape(buf, spans, n):
        return BAD_SHAPE
    for at in range(spans[SAMPLE.positions, 0], spans[SAMPLE.positions, 1], 4):
        if u32(buf, at) > 0x7FFFFFFF:
            return BAD_SHAPE
    for number in _FINITE_FLOATS:
        if any_infinite(buf, spans[number], True):
            return NON_FINITE
    if any_infinite(buf, spans[SAMPLE.scores], False):
        return NON_FINITE
    return OK if has_bounds(buf, spans) else BAD_NUMBER


@njit(cache=True, nogil=True)
def has_bounds(buf: np.ndarray, spans: np.ndarray) -> bool:
    """Whether the weight lies in 0..MAX_WEIGHT, 0 being none given, and propensities in (0, 1]; all of them are finite."""
    weight, propensities = spans[SAMPLE.weight], spans[SAMPLE.propensities]
    if weight[1] > weight[0] and u32(buf, weight[0]) & 0x7FFFFFFF and any_not_above_zero(buf, weight):
        return False
    return not (
        any_beyond(buf, weight, MOST)
        or any_beyond(buf, propensities, ONE)
        or any_not_above_zero(buf, propensities)
    )


@njit(cache=True, nogil=True)
def has_event_shape(buf: np.ndarray, spans: np.ndarray, n: int) -> bool:
    """Whether the columns of events agree with each other, with the `n` candidates and with the actions."""
    size = spans[:, 1] - spans[:, 0]
    events = size[SAMPLE.event_ids] // 8
    if size[SAMPLE.event_times] != 8 * events:
        return False
    for number in (SAMPLE.event_candidates, SAMPLE.event_actions, SAMPLE.event_values):
        if size[number] != 4 * events:
            return False
    candidates, actions = spans[SAMPLE.event_candidates, 0], spans[SAMPLE.event_actions, 0]
    for e in range(events):
        if u32(buf, candidates + 4 * e) >= n or u32(buf, actions + 4 * e) >= spans[SAMPLE.actions, 1]:
            return False
    return True


@njit(cache=True, nogil=True)
def check_samples(
    buf: np.ndarray,
    spans_N: np.ndarray,
    labels_N: np.ndarray,
    used_N: np.ndarray,
    max_candidates: int,
    status_N: np.ndarray,
) -> None:
    for n in range(len(spans_N)):
        if status_N[n] == OK:
            status_N[n] = check_sample(buf, spans_N[n], labels_N[n], used_N[n], max_candidates)


@njit(cache=True, nogil=True)
def is_given(spans: np.ndarray, number: int) -> bool:
    return spans[number, 1] > spans[number, 0]


@njit(cache=True, nogil=True)
def is_missing(buf: np.ndarray, span: np.ndarray, bit: int) -> bool:
    at = span[0] + (bit >> 3)
    return at < span[1] and (buf[at] >> (bit & 7)) & 1 == 1


@njit(cache=True, nogil=True)
def is_blank(spans: np.ndarray) -> bool:
    """A block without columns: every feature is missing."""
    for number in BLOCK:
        if is_given(spans, number):
            return False
    return True


@njit(cache=True, nogil=True)
def check_block(buf: np.ndarray, spans: np.ndarray, rows: int, plan: Plan, s: int, max_list: int) -> int:
    """The status that `roostream.wire.columns.check_columns` gives: two statements of one rule (that one says which number was wrong,
    this one is fast); tests/wire/test_decode.py holds them equal on damaged blocks."""
    if is_blank(spans):
        return OK
    lists = plan.num_lists_S[s]
    size = spans[:, 1] - spans[:, 0]
    if size[BLOCK.floats] != 4 * rows * plan.num_floats_S[s] or size[BLOCK.lengths] != 4 * rows * lists:
        return BAD_SHAPE
    if size[BLOCK.missing] > (rows * lists + 7) // 8:
        return BAD_SHAPE
    ids, weights, times, conflict = np.int64(0), np.int64(0), np.int64(0), False
    for i in range(rows * lists):
        length = u32(buf, spans[BLOCK.lengths, 0] + 4 * i)
        if length > max_list:
            return OVERSIZED
        conflict = conflict or (length > 0 and is_missing(buf, spans[BLOCK.missing], i))
        streams = plan.streams_SK3[s, i % lists]
        ids += length * streams[0]
        weights += length * streams[1]
        times += length * streams[2]
    if (
        conflict
        or size[BLOCK.ids] != 8 * ids
        or size[BLOCK.weights] != 4 * weights
        or size[BLOCK.times] != 8 * times
    ):
        return BAD_SHAPE
    if any_infinite(buf, spans[BLOCK.floats], False) or any_infinite(buf, spans[BLOCK.weights], True):
        return NON_FINITE
    return BAD_NUMBER if any_beyond(buf, spans[BLOCK.weights], MOST) else OK


@njit(cache=True, nogil=True)
def check_blocks(buf: np.ndarray, blocks: Blocks, plan: Plan, max_list: int, status_M: np.ndarray) -> None:
    for m in range(len(blocks.rows_M)):
        if status_M[m] == OK:
            status_M[m] = check_block(
                buf, blocks.spans_M[m], blocks.rows_M[m], plan, blocks.plan_M[m], max_list
            )


@njit(cache=True, nogil=True)
def selected(buf: np.ndarray, select: np.ndarray, row: int, taken: int) -> bool:
    """Whether `row` is in use, `taken` rows before it being."""
    at = select[0] + 4 * taken
    return select[1] == select[0] or (at < select[1] and u32(buf, at) == row)


@njit(cache=True, nogil=True)
def fill_rows(
    buf: np.ndarray,
    blocks: Blocks,
    plan: Plan,
    float_NF: np.ndarray,
    present_NF: np.ndarray,
    lengths_KN: np.ndarray,
    present_KN: np.ndarray,
) -> None:
    """Floats (uint32 bits, prefilled with the defaults), list lengths (cut to max_len) and presence of checked blocks."""
    for m in range(len(blocks.rows_M)):
        spans, s, taken = blocks.spans_M[m], blocks.plan_M[m], 0
        if is_blank(spans):
            continue
        floats, lists = plan.num_floats_S[s], plan.num_lists_S[s]
        for row in range(blocks.rows_M[m]):
            if not selected(buf, blocks.select_M[m], row, taken):
                continue
            b = blocks.out_M[m] + taken
            taken += 1
            for f in range(floats):
                bits, to = u32(buf, spans[BLOCK.floats, 0] + 4 * (row * floats + f)), plan.float_to_SF[s, f]
                if to >= 0 and bits & 0x7FFFFFFF <= 0x7F800000:
                    float_NF[b, to] = bits
                    present_NF[b, to] = True
            for k in range(lists):
                to = plan.list_to_SK[s, k]
                if to >= 0:
                    lengths_KN[to, b] = min(
                        u32(buf, spans[BLOCK.lengths, 0] + 4 * (row * lists + k)), plan.max_len_K[to]
                    )
                    present_KN[to, b] = not is_missing(buf, spans[BLOCK.missing], row * lists + k)


class Lists(NamedTuple):
    """Where list entries go: feature `k` of row b at starts_KN[k, b] of values and weights, and at the same place after
    the start of feature k, from base_KC[k, c], of its column c (ids columns, then time columns)."""

    lengths_KN: np.ndarray  # int32
    starts_KN: np.ndarray  # int64
    base_KC: np.ndarray  # int64
    values: np.ndarray  # int64
    weights: np.ndarray  # uint32 bits
    columns: np.ndarray  # int64


@njit(cache=True, nogil=True)
def fill_lists(buf: np.ndarray, blocks: Blocks, plan: Plan, out: Lists) -> None:
    """Entries of checked blocks' lists."""
    for m in range(len(blocks.rows_M)):
        spans, s, taken = blocks.spans_M[m], blocks.plan_M[m], 0
        if is_blank(spans):
            continue
        lists = plan.num_lists_S[s]
        at_ids, at_weights, at_times = spans[BLOCK.ids, 0], spans[BLOCK.weights, 0], spans[BLOCK.times, 0]
        for row in range(blocks.rows_M[m]):
            use = selected(buf, blocks.select_M[m], row, taken)
            b = blocks.out_M[m] + taken
            taken += use
            for k in range(lists):
                length, streams = (
                    u32(buf, spans[BLOCK.lengths, 0] + 4 * (row * lists + k)),
                    plan.streams_SK3[s, k],
                )
                if use and plan.list_to_SK[s, k] >= 0:
                    fill_list(
                        buf, at_ids, at_weights, at_times, length, streams, out, plan.list_to_SK[s, k], b
                    )
                at_ids += 8 * length * streams[0]
                at_weights += 4 * length * streams[1]
                at_times += 8 * length * streams[2]


@njit(cache=True, nogil=True)
def fill_list(
    buf: np.ndarray,
    ids: int,
    weights: int,
    times: int,
    length: int,
    streams: np.ndarray,
    out: Lists,
    k: int,
    b: int,
) -> None:
    """One list's entries, the first `lengths_KN[k, b]` of `length`."""
    keep, start = out.lengths_KN[k, b], out.starts_KN[k, b]
    copy_i64(buf, ids, keep, out.values, start)
    if streams[1]:
        for i in range(keep):
            out.weights[start + i] = u32(buf, weights + 4 * i)
    place = start - out.starts_KN[k, 0]
    for c in range(streams[0] - 1):
        copy_i64(buf, ids + 8 * length * (c + 1), keep, out.columns, out.base_KC[k, c] + place)
    for c in range(streams[2]):
        copy_i64(buf, times + 8 * length * c, keep, out.columns, out.base_KC[k, streams[0] - 1 + c] + place)


@njit(cache=True, nogil=True)
def copy_i64(buf: np.ndarray, at: int, count: int, out: np.ndarray, start: int) -> None:
    for i in range(count):
        out[start + i] = i64(buf, at + 8 * i)


class Candidates(NamedTuple):
    """Per-candidate columns out, prefilled with what absent ones mean; floats as uint32 bits."""

    item_B: np.ndarray
    label_BT: np.ndarray
    before_BT: np.ndarray
    weight_BT: np.ndarray
    score_BT: np.ndarray
    position_B: np.ndarray
    propensity_B: np.ndarray


@njit(cache=True, nogil=True)
def fill_candidates(
    buf: np.ndarray,
    spans_R: np.ndarray,
    weight_R: np.ndarray,
    label_to_RT: np.ndarray,
    out_R: np.ndarray,
    out: Candidates,
) -> None:
    """Columns of checked samples; `label_to_RT` (writer's label → reader's, -1 = gone, -2 = none)."""
    for r in range(len(spans_R)):
        spans, start = spans_R[r], spans_R[r, :, 0]
        labels = 0
        while labels < label_to_RT.shape[1] and label_to_RT[r, labels] > -2:
            labels += 1
        for i in range((spans[SAMPLE.item_ids, 1] - spans[SAMPLE.item_ids, 0]) // 8):
            b = out_R[r] + i
            out.item_B[b] = i64(buf, start[SAMPLE.item_ids] + 8 * i)
            if is_given(spans, SAMPLE.positions):
                out.position_B[b] = u32(buf, start[SAMPLE.positions] + 4 * i)
            if is_given(spans, SAMPLE.propensities):
                out.propensity_B[b] = u32(buf, start[SAMPLE.propensities] + 4 * i)
            for t in range(labels):
                at, to = 4 * (i * labels + t), label_to_RT[r, t]
                if to < 0:
                    continue
                out.weight_BT[b, to] = weight_R[r]
                out.label_BT[b, to] = u32(buf, start[SAMPLE.labels] + at)
                if is_given(spans, SAMPLE.labels_before):
                    out.before_BT[b, to] = u32(buf, start[SAMPLE.labels_before] + at)
                if is_given(spans, SAMPLE.scores):
                    out.score_BT[b, to] = u32(buf, start[SAMPLE.scores] + at)


@njit(cache=True, nogil=True)
def oldest_i64(buf: np.ndarray, spans_N: np.ndarray) -> np.ndarray:
    """Smallest entry of each sfixed64 column; 0 where it is empty."""
    out = np.zeros(len(spans_N), dtype=np.int64)
    for n in range(len(spans_N)):
        for at in range(spans_N[n, 0], spans_N[n, 1], 8):
            if at == spans_N[n, 0] or i64(buf, at) < out[n]:
                out[n] = i64(buf, at)
    return out
