"""Rows that one process keeps and others on the same machine read: the owner's side.

The owner builds what it has read from the shards beside what a former owner left, and only then names it in the head: readers
go on with the older rows until then, and for ever if it never comes so far.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from param_server.index import KeyIndex, Keys
from param_server.replica import shared_kernels as kernels
from param_server.replica.shared_files import CURRENT_MS, GENERATIONS, NUM_ROWS, READY, SharedFolder, StackMap
from param_server.replica.slots import RowSlots
from roostream.runtime.clock import Clock
from roostream.schema.schema import Schema, Table

_FIRST_SLOTS = 1024
_CHUNK = 1 << 16  # rows that are copied at once to a new file


class SharedOwner:
    """All stacks. One a folder; `open` makes sure of that."""

    def __init__(
        self, folder: SharedFolder, schema: Schema, seed: int, num_buckets: int, clock: Clock
    ) -> None:
        self.folder, self.schema, self.seed, self.num_buckets, self.clock = (
            folder,
            schema,
            seed,
            num_buckets,
            clock,
        )
        self.published = False

    def open(self) -> SharedOwner:
        """Raises SetupError: the folder can't be used, or another process writes there. UnavailableError: no room."""
        self._lock = self.folder.lock()
        self.head = self.folder.open_head()
        self._generation = self.folder.newest_generation()
        self.stores = {
            name: SharedRows(self, number, tables)
            for number, (name, tables) in enumerate(self.schema.stacks.items())
        }
        return self

    def publish(self) -> None:
        """What is here is complete: readers get it from now on, as it changes."""
        if self.published:
            return
        self.published = True
        for store in self.stores.values():
            self.name(store.number, store.map.generation)
        self.folder.keep_only({store.number: store.map.generation for store in self.stores.values()})
        kernels.set_word(self.head, READY, 1)

    def show(self, current_s: float | None) -> None:
        """How many rows there are, and when they were known to be current (monotonic; None = not yet), for readers."""
        if self.published:
            kernels.set_word(self.head, NUM_ROWS, sum(store.num_rows for store in self.stores.values()))
            if current_s is not None:
                kernels.set_word(self.head, CURRENT_MS, max(int(current_s * 1000), 1))

    def name(self, stack: int, generation: int) -> None:
        """Readers take this file of a stack."""
        kernels.set_word(self.head, GENERATIONS + stack, generation)

    def next_generation(self) -> int:
        self._generation += 1
        return self._generation

    def close(self) -> None:
        """Another may own the folder; the files stay, for readers."""
        os.close(self._lock)


class SharedRows:
    """See RowStore. Every row that a reader gets was written whole; rows of one gather can be of different moments."""

    def __init__(self, owner: SharedOwner, number: int, tables: Sequence[Table]) -> None:
        self.owner, self.number, self.width = owner, number, tables[0].dim
        self.table_K = np.array([t.id for t in tables], np.uint32)
        self.scale_K = np.array([t.init_scale for t in tables], np.float32)
        self._begin(_FIRST_SLOTS)

    @property
    def num_rows(self) -> int:
        return int(self._counts[0])

    def put(self, keys: Keys, rows_UD: np.ndarray) -> None:
        rows_UD, done = np.ascontiguousarray(rows_UD), 0
        while done < len(keys):
            done += self._write(keys, rows_UD, done)
            if done < len(keys):
                self._renew(len(keys) - done)

    def remove(self, keys: Keys) -> None:
        m, freed_M = self.map, np.empty(len(keys), np.int64)
        num = kernels.remove(
            m.index_C,
            m.shift,
            m.slab,
            m.num_words,
            keys.table_U,
            keys.id_U,
            freed_M,
            self._counts,
            self._bucket_N,
        )
        self._slots.free(freed_M[:num], self._now_s())

    def replace(self, bucket: int, keys: Keys, rows_UD: np.ndarray) -> None:
        """A row that stays is there at every moment."""
        before = self._keys_at(np.flatnonzero(self._bucket_N == bucket))
        stay = KeyIndex(self.owner.num_buckets)
        stay.add_new(keys)
        self.put(keys, rows_UD)
        self.remove(before.take(stay.find(before) < 0))

    def gather(self, keys: Keys) -> np.ndarray:
        return gather_from(self.map, keys, self.width, self.owner.seed, self.table_K, self.scale_K)[0]

    def _write(self, keys: Keys, rows_UD: np.ndarray, start: int) -> int:
        """As many of the keys from `start` on as there is room for."""
        m, free_M, freed_M = (
            self.map,
            self._slots.take(len(keys) - start, self._now_s()),
            np.empty(len(keys), np.int64),
        )
        done, used, freed = kernels.put(
            m.index_C,
            m.shift,
            m.slab,
            m.numbers,
            m.num_words,
            keys.table_U[start:],
            keys.id_U[start:],
            rows_UD[start:],
            free_M,
            freed_M,
            self._counts,
            self._bucket_N,
            self.owner.num_buckets,
        )
        self._slots.give_back(free_M[used:])
        self._slots.free(freed_M[:freed], self._now_s())
        return int(done)

    def _renew(self, num_more: int) -> None:
        """A file with room: for what is here, what rests, as much more, and half of all that."""
        old, slots_M = self.map, np.flatnonzero(self._bucket_N >= 0)
        resting = old.num_slots - len(slots_M) - self._slots.available(self._now_s())
        self._begin(max((len(slots_M) + resting + num_more) * 3 // 2, _FIRST_SLOTS))
        for start in range(0, len(slots_M), _CHUNK):
            some_M = slots_M[start : start + _CHUNK]
            table_M, id_M = kernels.keys_of(old.slab, old.num_words, some_M)
            rows_MD = kernels.rows_at(old.numbers, old.num_words, some_M, self.width)
            self._write(Keys(table_M, id_M), rows_MD, 0)
        if self.owner.published:
            self.owner.name(self.number, self.map.generation)
            self.owner.folder.forget(self.number, old.generation)

    def _begin(self, capacity: int) -> None:
        self.map: StackMap = self.owner.folder.create_stack(
            self.number, self.owner.next_generation(), self.width, capacity
        )
        self._slots = RowSlots(capacity)
        self._counts, self._bucket_N = np.zeros(2, np.int64), np.full(capacity, -1, np.int32)

    def _keys_at(self, slots_M: np.ndarray) -> Keys:
        return Keys(*kernels.keys_of(self.map.slab, self.map.num_words, slots_M))

    def _now_s(self) -> float:
        return self.owner.clock.monotonic_s()


def gather_from(
    m: StackMap, keys: Keys, width: int, seed: int, table_K: np.ndarray, scale_K: np.ndarray
) -> tuple[np.ndarray, int]:
    """(float32 [U, D], how often a key was begun anew)."""
    out_UD = np.empty((len(keys), width), np.float32)
    again = kernels.gather(
        m.index_C,
        m.shift,
        m.slab,
        m.numbers,
        m.num_words,
        keys.table_U,
        keys.id_U,
        np.uint64(seed & (1 << 64) - 1),
        table_K,
        scale_K,
        out_UD,
    )
    return out_UD, int(again)
