"""Compiled loops over an index: (table, id) → place. Nothing here holds the GIL.

Letters: C slots, U keys asked for, N places, M chosen places.

The index is open addressing with linear probing over (table, id). A slot is two uint64: the id's bits, and
table << 32 | (place + 1), 0 = free. The hash is splitmix64(id ^ table), whose low bits choose the bucket (`roostream.schema.ids`);
slots are chosen by its high bits, since all keys of one shard agree in low ones. At most half of the slots are taken.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from param_server.initial import splitmix64

LIVE, DIRTY, UNPUBLISHED, IN_FLIGHT, DISOWNED = 1, 2, 4, 8, 16
"""Flags of a place: holds a row; changed since the last freeze; changed since the last delta; in a delta not yet acknowledged;
readers may have a value that is no longer of this row's history, so that they must not keep it."""

_S32, _LOW32 = np.uint64(32), np.uint64(0xFFFFFFFF)


@njit(cache=True, nogil=True, inline="always")
def _slot(id_: np.uint64, table: np.uint64, shift: np.uint64) -> np.int64:
    return np.int64(splitmix64(id_ ^ table) >> shift)


@njit(cache=True, nogil=True, inline="always")
def _probe(index_C2: np.ndarray, shift: np.uint64, table: np.uint64, id_: np.uint64) -> np.int64:
    """Slot of the key, or ~slot of the free one where it belongs."""
    mask = index_C2.shape[0] - 1
    slot = _slot(id_, table, shift)
    while True:
        word = index_C2[slot, 1]
        if word == 0:
            return ~slot
        if index_C2[slot, 0] == id_ and (word >> _S32) == table:
            return slot
        slot = (slot + 1) & mask


@njit(cache=True, nogil=True)
def find(
    index_C2: np.ndarray, shift: np.uint64, table_U: np.ndarray, id_U: np.ndarray, place_U: np.ndarray
) -> int:
    """Place of each key (uint32 `table_U`, int64 `id_U`) in `place_U` (int64, written here), -1 where absent; the number absent.
    `index_C2` and `shift` as in `find_or_insert`."""
    absent = 0
    for u in range(id_U.shape[0]):
        slot = _probe(index_C2, shift, np.uint64(table_U[u]), np.uint64(id_U[u]))
        if slot < 0:
            place_U[u] = -1
            absent += 1
        else:
            place_U[u] = np.int64(index_C2[slot, 1] & _LOW32) - 1
    return absent


@njit(cache=True, nogil=True)
def find_or_insert(
    index_C2: np.ndarray,
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
    place_U: np.ndarray,
    new_U: np.ndarray,
) -> int:
    """Place of each key (uint32 `table_U`, int64 `id_U`) in `place_U` (int64), made where absent, which `new_U` (bool) tells; the
    number made. The caller has made room: places for U more, and slots so that at most half of them are taken.

    Read and changed:
        index_C2, shift     uint64 slots as in the module; 64 - log2 C: how far a hash goes down to a slot
        counts              int64 [places used, free ones among them, live ones]
        free_N              uint32: the first counts[1] are free places below counts[0], taken from the end
        table_N, id_N       uint32, int64: the key at a place
        bucket_N, flags_N   int32 in 0..num_buckets - 1; uint8, LIVE for a new one
    """
    made = 0
    for u in range(id_U.shape[0]):
        table, id_ = np.uint64(table_U[u]), np.uint64(id_U[u])
        slot = _probe(index_C2, shift, table, id_)
        new_U[u] = slot < 0
        if slot >= 0:
            place_U[u] = np.int64(index_C2[slot, 1] & _LOW32) - 1
            continue
        if counts[1] > 0:
            counts[1] -= 1
            place = np.int64(free_N[counts[1]])
        else:
            place = counts[0]
            counts[0] += 1
        counts[2] += 1
        made += 1
        index_C2[~slot, 0] = id_
        index_C2[~slot, 1] = (table << _S32) | np.uint64(place + 1)
        table_N[place] = table_U[u]
        id_N[place] = id_U[u]
        bucket_N[place] = splitmix64(id_ ^ table) % np.uint64(num_buckets)
        flags_N[place] = LIVE
        place_U[u] = place
    return made


