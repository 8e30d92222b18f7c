"""Compiled loops over rows and over the key index. None of them holds the GIL or allocates per row.

Letters: C index slots, U requested keys, N rows of a stack, D width, A state width, K tables of the stack, M
chosen rows, B buckets, S shards.

The index is open addressing with linear probing over (table, id). A slot is two uint64: the id's bits, and
table << 32 | (row + 1), 0 = free. At most half of the slots are taken.

splitmix64(id ^ table) chooses the bucket (`roostream.schema.ids`), which is part of the stored formats. The
high bits of splitmix64(id ^ table ^ secret) choose the slot. `secret` differs in each process and is never
stored, so nobody can choose ids that all belong to the same slot.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from param_server.initial_rows import fill_one, splitmix64

LIVE, UNPUBLISHED, IN_FLIGHT, DISOWNED = 1, 4, 8, 16
"""Flags of a row: in use; changed since the last delta; in a delta that is not acknowledged yet; replicas may
have a value of a history that was rolled back, so they must not keep it."""
DIRTY_A, DIRTY_B = 2, 128
"""Flags of a row that was changed since the last freeze, and of one that was changed before it. Each freeze
exchanges their meaning (param_server/table.py)."""
DIRTY = DIRTY_A | DIRTY_B


@njit(cache=True, nogil=True, inline="always")
def table_at(table: np.uint32, known_K: np.ndarray, guess: int) -> int:
    """Position of a table id in `known_K`, the ids of a stack's tables; -1 = absent. `guess`: a position to
    try first, for example that of the previous key; -1 = none."""
    if guess >= 0 and known_K[guess] == table:
        return guess
    for k in range(known_K.shape[0]):
        if known_K[k] == table:
            return k
    return -1


@njit(cache=True, nogil=True)
def unknown_table(table_U: np.ndarray, known_K: np.ndarray) -> int:
    """Position of the first key whose table does not belong to the stack, or -1."""
    k = 0
    for u in range(table_U.shape[0]):
        k = table_at(table_U[u], known_K, k)
        if k < 0:
            return u
    return -1


@njit(cache=True, nogil=True)
def which_table(table_U: np.ndarray, known_K: np.ndarray) -> np.ndarray:
    """int64 [U]: position of each key's table among the stack's, which must contain it."""
    out_U = np.empty(table_U.shape[0], dtype=np.int64)
    k = 0
    for u in range(table_U.shape[0]):
        k = table_at(table_U[u], known_K, k)
        out_U[u] = k
    return out_U


@njit(cache=True, nogil=True)
def gather(
    rows_ND: np.ndarray,
    row_U: np.ndarray,
    table_U: np.ndarray,
    id_U: np.ndarray,
    seed: np.uint64,
    known_K: np.ndarray,
    scale_K: np.ndarray,
    out_UD: np.ndarray,
) -> None:
    """Copy rows (float32 [N, D]) with numbers `row_U` (int64) to `out_UD`; -1 gives the key's initial value.

    A key is (`table_U` uint32, `id_U` int64). Tables that are not in the stack's `known_K` (uint32) give 0;
    `scale_K` (float32) are the half ranges of initial values.
    """
    k = 0
    for u in range(row_U.shape[0]):
        row = row_U[u]
        if row >= 0:
            for j in range(out_UD.shape[1]):
                out_UD[u, j] = rows_ND[row, j]
        else:
            k = table_at(table_U[u], known_K, k)
            fill_one(seed, table_U[u], id_U[u], scale_K[k] if k >= 0 else np.float32(0), out_UD[u])


@njit(cache=True, nogil=True)
def fill_new(
    rows_ND: np.ndarray,
    state_NA: np.ndarray,
    row_U: np.ndarray,
    new_U: np.ndarray,
    table_U: np.ndarray,
    id_U: np.ndarray,
    which_U: np.ndarray,
    seed: np.uint64,
    scale_K: np.ndarray,
    first_state_K: np.ndarray,
) -> None:
    """Write initial values to rows_ND (float32 [N, D]) and state_NA (float32 [N, A]) for the keys that
    `find_or_insert` has inserted: those where `new_U` (bool) is True, at rows `row_U` (int64).

    `which_U` (int64): position of the key's table among the stack's K. `scale_K` (float32): half ranges of
    initial values. `first_state_K` (float32): first states. `seed` as in `initial_rows`.
    """
    for u in range(row_U.shape[0]):
        if new_U[u]:
            k = which_U[u]
            fill_one(seed, table_U[u], id_U[u], scale_K[k], rows_ND[row_U[u]])
            state_NA[row_U[u], :] = first_state_K[k]


@njit(cache=True, nogil=True)
def stamp(
    row_U: np.ndarray,
    dirty: int,
    flags: int,
    time_ms: int,
    flags_N: np.ndarray,
    stamp_ms_N: np.ndarray,
    bucket_N: np.ndarray,
    touched_B: np.ndarray,
) -> int:
    """Mark rows `row_U` (int64) as changed, with the flag `dirty`, `flags` and event time `time_ms`, and
    their buckets in `touched_B` (bool). Return how many of the rows did not have `dirty` before.

    A stamp (int64) never decreases.
    """
    num_new = 0
    for u in range(row_U.shape[0]):
        n = row_U[u]
        num_new += (flags_N[n] & dirty) == 0
        flags_N[n] |= dirty | flags
        if time_ms > stamp_ms_N[n]:
            stamp_ms_N[n] = time_ms
        touched_B[bucket_N[n]] = True
    return num_new


@njit(cache=True, nogil=True)
def count_by_table(
    flags_N: np.ndarray, used: int, table_N: np.ndarray, known_K: np.ndarray, count_K: np.ndarray
) -> None:
    """Add the number of live rows of each table to `count_K` (int64)."""
    k = 0
    for n in range(used):
        if flags_N[n] & LIVE:
            k = table_at(table_N[n], known_K, k)
            if k >= 0:
                count_K[k] += 1


@njit(cache=True, nogil=True)
def expired(
    flags_N: np.ndarray,
    used: int,
    table_N: np.ndarray,
    stamp_ms_N: np.ndarray,
    known_K: np.ndarray,
    before_ms_K: np.ndarray,
) -> np.ndarray:
    """int64 [M]: live rows last pushed before their table's time `before_ms_K`."""
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
def take_rows(rows_ND: np.ndarray, row_M: np.ndarray) -> np.ndarray:
    """rows_ND[row_M], copied without the GIL."""
    out_MD = np.empty((row_M.shape[0], rows_ND.shape[1]), dtype=rows_ND.dtype)
    for m in range(row_M.shape[0]):
        for j in range(rows_ND.shape[1]):
            out_MD[m, j] = rows_ND[row_M[m], j]
    return out_MD


