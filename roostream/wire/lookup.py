"""The embedding rows that a batch needs: the unique (table, id) of every stack, and the row of each list
entry.

With deduplication (dedup.py), entries shared by several requests' sequences are looked up once. The rows are
the same, in another order.

Letters: U unique rows of a stack, L entries of one list feature or of one of its id columns, N keys of a
table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numba import njit

from roostream.schema.schema import Schema, Table
from roostream.wire.batch import Batch
from roostream.wire.block import Side
from roostream.wire.dedup import (
    MIN_FACTOR,
    Inverse,
    PartialDedup,
    find_inverse,
    find_partial_dedup,
    order_by_user,
    request_values,
)
from roostream.wire.jagged import Jagged


@dataclasses.dataclass(frozen=True, eq=False)
class StackLookup:
    """Rows in the order of their first occurrence: RO features, then NRO features as declared, each with its
    columns."""

    table_U: np.ndarray  # uint32: Table.id
    id_U: np.ndarray  # int64
    index: dict[str, np.ndarray]
    """`feature` or `feature.column` → int64 [L]: indices into U, aligned with `Jagged.values_of(feature)` or
    the column."""


@dataclasses.dataclass(frozen=True, eq=False)
class Lookup:
    """The rows of all stacks that a batch needs."""

    # Every stack of the schema, in its order; U = 0 if the batch does not use it.
    stacks: dict[str, StackLookup]
    shared: Mapping[str, PartialDedup] = dataclasses.field(default_factory=dict)
    """Request-only sequences whose deduplication pays."""
    unique: Inverse | None = None
    """The distinct requests by their request-only features; None = not requested, or it does not pay."""


class Source(NamedTuple):
    """Ids of a batch that name embedding rows: those of a list feature, or of one of its id columns with a
    table."""

    key: str  # `feature` or `feature.column`
    table: Table
    side: Side
    is_column: bool


def build_lookup(batch: Batch, *, deduplicated: bool = False) -> Lookup:
    """The row keys of a batch, each once: a pure function of the batch, so equal on every machine.
    `deduplicated`: also find the request-only values that requests share, if sharing them pays
    (`roostream.wire.dedup.MIN_FACTOR`)."""
    lists = {"ro": batch.ro_lists, "nro": batch.nro_lists}
    shared = shared_sequences(batch) if deduplicated else {}
    stacks = {}
    for stack, sources in batch.schema.derived(sources_of).items():
        dedups = {s.key: shared.get(s.key.split(".", 1)[0]) for s in sources if s.side == "ro"}
        entries = [(s.key, s.table.id, _kept(_ids_of(lists[s.side], s), dedups.get(s.key))) for s in sources]
        found = _unique_rows(entries)
        found.index.update({key: found.index[key][d.at_L] for key, d in dedups.items() if d is not None})
        stacks[stack] = found
    return Lookup(stacks, shared, _unique_requests(batch) if deduplicated else None)


def shared_sequences(batch: Batch) -> dict[str, PartialDedup]:
    """The request-only sequences with at least MIN_FACTOR entries for each entry kept."""
    names = [
        f.name for f in batch.schema.lists("ro") if f.kind == "sequence" and batch.ro_lists.total_of(f.name)
    ]
    order_M = order_by_user(batch) if names else None
    found = {name: find_partial_dedup(batch.ro_lists, name, order_M=order_M) for name in names}
    total_of = batch.ro_lists.total_of
    return {name: d for name, d in found.items() if total_of(name) >= MIN_FACTOR * len(d.entry_V)}


def _unique_requests(batch: Batch) -> Inverse | None:
    found = find_inverse(request_values(batch), batch.num_requests)
    return found if batch.num_requests and batch.num_requests >= MIN_FACTOR * found.num_unique else None


def _kept(id_L: np.ndarray, dedup: PartialDedup | None) -> np.ndarray:
    return id_L if dedup is None else id_L[dedup.entry_V]


def sources_of(schema: Schema) -> dict[str, tuple[Source, ...]]:
    """Stack → the ids that name its rows, in the order of `build_lookup`; use
    `schema.derived(sources_of)`."""
    out: dict[str, list[Source]] = {stack: [] for stack in schema.stacks}
    sides: tuple[Side, ...] = ("ro", "nro")
    for side in sides:
        for f in schema.lists(side):
            columns = [(f"{f.name}.{c}", f.column_tables[c]) for c in f.id_columns if c in f.column_tables]
            for key, name in ((f.name, f.table), *columns):
                table = schema.table_by_name[name]
                out[table.stack].append(Source(key, table, side, key != f.name))
    return {stack: tuple(sources) for stack, sources in out.items()}


def _ids_of(lists: Jagged, source: Source) -> np.ndarray:
    return lists.columns[source.key] if source.is_column else lists.values_of(source.key)


def _unique_rows(entries: list[tuple[str, int, np.ndarray]]) -> StackLookup:
    """Number the rows of `entries`, (key, table id, int64 ids), by their first occurrence."""
    total = sum(len(ids) for _, _, ids in entries)
    slots = np.full(1 << max(4, (2 * total - 1).bit_length()), -1, dtype=np.int32)
    table_U, id_U = np.empty(total, dtype=np.uint32), np.empty(total, dtype=np.int64)
    index, count = {}, 0
    for key, table, ids in entries:
        index[key] = np.empty(len(ids), dtype=np.int64)
        count = insert(np.ascontiguousarray(ids), table, slots, table_U, id_U, count, index[key])
    return StackLookup(table_U[:count].copy(), id_U[:count].copy(), index)


@njit(cache=True, nogil=True, inline="always")
def _first_slot_of(slots: np.ndarray, table: int, id_: int) -> np.uint64:
    """The slot of a key without collisions."""
    x = (np.uint64(id_) ^ np.uint64(table)) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))) & np.uint64(len(slots) - 1)


@njit(cache=True, nogil=True, inline="always")
def slot_of(slots: np.ndarray, table_U: np.ndarray, id_U: np.ndarray, table: int, id_: int) -> np.uint64:
    """The slot of a key, or the free slot where it belongs. For kernels."""
    mask = np.uint64(len(slots) - 1)
    at = _first_slot_of(slots, table, id_)
    while slots[at] >= 0 and (id_U[slots[at]] != id_ or table_U[slots[at]] != table):
        at = (at + np.uint64(1)) & mask
    return at


@njit(cache=True, nogil=True)
def insert(
    ids: np.ndarray,
    table: int,
    slots: np.ndarray,
    table_U: np.ndarray,
    id_U: np.ndarray,
    count: int,
    index_L: np.ndarray,
) -> int:
    """Find or add the (table, id) of each entry; returns the new number of unique rows. `slots`: open
    addressing, int32 indices into U, -1 = free, a power of two of at least twice the possible rows."""
    for i in range(len(ids)):
        at = slot_of(slots, table_U, id_U, table, ids[i])
        if slots[at] < 0:
            slots[at] = count
            id_U[count] = ids[i]
            table_U[count] = table
            count += 1
        index_L[i] = slots[at]
    return count


@njit(cache=True, nogil=True)
def touch_keys(
    slots: np.ndarray, table_N: np.ndarray, id_N: np.ndarray, table_U: np.ndarray, id_U: np.ndarray
) -> int:
    """Prefetch: read the first slots of many keys, so that `find_keys` or `number_keys` then finds them in
    the cache. The reads do not depend on each other, so the CPU overlaps them. The returned value has no
    meaning."""
    sum_ = 0
    for u in range(len(id_U)):
        n = max(slots[_first_slot_of(slots, table_U[u], id_U[u])], 0)
        sum_ += id_N[n] + table_N[n]
    return sum_


@njit(cache=True, nogil=True)
def find_keys(
    slots: np.ndarray,
    table_N: np.ndarray,
    id_N: np.ndarray,
    table_U: np.ndarray,
    id_U: np.ndarray,
    index_U: np.ndarray,
) -> None:
    """Write the index in N of each of U keys to `index_U` (int64), -1 = absent. `slots` as in `insert`, of
    N."""
    for u in range(len(id_U)):
        index_U[u] = slots[slot_of(slots, table_N, id_N, table_U[u], id_U[u])]


@njit(cache=True, nogil=True)
def number_keys(
    slots: np.ndarray,
    table_N: np.ndarray,
    id_N: np.ndarray,
    count: int,
    max_count: int,
    table_U: np.ndarray,
    id_U: np.ndarray,
    index_U: np.ndarray,
) -> int:
    """`find_keys`, which also adds absent keys behind the first `count`, up to `max_count`. Returns the new
    number of keys; the arrays must be long enough."""
    for u in range(len(id_U)):
        at = slot_of(slots, table_N, id_N, table_U[u], id_U[u])
        if slots[at] < 0 and count < max_count:
            table_N[count], id_N[count] = table_U[u], id_U[u]
            slots[at] = count
            count += 1
        index_U[u] = slots[at]
    return count


@njit(cache=True, nogil=True)
def put_keys(slots: np.ndarray, table_N: np.ndarray, id_N: np.ndarray, first: int, end: int) -> None:
    """Insert the absent keys `first` to `end` - 1 into `slots`, as in `insert`."""
    for n in range(first, end):
        slots[slot_of(slots, table_N, id_N, table_N[n], id_N[n])] = n


def precompile() -> None:
    """Compile the kernels into numba's cache."""
    found, slots = _unique_rows([("x", 1, np.zeros(1, dtype=np.int64))]), np.full(2, -1, np.int32)
    put_keys(slots, found.table_U, found.id_U, 0, 1)
    touch_keys(slots, found.table_U, found.id_U, found.table_U, found.id_U)
    find_keys(slots, found.table_U, found.id_U, found.table_U, found.id_U, np.empty(1, np.int64))
    number_keys(slots, found.table_U, found.id_U, 1, 1, found.table_U, found.id_U, np.empty(1, np.int64))
