"""Compiled loops over rows: gathering, first values, stamps, tests, and splitting by shard. Nothing here allocates per row or
holds the GIL.

Letters: U keys asked for, N row places of a stack, D width, A state width, K tables of the stack, M chosen rows, B buckets,
S shards.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from param_server.index_kernels import LIVE
from param_server.initial import fill_one, splitmix64


@njit(cache=True, nogil=True, inline="always")
def table_at(table: np.uint32, known_K: np.ndarray, guess: int) -> int:
    """Position of a table id among a stack's, -1 if it is none of them; `guess` is where the key before it was."""
    if guess >= 0 and known_K[guess] == table:
        return guess
    for k in range(known_K.shape[0]):
        if known_K[k] == table:
            return k
    return -1


@njit(cache=True, nogil=True)
def unknown_table(table_U: np.ndarray, known_K: np.ndarray) -> int:
    """Position of the first key whose table is not one of the stack's, or -1."""
    k = 0
    for u in range(table_U.shape[0]):
        k = table_at(table_U[u], known_K, k)
        if k < 0:
            return u
    return -1


@njit(cache=True, nogil=True)
def which_table(table_U: np.ndarray, known_K: np.ndarray) -> np.ndarray:
    """int64 [U]: position of each key's table among the stack's, which must be one of them."""
    out_U = np.empty(table_U.shape[0], dtype=np.int64)
    k = 0
    for u in range(table_U.shape[0]):
        k = table_at(table_U[u], known_K, k)
        out_U[u] = k
    return out_U


@njit(cache=True, nogil=True)
def gather(
    rows_ND: np.ndarray,
    place_U: np.ndarray,
    table_U: np.ndarray,
    id_U: np.ndarray,
    seed: np.uint64,
    known_K: np.ndarray,
    scale_K: np.ndarray,
    out_UD: np.ndarray,
) -> None:
    """Rows (float32 [N, D]) at places (int64 [U]) into `out_UD`; a place of -1 gives the initial value of its key (uint32
    `table_U`, int64 `id_U`), 0 for a table that is none of the stack's (uint32 `known_K`, half ranges float32 `scale_K`)."""
    k = 0
    for u in range(place_U.shape[0]):
        place = place_U[u]
        if place >= 0:
            for j in range(out_UD.shape[1]):
                out_UD[u, j] = rows_ND[place, j]
        else:
            k = table_at(table_U[u], known_K, k)
            fill_one(seed, table_U[u], id_U[u], scale_K[k] if k >= 0 else np.float32(0), out_UD[u])


@njit(cache=True, nogil=True)
def fill_new(
    rows_ND: np.ndarray,
    state_NA: np.ndarray,
    place_U: np.ndarray,
    new_U: np.ndarray,
    table_U: np.ndarray,
    id_U: np.ndarray,
    which_U: np.ndarray,
    seed: np.uint64,
    scale_K: np.ndarray,
    first_state_K: np.ndarray,
) -> None:
    """First values, in rows_ND float32 [N, D] and state_NA float32 [N, A], of the rows that `find_or_insert` has just made:
    those of the U keys where `new_U` (bool) is True, at places `place_U` (int64).

    A key is (`table_U` uint32, `id_U` int64); `which_U` (int64) is its table's position among the stack's K, whose half ranges
    of initial values are `scale_K` (float32) and whose first states are `first_state_K` (float32). `seed` as in `initial_rows`.
    """
    for u in range(place_U.shape[0]):
        if new_U[u]:
            k = which_U[u]
            fill_one(seed, table_U[u], id_U[u], scale_K[k], rows_ND[place_U[u]])
            state_NA[place_U[u], :] = first_state_K[k]