@njit(cache=True, nogil=True)
def put_rows(rows_ND: np.ndarray, row_M: np.ndarray, in_MD: np.ndarray) -> None:
    """rows_ND[row_M] = in_MD, without the GIL."""
    for m in range(row_M.shape[0]):
        for j in range(rows_ND.shape[1]):
            rows_ND[row_M[m], j] = in_MD[m, j]


@njit(cache=True, nogil=True)
def publishable(rows_MD: np.ndarray, max_norm: float) -> np.ndarray:
    """bool [M]: finite rows with a Euclidean norm of at most `max_norm`."""
    out_M = np.empty(rows_MD.shape[0], dtype=np.bool_)
    for m in range(rows_MD.shape[0]):
        total = np.float64(0)
        for j in range(rows_MD.shape[1]):
            total += np.float64(rows_MD[m, j]) * np.float64(rows_MD[m, j])
        out_M[m] = total <= max_norm * max_norm  # False for NaN too
    return out_M


@njit(cache=True, nogil=True)
def limit(gradient_UD: np.ndarray, most: np.float32, out_UD: np.ndarray) -> int:
    """Copy each row (float32, finite) to `out_UD`, scaled down so that no number exceeds `most`; return how
    many were scaled. Other rows are copied bit for bit."""
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
def add_rows(sum_UD: np.ndarray, row_M: np.ndarray, gradient_MD: np.ndarray) -> None:
    """Add each gradient (float32 [M, D]) to row `row_M` (int64) of `sum_UD` (float64), in order."""
    for m in range(row_M.shape[0]):
        for j in range(sum_UD.shape[1]):
            sum_UD[row_M[m], j] += gradient_MD[m, j]


@njit(cache=True, nogil=True)
def round_rows(sum_UD: np.ndarray, max_norm: float, most: np.float32, out_UD: np.ndarray) -> int:
    """Round each row of `sum_UD` (float64, finite) to float32 in `out_UD`; return how many rows exceeded
    `most`.

    A row is scaled to a Euclidean norm of at most `max_norm` (0 = no limit), then so that no number exceeds
    `most`.
    """
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
    """Group keys by shard, stable: shard s owns order_U[starts_S1[s] : starts_S1[s + 1]], positions in U.

    `owner_B` (int32): the shard of each bucket.
    """
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
    """Position of the first key that is in no bucket of `owner`; -1 if there is none."""
    for u in range(id_U.shape[0]):
        bucket = splitmix64(np.uint64(id_U[u]) ^ np.uint64(table_U[u])) % np.uint64(owner_B.shape[0])
        if owner_B[bucket] != owner:
            return u
    return -1


