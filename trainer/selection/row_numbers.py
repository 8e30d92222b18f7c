"""Numbers for rows of a stack that are remembered: (table, id) → 0..N-1. Plain numpy; 28 bytes a row.

Rows are found by a hash of both in a sorted array. Of two with the same hash (one pair in 2⁶⁴) one is never found.

Letters: N rows, U rows asked for.
"""

from __future__ import annotations

import numpy as np

from roo.ids import splitmix64_of


class RowNumbers:
    """Numbers go up as rows are added, and anew when some are dropped."""

    def __init__(self, table_N: np.ndarray | None = None, id_N: np.ndarray | None = None) -> None:
        """uint32 and int64 [N], each row once: row n has number n."""
        self.table_N = np.zeros(0, np.uint32) if table_N is None else table_N
        self.id_N = np.zeros(0, np.int64) if id_N is None else id_N
        hash_N = hashed(self.table_N, self.id_N)
        self._number_N = np.argsort(hash_N, kind="stable")
        self._hash_N = hash_N[self._number_N]

    def __len__(self) -> int:
        return len(self.id_N)

    def find(self, table_U: np.ndarray, id_U: np.ndarray) -> np.ndarray:
        """int64 [U]; -1 = not there."""
        if not len(self):
            return np.full(len(id_U), -1, np.int64)
        hash_U = hashed(table_U, id_U)
        at_U = np.minimum(np.searchsorted(self._hash_N, hash_U), len(self) - 1)
        number_U = self._number_N[at_U]
        same_U = (self.id_N[number_U] == id_U) & (self.table_N[number_U] == table_U)
        return np.where(same_U, number_U, -1)

    def add(self, table_U: np.ndarray, id_U: np.ndarray) -> np.ndarray:
        """Number rows that aren't there, each named once; int64 [U]."""
        number_U = np.arange(len(self), len(self) + len(id_U), dtype=np.int64)
        hash_U = hashed(table_U, id_U)
        order_U = np.argsort(hash_U, kind="stable")
        at_U = np.searchsorted(self._hash_N, hash_U[order_U], side="right")
        self._hash_N = np.insert(self._hash_N, at_U, hash_U[order_U])
        self._number_N = np.insert(self._number_N, at_U, number_U[order_U])
        self.table_N, self.id_N = np.concatenate([self.table_N, table_U]), np.concatenate([self.id_N, id_U])
        return number_U


def hashed(table_U: np.ndarray, id_U: np.ndarray) -> np.ndarray:
    """uint64 [U]."""
    return splitmix64_of(splitmix64_of(table_U.astype(np.uint64)) ^ id_U.view(np.uint64))