@njit(cache=True, nogil=True)
def stamp(
    place_U: np.ndarray,
    flags: int,
    time_ms: int,
    flags_N: np.ndarray,
    stamp_ms_N: np.ndarray,
    bucket_N: np.ndarray,
    touched_B: np.ndarray,
) -> None:
    """Mark rows at `place_U` (int64) as changed, with `flags` and event time `time_ms` (a stamp, int64, never goes back), and
    their buckets in `touched_B` (bool)."""
    for u in range(place_U.shape[0]):
        n = place_U[u]
        flags_N[n] |= flags
        if time_ms > stamp_ms_N[n]:
            stamp_ms_N[n] = time_ms
        touched_B[bucket_N[n]] = True


@njit(cache=True, nogil=True)
def expired(
    flags_N: np.ndarray,
    used: int,
    table_N: np.ndarray,
    stamp_ms_N: np.ndarray,
    known_K: np.ndarray,
    before_ms_K: np.ndarray,
) -> np.ndarray:
    """int64 [M]: places of live rows last pushed before their table's time `before_ms_K`."""
    out_M = np.empty(used, dtype=np.int64)
    m, k = 0, 0
    for n in range(used):
        if flags_N[n] & LIVE:
            k = table_at(table_N[n], known_K, k)
            if k >= 0 and stamp_ms_N[n] < before_ms_K[k]:
                out_M[m] = n
                m += 1
    return out_M[:m].copy()


@njit(cache=True, nogil=True)
def take_rows(rows_ND: np.ndarray, place_M: np.ndarray) -> np.ndarray:
    """rows_ND[place_M]: a copy, without the GIL."""
    out_MD = np.empty((place_M.shape[0], rows_ND.shape[1]), dtype=rows_ND.dtype)
    for m in range(place_M.shape[0]):
        for j in range(rows_ND.shape[1]):
            out_MD[m, j] = rows_ND[place_M[m], j]
    return out_MD


@njit(cache=True, nogil=True)
def put_rows(rows_ND: np.ndarray, place_M: np.ndarray, in_MD: np.ndarray) -> None:
    """rows_ND[place_M] = in_MD, without the GIL."""
    for m in range(place_M.shape[0]):
        for j in range(rows_ND.shape[1]):
            rows_ND[place_M[m], j] = in_MD[m, j]


@njit(cache=True, nogil=True)
def publishable(rows_MD: np.ndarray, max_norm: float) -> np.ndarray:
    """bool [M]: finite rows of a Euclidean norm of at most `max_norm`."""
    out_M = np.empty(rows_MD.shape[0], dtype=np.bool_)
    for m in range(rows_MD.shape[0]):
        total = np.float64(0)
        for j in range(rows_MD.shape[1]):
            total += np.float64(rows_MD[m, j]) * np.float64(rows_MD[m, j])
        out_M[m] = total <= max_norm * max_norm  # False for NaN too
    return out_M


@njit(cache=True, nogil=True)
def limit(gradient_UD: np.ndarray, most: np.float32, out_UD: np.ndarray) -> int:
    """Each row (float32, finite) into `out_UD`, scaled down so that no number of it is beyond `most`; how many rows had to be.
    Rows within it are copied to the bit."""
    limited = 0
    for u in range(gradient_UD.shape[0]):
        largest = np.float32(0)
        for j in range(gradient_UD.shape[1]):
            largest = max(largest, abs(gradient_UD[u, j]))
        if largest <= most:
            out_UD[u] = gradient_UD[u]
            continue
        limited += 1
        for j in range(gradient_UD.shape[1]):
            out_UD[u, j] = gradient_UD[u, j] / largest * most
    return limited


@njit(cache=True, nogil=True)
def add_rows(sum_UD: np.ndarray, place_M: np.ndarray, gradient_MD: np.ndarray) -> None:
    """Add each gradient (float32 [M, D]) to row `place_M` (int64) of `sum_UD` (float64), in order."""
    for m in range(place_M.shape[0]):
        for j in range(sum_UD.shape[1]):
            sum_UD[place_M[m], j] += gradient_MD[m, j]