_S32, _LOW32 = np.uint64(32), np.uint64(0xFFFFFFFF)


@njit(cache=True, nogil=True, inline="always")
def _slot(id_: np.uint64, table: np.uint64, secret: np.uint64, shift: np.uint64) -> np.int64:
    return np.int64(splitmix64(id_ ^ table ^ secret) >> shift)


@njit(cache=True, nogil=True, inline="always")
def _probe(
    index_C2: np.ndarray, secret: np.uint64, shift: np.uint64, table: np.uint64, id_: np.uint64
) -> np.int64:
    """Slot of the key, or ~slot of the free slot where it belongs."""
    mask = index_C2.shape[0] - 1
    slot = _slot(id_, table, secret, shift)
    while True:
        word = index_C2[slot, 1]
        if word == 0:
            return ~slot
        if index_C2[slot, 0] == id_ and (word >> _S32) == table:
            return slot
        slot = (slot + 1) & mask


@njit(cache=True, nogil=True)
def find(
    index_C2: np.ndarray,
    secret: np.uint64,
    shift: np.uint64,
    table_U: np.ndarray,
    id_U: np.ndarray,
    row_U: np.ndarray,
) -> None:
    """Write each key's row number to `row_U` (int64), -1 where absent.

    `table_U` uint32, `id_U` int64; `index_C2`, `secret` and `shift` as in `find_or_insert`.
    """
    for u in range(id_U.shape[0]):
        slot = _probe(index_C2, secret, shift, np.uint64(table_U[u]), np.uint64(id_U[u]))
        row_U[u] = -1 if slot < 0 else np.int64(index_C2[slot, 1] & _LOW32) - 1


@njit(cache=True, nogil=True)
def find_or_insert(  # noqa: PLR0913 (a numba kernel takes flat arrays)
    index_C2: np.ndarray,
    secret: np.uint64,
    shift: np.uint64,
    table_U: np.ndarray,
    id_U: np.ndarray,
    num_buckets: int,
    counts: np.ndarray,
    free_N: np.ndarray,
    table_N: np.ndarray,
    id_N: np.ndarray,
    bucket_N: np.ndarray,
    flags_N: np.ndarray,
    row_U: np.ndarray,
    new_U: np.ndarray,
) -> None:
    """Write each key's row number to `row_U` (int64), inserting absent keys, which `new_U` (bool) marks.

    The caller has reserved U more rows, and slots so that at most half of them are taken.

    Read and changed:
        index_C2            uint64 slots as in the module
        secret, shift       the module's secret; 64 - log2 C, which shifts a hash down to a slot
        counts              int64 [row numbers used, free ones among them, live ones]
        free_N              uint32: the first counts[1] are free row numbers below counts[0], a stack
        table_N, id_N       uint32, int64: each row's key
        bucket_N, flags_N   int32 in 0..num_buckets - 1; uint8, LIVE for a new row
    """
    for u in range(id_U.shape[0]):
        table, id_ = np.uint64(table_U[u]), np.uint64(id_U[u])
        slot = _probe(index_C2, secret, shift, table, id_)
        new_U[u] = slot < 0
        if slot >= 0:
            row_U[u] = np.int64(index_C2[slot, 1] & _LOW32) - 1
            continue
        if counts[1] > 0:
            counts[1] -= 1
            row = np.int64(free_N[counts[1]])
        else:
            row = counts[0]
            counts[0] += 1
        counts[2] += 1
        index_C2[~slot, 0] = id_
        index_C2[~slot, 1] = (table << _S32) | np.uint64(row + 1)
        table_N[row] = table_U[u]
        id_N[row] = id_U[u]
        bucket_N[row] = splitmix64(id_ ^ table) % np.uint64(num_buckets)
        flags_N[row] = LIVE
        row_U[u] = row


