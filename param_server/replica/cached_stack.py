"""Some rows of one stack, at most so many, and the CLOCK that decides which go. Keys that have no row are remembered too.

Letters: U keys, L live ones of a delta, N places, D width, M places chosen.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numba import njit

from param_server.held_rows import HeldRows
from param_server.index import Keys, grown
from param_server.index_kernels import LIVE
from roostream.schema.schema import Table

NO_ROW, USED = 32, 64
"""Flags of a place, beside those of the index: its key has no row; it was asked for since the hand passed."""

_OF_A_PLACE = 21 + 32 + 8  # the index' arrays, its slots, the version
_WITHOUT_ROW = 4  # one place of so many at most


def bytes_of_a_row(width: int) -> int:
    """What a row costs in all."""
    return 4 * width + _OF_A_PLACE


class CachedStack:
    """Never more than `capacity` keys, a power of two, of which at most a quarter have no row. Not thread-safe."""

    def __init__(self, tables: Sequence[Table], *, seed: int, num_buckets: int, capacity: int) -> None:
        self.held = HeldRows(tables, seed=seed, num_buckets=num_buckets)
        self.capacity, self.num_evicted = capacity, 0
        self.clear()

    def clear(self) -> None:
        """No keys."""
        self.held.clear()
        self._hand = self.num_without_row = 0
        self._version_N = np.zeros(
            self.held.index.capacity, np.uint64
        )  # the row is as new as this delta of its bucket

    @property
    def num_keys(self) -> int:
        return self.held.index.num_live

    def find(self, keys: Keys) -> np.ndarray:
        """int64 [U]: places, -1 = not here; those found are spared at the hand's next turn."""
        place_U = self.held.index.find(keys)
        self.held.index.flags_N[place_U[place_U >= 0]] |= USED
        return place_U

    def rows(self, keys: Keys, place_U: np.ndarray) -> np.ndarray:
        """float32 [U, D]: what is at their places; the initial value of those that have no row, or aren't here."""
        has_row_U = (place_U >= 0) & (self.held.index.flags_N[place_U] & NO_ROW == 0)
        return self.held.gather_at(keys, np.where(has_row_U, place_U, -1))

    def add(self, keys: Keys, rows_UD: np.ndarray, there_U: np.ndarray, version_U: np.ndarray) -> None:
        """Hold unique keys of which none is here (rows float32 [U, D]; bool: there is such a row; uint64 versions); others make
        room. Of more keys than there is room for, the last stay."""
        most = self.capacity // _WITHOUT_ROW
        without_M, with_M = np.flatnonzero(~there_U)[-most:], np.flatnonzero(there_U)
        chosen_M = np.concatenate([without_M, with_M])[-self.capacity :]
        num_without = int((~there_U[chosen_M]).sum())
        self._make_room(self.num_without_row + num_without - most, NO_ROW)
        self._make_room(self.num_keys + len(chosen_M) - self.capacity, 0)
        self.held.reserve(len(chosen_M))
        if len(self._version_N) < self.held.index.capacity:
            self._version_N = grown(self._version_N, self.held.index.capacity)
        place_M = self.held.put(keys.take(chosen_M), rows_UD[chosen_M])
        self._version_N[place_M] = version_U[chosen_M]
        self.held.index.flags_N[place_M[:num_without]] |= NO_ROW
        self.num_without_row += num_without

    def change(self, keys: Keys, rows_LD: np.ndarray, version: int) -> None:
        """A delta: its keys that are here, and older than it, have these rows (the first L) or none. No key comes by it."""
        place_U = self.held.index.find(keys)
        older_U = (place_U >= 0) & (self._version_N[place_U] < np.uint64(version))
        live_M, gone_M = (
            np.flatnonzero(older_U[: len(rows_LD)]),
            np.flatnonzero(older_U[len(rows_LD) :]) + len(rows_LD),
        )
        flags_N = self.held.index.flags_N
        self.num_without_row -= self._without(place_U[older_U])
        self.held.rows_ND[place_U[live_M]] = rows_LD[live_M]
        flags_N[place_U[live_M]] &= 255 - NO_ROW
        flags_N[place_U[gone_M]] |= NO_ROW
        self.num_without_row += len(gone_M)
        self._version_N[place_U[older_U]] = version

    def drop(self, bucket: int, below: int) -> None:
        """Forget a bucket's keys of versions below this one."""
        place_M = self.held.index.in_bucket(bucket)
        self._forget(place_M[self._version_N[place_M] < np.uint64(below)])

    def _make_room(self, num: int, only: int) -> None:
        if num > 0:
            place_M, self._hand = turn(self.held.index.flags_N, self.held.index.used, self._hand, num, only)
            self.num_evicted += len(place_M)
            self._forget(place_M)

    def _forget(self, place_M: np.ndarray) -> None:
        self.num_without_row -= self._without(place_M)
        self.held.index.remove(self.held.index.keys_at(place_M))

    def _without(self, place_M: np.ndarray) -> int:
        return int((self.held.index.flags_N[place_M] & NO_ROW != 0).sum())


@njit(cache=True, nogil=True)
def turn(flags_N: np.ndarray, used: int, hand: int, wanted: int, only: int) -> tuple[np.ndarray, int]:
    """CLOCK: (int64 [M], places to be given up, at most `wanted`; where the hand is then). A place that was asked for since it
    passed is spared once. `only`: flags (uint8 `flags_N`) of which a place must have one, 0 = any place."""
    out_M = np.empty(wanted, np.int64)
    found = 0
    for _ in range(2 * used):
        if found == wanted:
            break
        flags = flags_N[hand]
        if flags & LIVE and (only == 0 or flags & only):
            if flags & USED:
                flags_N[hand] = flags & (255 - USED)
            else:
                out_M[found] = hand
                flags_N[hand] = flags & (255 - LIVE)  # not twice
                found += 1
        hand = hand + 1 if hand + 1 < used else 0
    for m in range(found):
        flags_N[out_M[m]] |= LIVE
    return out_M[:found], hand


def precompile() -> None:
    """Compile the kernels into numba's cache."""
    turn(np.zeros(1, np.uint8), 1, 0, 1, 0)
