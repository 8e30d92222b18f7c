"""Compiled loops of Slipstream, one entry after another: which hot rows requests read, and what that makes of each request.

Letters: K features, N their rows (requests or candidates), R requests, S slots, L entries, H hot rows, I requests that are kept.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from roostream.wire.lookup import slot_of


@njit(cache=True, nogil=True)
def find_slots(
    value_L: np.ndarray,
    length_KN: np.ndarray,
    table_K: np.ndarray,
    request_N: np.ndarray,
    slots_C: np.ndarray,
    table_H: np.ndarray,
    id_H: np.ndarray,
    first: int,
    cold: int,
    request_S: np.ndarray,
    slot_L: np.ndarray,
    row_L: np.ndarray,
    num_slots: int,
    num_entries: int,
) -> tuple[int, int]:
    """Slots of some features behind those that are there already, and how many slots and entries there are then.

    Read:
        value_L, length_KN  ids, by feature and then by row; how many each row has
        table_K             int64: a feature's table; below 0 = none of its entries is asked for
        request_N           int64: a row's request
        slots_C, ..         of the hot rows of one stack, as `roostream.wire.lookup.slot_of` has them; they are called by their number and
                            `first`, and what isn't hot is called `cold`
    Written, from `num_slots` and `num_entries` on, with room for all of them:
        request_S, slot_L, row_L    int64, as in `ReadSlots`
    """
    at = 0
    for k in range(len(length_KN)):
        table = table_K[k]
        for n in range(length_KN.shape[1]):
            length = length_KN[k, n]
            if table >= 0 and length > 0:
                for i in range(at, at + length):
                    found = slots_C[slot_of(slots_C, table_H, id_H, table, value_L[i])]
                    slot_L[num_entries] = num_slots
                    row_L[num_entries] = found + first if found >= 0 else cold
                    num_entries += 1
                request_S[num_slots] = request_N[n]
                num_slots += 1
            at += length
    return num_slots, num_entries


@njit(cache=True, nogil=True)
def judge_slots(
    request_S: np.ndarray,
    slot_L: np.ndarray,
    row_L: np.ndarray,
    s_N: np.ndarray,
    hot_N: np.ndarray,
    T: np.float32,
    alpha: float,
    hot_share: float,
    num_requests: int,
) -> np.ndarray:
    """bool [R]: of which requests the share of slots whose rows are all hot is `hot_share` or more, and that of slots whose rows
    have all moved by `T` at most is `alpha` or more (what isn't hot has moved by ∞). None is one without a slot."""
    count_R3, at = np.zeros((num_requests, 3), np.int64), 0
    for s in range(len(request_S)):
        num_cold = num_moved = 0
        while at < len(slot_L) and slot_L[at] == s:
            n = row_L[at]
            num_cold += not hot_N[n]
            num_moved += not (s_N[n] if hot_N[n] else np.float32(np.inf)) <= T
            at += 1
        of = count_R3[request_S[s]]
        of[0] += 1
        of[1] += num_cold == 0
        of[2] += num_moved == 0
    out_R = np.empty(num_requests, np.bool_)
    for r in range(num_requests):
        num, num_hot, num_stale = count_R3[r]
        out_R[r] = (
            num > 0
            and num_hot >= np.ceil(hot_share * num - 1e-9)
            and num_stale >= np.ceil(alpha * num - 1e-9)
        )
    return out_R


@njit(cache=True, nogil=True)
def smallest(request_S: np.ndarray, s_S: np.ndarray, nth_R: np.ndarray) -> np.ndarray:
    """float32 [R]: of each request the nth smallest of its slots' `s_S`, `nth_R` (int64) counted from 0; ∞ of one that has no
    slots."""
    ends_R = np.zeros(len(nth_R), np.int64)
    for r in request_S:
        ends_R[r] += 1
    ends_R = np.cumsum(ends_R)
    place_R, ordered_S = ends_R.copy(), np.empty_like(s_S)
    for s in range(len(s_S)):
        place_R[request_S[s]] -= 1
        ordered_S[place_R[request_S[s]]] = s_S[s]
    out_R = np.full(len(nth_R), np.float32(np.inf), np.float32)
    for r in range(len(nth_R)):
        if place_R[r] < ends_R[r]:
            out_R[r] = np.sort(ordered_S[place_R[r] : ends_R[r]])[nth_R[r]]
    return out_R


@njit(cache=True, nogil=True)
def take_requests(
    request_S: np.ndarray, slot_L: np.ndarray, row_L: np.ndarray, kept_R: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The slots of the requests `kept_R` (bool), request by request, those of a request in their order: int32, how many each has
    [I], how many entries each of those has [S], and the rows of these [L]."""
    num_R, entries_R = np.zeros(len(kept_R), np.int64), np.zeros(len(kept_R), np.int64)
    size_S = np.zeros(len(request_S), np.int32)
    for s in slot_L:
        size_S[s] += 1
    for s in range(len(request_S)):
        num_R[request_S[s]] += 1
        entries_R[request_S[s]] += size_S[s]
    num_I, slot_at_R, entry_at_R = (
        np.empty(kept_R.sum(), np.int32),
        np.empty_like(num_R),
        np.empty_like(num_R),
    )
    num_inputs = num_slots = num_entries = 0
    for r in range(len(kept_R)):
        if kept_R[r]:
            num_I[num_inputs], slot_at_R[r], entry_at_R[r] = num_R[r], num_slots, num_entries
            num_inputs, num_slots, num_entries = (
                num_inputs + 1,
                num_slots + num_R[r],
                num_entries + entries_R[r],
            )
    kept_S, kept_L, at = np.empty(num_slots, np.int32), np.empty(num_entries, np.int32), 0
    for s in range(len(request_S)):
        r, size = request_S[s], size_S[s]
        if kept_R[r]:
            kept_S[slot_at_R[r]] = size
            for i in range(size):
                kept_L[entry_at_R[r] + i] = row_L[at + i]
            slot_at_R[r] += 1
            entry_at_R[r] += size
        at += size
    return num_I, kept_S, kept_L


def precompile() -> None:
    """Compile the kernels into numba's cache."""
    one, request_S, slot_L, row_L = np.ones(1, np.int64), *(np.zeros(1, np.int64) for _ in range(3))
    slots_C, table_H, id_H = np.full(2, -1, np.int32), np.zeros(0, np.uint32), np.zeros(0, np.int64)
    table_K, request_N = np.zeros(1, np.int64), np.zeros(1, np.int64)
    find_slots(
        one,
        np.ones((1, 1), np.int32),
        table_K,
        request_N,
        slots_C,
        table_H,
        id_H,
        0,
        0,
        request_S,
        slot_L,
        row_L,
        0,
        0,
    )
    hot_N, s_N = np.ones(1, np.bool_), np.zeros(1, np.float32)
    judge_slots(request_S, slot_L, row_L, s_N, hot_N, np.float32(0), 0.5, 1.0, 1)
    smallest(request_S, s_N, row_L)
    take_requests(request_S, slot_L, row_L, hot_N)
