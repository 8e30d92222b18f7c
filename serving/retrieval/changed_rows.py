"""Whose rows are others than they were: all rows that items are made of are read now and then, and compared.

Instead of listening to deltas: what counts is what a reader would get, wherever rows are kept and however they came (deltas, a
bootstrap, a bucket that was mended, another process' memory). Reading a hundred thousand rows costs some ten milliseconds.

Letters: I items, U unique rows of a stack, L entries of all items, N items, D width.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from roostream.wire.batch import Batch
from roostream.wire.lookup import Lookup, StackLookup, build_lookup
from serving.scorer import RowReader

CHUNK = 20_000


class RowChunk(NamedTuple):
    """Rows that are read at once."""

    stack: str
    begin: int
    end: int


class _StackSeen:
    """A stack's rows as they were last, and the items that are made of each."""

    def __init__(self, items: Batch, found: StackLookup) -> None:
        self.table_U, self.id_U = found.table_U, found.id_U
        rows, slots = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for k, name in enumerate(items.nro_lists.keys):
            slot_L = np.repeat(np.arange(items.num_candidates), items.nro_lists.lengths_KN[k])
            for key, index_L in found.index.items():
                if key.partition(".")[0] == name:
                    rows.append(index_L)
                    slots.append(slot_L)
        row_L = np.concatenate(rows)
        self._slot_L = np.concatenate(slots)[np.argsort(row_L, kind="stable")]
        self._start_U1 = np.concatenate([[0], np.cumsum(np.bincount(row_L, minlength=len(self.id_U)))])
        self._seen_UD: np.ndarray | None = None

    def part(self, begin: int, end: int) -> StackLookup:
        return StackLookup(self.table_U[begin:end], self.id_U[begin:end], {})

    def take(self, begin: int, row_UD: np.ndarray) -> np.ndarray:
        """Rows as they are now, from `begin` on; the items of those that are others, each once. At first none is."""
        if self._seen_UD is None:
            self._seen_UD = np.full((len(self.id_U), row_UD.shape[1]), np.nan, np.float32)
        seen_UD = self._seen_UD[begin : begin + len(row_UD)]
        changed_N = begin + np.flatnonzero((seen_UD != row_UD).any(axis=1) & ~np.isnan(seen_UD).all(axis=1))
        seen_UD[:] = row_UD
        spans = [self._slot_L[self._start_U1[row] : self._start_U1[row + 1]] for row in changed_N]
        return np.unique(np.concatenate(spans)) if spans else np.zeros(0, np.int64)


class ChangedRows:
    """For the items of one catalogue. Used by one thread."""

    def __init__(self, items: Batch) -> None:
        found = build_lookup(items)
        self._stacks = {name: _StackSeen(items, stack) for name, stack in found.stacks.items()}
        self._empty = {name: StackLookup(s.table_U[:0], s.id_U[:0], {}) for name, s in found.stacks.items()}

    def chunks(self) -> list[RowChunk]:
        """Of all rows."""
        sizes = {name: len(stack.id_U) for name, stack in self._stacks.items()}
        return [RowChunk(name, b, min(b + CHUNK, n)) for name, n in sizes.items() for b in range(0, n, CHUNK)]

    def look(self, rows: RowReader, chunk: RowChunk) -> np.ndarray:
        """int64 [N], rising: the items of rows that are others than at the last look."""
        stack = self._stacks[chunk.stack]
        lookup = Lookup({**self._empty, chunk.stack: stack.part(chunk.begin, chunk.end)})
        return stack.take(chunk.begin, rows.gather(lookup)[chunk.stack])