@njit(cache=True, nogil=True)
def remove(
    index_C2: np.ndarray,
    secret: np.uint64,
    shift: np.uint64,
    table_U: np.ndarray,
    id_U: np.ndarray,
    counts: np.ndarray,
    free_N: np.ndarray,
    flags_N: np.ndarray,
) -> int:
    """Remove the keys (uint32 `table_U`, int64 `id_U`) that are present; return how many. Arrays as in
    `find_or_insert`.

    A free row has flags 0; its key and numbers stay. Later entries of a probe run move up, so no tombstones
    are needed (Knuth, TAOCP 3, 6.4, algorithm R).
    """
    mask = index_C2.shape[0] - 1
    removed = 0
    for u in range(id_U.shape[0]):
        hole = _probe(index_C2, secret, shift, np.uint64(table_U[u]), np.uint64(id_U[u]))
        if hole < 0:
            continue
        row = np.int64(index_C2[hole, 1] & _LOW32) - 1
        flags_N[row] = 0
        free_N[counts[1]] = row
        counts[1] += 1
        counts[2] -= 1
        removed += 1
        slot = (hole + 1) & mask
        while index_C2[slot, 1] != 0:
            home = _slot(index_C2[slot, 0], index_C2[slot, 1] >> _S32, secret, shift)
            if ((slot - home) & mask) >= ((slot - hole) & mask):
                index_C2[hole, 0] = index_C2[slot, 0]
                index_C2[hole, 1] = index_C2[slot, 1]
                hole = slot
            slot = (slot + 1) & mask
        index_C2[hole, 1] = 0
    return removed


@njit(cache=True, nogil=True)
def rebuild(
    index_C2: np.ndarray,
    secret: np.uint64,
    shift: np.uint64,
    used: int,
    table_N: np.ndarray,
    id_N: np.ndarray,
    flags_N: np.ndarray,
) -> None:
    """Fill an empty index with the live rows."""
    for n in range(used):
        if flags_N[n] & LIVE:
            table, id_ = np.uint64(table_N[n]), np.uint64(id_N[n])
            slot = ~_probe(index_C2, secret, shift, table, id_)
            index_C2[slot, 0] = id_
            index_C2[slot, 1] = (table << _S32) | np.uint64(n + 1)


@njit(cache=True, nogil=True)
def frozen_among(
    flags_N: np.ndarray, bucket_N: np.ndarray, row_U: np.ndarray, dirty: int, flags: int, chosen_B: np.ndarray
) -> np.ndarray:
    """int64 [M]: those of the live rows `row_U` (int64) that do not have the flag `dirty`, and have any of
    `flags` or are in a bucket where `chosen_B` (bool) is True."""
    out_U = np.empty(row_U.shape[0], dtype=np.int64)
    m = 0
    for u in range(row_U.shape[0]):
        n = row_U[u]
        if not flags_N[n] & dirty and (flags_N[n] & flags or chosen_B[bucket_N[n]]):
            out_U[m] = n
            m += 1
    return out_U[:m].copy()


@njit(cache=True, nogil=True)
def flagged(flags_N: np.ndarray, start: int, end: int, flags: int) -> np.ndarray:
    """int64 [M]: live rows from `start` to `end` - 1 with any of `flags`, ascending."""
    count = 0
    for n in range(start, end):
        if flags_N[n] & LIVE and flags_N[n] & flags:
            count += 1
    out_M = np.empty(count, dtype=np.int64)
    m = 0
    for n in range(start, end):
        if flags_N[n] & LIVE and flags_N[n] & flags:
            out_M[m] = n
            m += 1
    return out_M


@njit(cache=True, nogil=True)
def in_buckets(
    flags_N: np.ndarray, bucket_N: np.ndarray, start: int, end: int, chosen_B: np.ndarray, flags: int
) -> np.ndarray:
    """int64 [M], ascending: live rows from `start` to `end` - 1 that are in a bucket where `chosen_B` (bool)
    is True, or have any of `flags`."""
    count = 0
    for n in range(start, end):
        if flags_N[n] & LIVE and (chosen_B[bucket_N[n]] or flags_N[n] & flags):
            count += 1
    out_M = np.empty(count, dtype=np.int64)
    m = 0
    for n in range(start, end):
        if flags_N[n] & LIVE and (chosen_B[bucket_N[n]] or flags_N[n] & flags):
            out_M[m] = n
            m += 1
    return out_M


@njit(cache=True, nogil=True)
def replace_flags_at(flags_N: np.ndarray, row_M: np.ndarray, flags: int, by: int, also: int) -> int:
    """In those of the rows `row_M` (int64) that have any of `flags`: clear `flags` and `also`, then set `by`.
    Return how many of them had none of `by` before."""
    num_new = 0
    for m in range(row_M.shape[0]):
        n = row_M[m]
        if flags_N[n] & flags:
            num_new += (flags_N[n] & by) == 0
            flags_N[n] = (flags_N[n] & ~(flags | also)) | by
    return num_new


@njit(cache=True, nogil=True)
def replace_flags(flags_N: np.ndarray, used: int, flags: int, by: int, also: int) -> None:
    """Clear `flags` in all live rows; rows that had any of them also lose `also` and get `by`."""
    for n in range(used):
        if flags_N[n] & LIVE and flags_N[n] & flags:
            flags_N[n] = (flags_N[n] & ~(flags | also)) | by