@njit(cache=True, nogil=True)
def round_rows(sum_UD: np.ndarray, max_norm: float, most: np.float32, out_UD: np.ndarray) -> int:
    """Each row of `sum_UD` (float64, finite) as float32 into `out_UD`, scaled down to a Euclidean norm of `max_norm` at most
    (0 = any), then so that no number is beyond `most`; how many rows had to be for the latter."""
    limited = 0
    for u in range(sum_UD.shape[0]):
        squares, largest = 0.0, 0.0
        for j in range(sum_UD.shape[1]):
            squares += sum_UD[u, j] * sum_UD[u, j]
            largest = max(largest, abs(sum_UD[u, j]))
        norm = np.sqrt(squares)
        scale = max_norm / norm if 0.0 < max_norm < norm else 1.0
        if largest * scale > most:
            limited += 1
            scale = most / largest
        for j in range(sum_UD.shape[1]):
            out_UD[u, j] = np.float32(sum_UD[u, j] * scale)
    return limited


@njit(cache=True, nogil=True)
def largest_number(numbers_UD: np.ndarray) -> np.float32:
    """The largest magnitude among finite numbers (float32), 0 of none."""
    largest = np.float32(0)
    for u in range(numbers_UD.shape[0]):
        for j in range(numbers_UD.shape[1]):
            largest = max(largest, abs(numbers_UD[u, j]))
    return largest


@njit(cache=True, nogil=True)
def first_non_finite(gradient_UD: np.ndarray) -> int:
    """First row with an infinity or NaN, or -1. x - x is 0 for finite x only."""
    for u in range(gradient_UD.shape[0]):
        total = np.float32(0)
        for j in range(gradient_UD.shape[1]):
            total += gradient_UD[u, j] - gradient_UD[u, j]
        if total != 0:
            return u
    return -1


@njit(cache=True, nogil=True, error_model="numpy")
def buckets(table_U: np.ndarray, id_U: np.ndarray, num_buckets: int) -> np.ndarray:
    """int32 [U]: as `roostream.schema.ids.buckets_of`."""
    out_U = np.empty(id_U.shape[0], dtype=np.int32)
    for u in range(id_U.shape[0]):
        out_U[u] = splitmix64(np.uint64(id_U[u]) ^ np.uint64(table_U[u])) % np.uint64(num_buckets)
    return out_U


@njit(cache=True, nogil=True, error_model="numpy")
def split_by_shard(
    table_U: np.ndarray,
    id_U: np.ndarray,
    owner_B: np.ndarray,
    num_shards: int,
    order_U: np.ndarray,
    starts_S1: np.ndarray,
) -> None:
    """Keys grouped by shard, stable: shard s owns order_U[starts_S1[s] : starts_S1[s + 1]], positions in U. `owner_B` int32: the
    shard of each bucket."""
    shard_U = np.empty(id_U.shape[0], dtype=np.int32)
    starts_S1[:] = 0
    for u in range(id_U.shape[0]):
        bucket = splitmix64(np.uint64(id_U[u]) ^ np.uint64(table_U[u])) % np.uint64(owner_B.shape[0])
        shard_U[u] = owner_B[bucket]
        starts_S1[shard_U[u] + 1] += 1
    for s in range(num_shards):
        starts_S1[s + 1] += starts_S1[s]
    at_S = starts_S1[:-1].copy()
    for u in range(id_U.shape[0]):
        order_U[at_S[shard_U[u]]] = u
        at_S[shard_U[u]] += 1


@njit(cache=True, nogil=True, error_model="numpy")
def first_foreign(table_U: np.ndarray, id_U: np.ndarray, owner_B: np.ndarray, owner: int) -> int:
    """Position of the first key that isn't in a bucket of `owner`; -1 = all are."""
    for u in range(id_U.shape[0]):
        bucket = splitmix64(np.uint64(id_U[u]) ^ np.uint64(table_U[u])) % np.uint64(owner_B.shape[0])
        if owner_B[bucket] != owner:
            return u
    return -1