@njit(cache=True, nogil=True)
def remove(
    index_C2: np.ndarray,
    shift: np.uint64,
    table_U: np.ndarray,
    id_U: np.ndarray,
    counts: np.ndarray,
    free_N: np.ndarray,
    flags_N: np.ndarray,
) -> int:
    """Remove the keys (uint32 `table_U`, int64 `id_U`) that are there; how many were. The other arrays as in `find_or_insert`;
    a free place has flags 0, its key and row are left as they were.

    Later entries of a probe run move up, so that no tombstones are needed (Knuth, TAOCP 3, 6.4, algorithm R).
    """
    mask = index_C2.shape[0] - 1
    removed = 0
    for u in range(id_U.shape[0]):
        hole = _probe(index_C2, shift, np.uint64(table_U[u]), np.uint64(id_U[u]))
        if hole < 0:
            continue
        place = np.int64(index_C2[hole, 1] & _LOW32) - 1
        flags_N[place] = 0
        free_N[counts[1]] = place
        counts[1] += 1
        counts[2] -= 1
        removed += 1
        slot = (hole + 1) & mask
        while index_C2[slot, 1] != 0:
            home = _slot(index_C2[slot, 0], index_C2[slot, 1] >> _S32, shift)
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
    shift: np.uint64,
    used: int,
    table_N: np.ndarray,
    id_N: np.ndarray,
    flags_N: np.ndarray,
) -> None:
    """Fill an empty index with the live places."""
    for n in range(used):
        if flags_N[n] & LIVE:
            table, id_ = np.uint64(table_N[n]), np.uint64(id_N[n])
            slot = ~_probe(index_C2, shift, table, id_)
            index_C2[slot, 0] = id_
            index_C2[slot, 1] = (table << _S32) | np.uint64(n + 1)


@njit(cache=True, nogil=True)
def flagged(flags_N: np.ndarray, used: int, flags: int) -> np.ndarray:
    """int64 [M]: places of live rows with any of `flags`, ascending."""
    count = 0
    for n in range(used):
        if flags_N[n] & LIVE and flags_N[n] & flags:
            count += 1
    out_M = np.empty(count, dtype=np.int64)
    m = 0
    for n in range(used):
        if flags_N[n] & LIVE and flags_N[n] & flags:
            out_M[m] = n
            m += 1
    return out_M


@njit(cache=True, nogil=True)
def count_flagged(flags_N: np.ndarray, used: int, flags: int) -> int:
    """How many live rows have any of `flags`."""
    count = 0
    for n in range(used):
        if flags_N[n] & LIVE and flags_N[n] & flags:
            count += 1
    return count


@njit(cache=True, nogil=True)
def in_buckets(
    flags_N: np.ndarray, bucket_N: np.ndarray, used: int, chosen_B: np.ndarray, flags: int
) -> np.ndarray:
    """int64 [M], ascending: places of live rows of the buckets where `chosen_B` (bool) is True, or with any of `flags`."""
    count = 0
    for n in range(used):
        if flags_N[n] & LIVE and (chosen_B[bucket_N[n]] or flags_N[n] & flags):
            count += 1
    out_M = np.empty(count, dtype=np.int64)
    m = 0
    for n in range(used):
        if flags_N[n] & LIVE and (chosen_B[bucket_N[n]] or flags_N[n] & flags):
            out_M[m] = n
            m += 1
    return out_M


@njit(cache=True, nogil=True)
def replace_flags(flags_N: np.ndarray, used: int, flags: int, by: int, also: int) -> None:
    """Take `flags` from all live rows; those that had any of them lose `also` and get `by`."""
    for n in range(used):
        if flags_N[n] & LIVE and flags_N[n] & flags:
            flags_N[n] = (flags_N[n] & ~(flags | also)) | by
