"""A bounded cache of embedding rows for serving: missed rows are read from the shards, cached rows follow the
topic `rows`.

Each cached row has a version: the last delta of its bucket when the shard returned the row. A delta changes
cached rows that are older than it and inserts nothing. Three rules make sure that a cached row misses no
change:

1 The topic's end offsets are noted (`bootstrap`) before the first row is read, so every later change is seen.
2 A row that was read is cached unless a later delta of its bucket was applied meanwhile, a record was
  refused, or the cache was bootstrapped again; then it is used once.
3 After a gap in a bucket's sequence, keys older than the delta before the gap's end are dropped. A Barrier
  drops the keys of older incarnations. A record that was refused drops the whole bucket.

No row goes back to an older state (guarantee G4): only newer deltas change cached rows, and answers of a
shard in an older incarnation are ignored.

Letters: U requested keys, M missed keys, L live keys of a delta, N rows of the table, D width, B buckets.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import deque
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from numba import njit

from param_server import kernels
from param_server.config import MAX_PUBLISH_NORM
from param_server.deltas import columns_of
from param_server.embedding_table import EmbeddingTable, Keys, grown
from param_server.kernels import LIVE
from param_server.replica.replica import Replica, unknown_bucket
from param_server.replica.shard_reads import FetchedRows, ShardReads
from roostream.runtime.kafka.topics import DEFAULT_BUCKETS
from roostream.runtime.rpc.transport import Transport
from roostream.schema.schema import Schema, Table
from roostream.wire import roo_pb2 as pb
from roostream.wire.lookup import Lookup, StackLookup

NO_ROW, USED = 32, 64
"""Flags beside those of the index: the key is known to have no row; the key was requested since the clock
hand passed."""

_MIN_KEYS = 64
_MAX_BACKGROUND_READS = 64  # gathers whose misses wait for the background thread
_ANY_VERSION = (1 << 64) - 1
_SEQUENCE_BITS = 40
_OVERHEAD_BYTES = 21 + 32 + 8  # per row: the index's arrays, its slots, the version
_MAX_ABSENT_SHARE = 4  # at most one key in four may be a key without a row


@dataclasses.dataclass(frozen=True, kw_only=True)
class CachePolicy:
    """How much is cached, and what a miss costs: a wait for the shard, or an initial value and a read in the
    background."""

    max_bytes: int
    waits: bool = True
    max_norm: float = MAX_PUBLISH_NORM  # norm limit of a row in a delta, the shards' `max_publish_norm`


class RowCache:
    """Implements `serving.rows.row_follower.RowReplica`. Thread-safe."""

    stale: Collection[object] = ()

    def __init__(
        self,
        schema: Schema,
        seed: int,
        reads: ShardReads,
        policy: CachePolicy,
        num_buckets: int = DEFAULT_BUCKETS,
    ) -> None:
        self.reads, self.policy, self.num_buckets = reads, policy, num_buckets
        self.needs_bootstrap = True
        self.num_lookups = self.num_missed = self.num_initial_values = 0
        self._num_resets = 0  # bootstraps and refused records
        keys = policy.max_bytes // sum(row_bytes(tables[0].dim) for tables in schema.stacks.values())
        capacity = 1 << (max(keys, _MIN_KEYS).bit_length() - 1)
        self._stacks = {
            name: CachedTable(tables, seed=seed, num_buckets=num_buckets, capacity=capacity)
            for name, tables in schema.stacks.items()
        }
        # Stack → the newest version applied, uint64 [B].
        self._applied = {name: np.zeros(num_buckets, np.uint64) for name in schema.stacks}
        self._lock = threading.Lock()
        self._background: deque[Mapping[str, Keys]] = deque(maxlen=_MAX_BACKGROUND_READS)
        self._has_background = threading.Event()
        self._local = threading.local()

    @property
    def num_rows(self) -> int:
        return sum(stack.num_keys - stack.num_without_row for stack in self._stacks.values())

    @property
    def incarnation(self) -> int:
        """The newest incarnation of which deltas or barriers were applied."""
        return max(int(applied_B.max()) for applied_B in self._applied.values()) >> _SEQUENCE_BITS

    @property
    def num_without_row(self) -> int:
        return sum(stack.num_without_row for stack in self._stacks.values())

    @property
    def num_evicted(self) -> int:
        return sum(stack.num_evicted for stack in self._stacks.values())

    @property
    def complete(self) -> bool:
        """Whether this thread's last gather got every row that it waited for."""
        return bool(getattr(self._local, "complete", True))

    def gather(self, lookup: Lookup) -> dict[str, np.ndarray]:
        """Stack → float32 [U, D]. Keys without a row, and keys that could not be read in time, give initial
        values."""
        out: dict[str, np.ndarray] = {}
        missed: dict[str, np.ndarray] = {}
        with self._lock:
            for name, found in lookup.stacks.items():
                keys, stack = Keys(found.table_U, found.id_U), self._stacks[name]
                row_U = stack.find(keys)
                out[name] = stack.gather(keys, row_U)
                missed[name] = np.flatnonzero(row_U < 0)
                self.num_lookups += len(keys)
        wanted = {
            name: Keys(lookup.stacks[name].table_U[at_M], lookup.stacks[name].id_U[at_M])
            for name, at_M in missed.items()
            if len(at_M)
        }
        num_missed = sum(map(len, wanted.values()))
        self.num_missed += num_missed
        num_read = self._read(wanted, missed, out) if wanted else 0
        self.num_initial_values += num_missed - num_read
        self._local.complete = num_read == num_missed or not self.policy.waits
        return out

    def run(self, stop: threading.Event) -> None:
        """Read, in the background, the misses that no gather waits for, and the bucket map, until `stop`."""
        while not stop.is_set():
            self.reads.refresh_bucket_map()
            if self._has_background.wait(0.2):
                self.read_waiting()

    def read_waiting(self) -> None:
        """Read the misses that no gather waits for."""
        self._has_background.clear()
        while self._background:
            wanted, since = self._background.popleft(), self._num_resets
            for name, parts in self.reads.read(wanted).items():
                for part in parts:
                    self._store(name, wanted[name].take(part.at_M), part, since)

    def apply(self, message: pb.RowDelta | pb.Barrier) -> bool:
        """Apply one message of the topic; False if it is not newer than the last. Raises as
        `Replica.apply`."""
        stack = self._stacks.get(message.stack)
        if stack is None or message.bucket >= self.num_buckets:
            raise unknown_bucket(message)
        if isinstance(message, pb.Barrier):
            return self._apply_barrier(stack, message)
        keys, rows_LD = columns_of(message, stack.rows.width, self.policy.max_norm)
        version = packed_version(message.incarnation, message.sequence)
        with self._lock:
            applied = int(self._applied[message.stack][message.bucket])
            if version <= applied:
                return False
            if version != applied + 1:
                stack.drop(message.bucket, version - 1)
            stack.update(keys, rows_LD, version)
            self._applied[message.stack][message.bucket] = version
        return True

    def bootstrap(self, transports: Sequence[Transport]) -> None:
        """Empty the cache. The topic's end offsets have been noted, so every change from now on is
        applied."""
        self.reads.refresh_bucket_map()
        with self._lock:
            for name, stack in self._stacks.items():
                stack.clear()
                self._applied[name][:] = 0
            self._num_resets += 1
            self.needs_bootstrap = False

    def mark_stale(self, bucket: int) -> None:
        """Drop a bucket of which a record was not applied. An unknown bucket number empties the cache."""
        with self._lock:
            self._num_resets += 1
            if 0 <= bucket < self.num_buckets:
                for stack in self._stacks.values():
                    stack.drop(bucket, _ANY_VERSION)
            else:
                self.needs_bootstrap = True

    def repair(self, transports: Sequence[Transport]) -> None:
        """Do nothing: stale rows are dropped at once."""

    def _read(
        self, wanted: Mapping[str, Keys], missed: Mapping[str, np.ndarray], out: Mapping[str, np.ndarray]
    ) -> int:
        """Fill `out` with what the shards return in time; return for how many keys they did."""
        if not self.policy.waits:
            self._background.append(wanted)
            self._has_background.set()
            return 0
        num_read, since = 0, self._num_resets
        for name, parts in self.reads.read(wanted).items():
            for part in parts:
                valid_M = self._store(name, wanted[name].take(part.at_M), part, since)
                out[name][missed[name][part.at_M[valid_M]]] = part.rows_MD[valid_M]
                num_read += int(valid_M.sum())
        return num_read

    def _store(self, name: str, keys: Keys, part: FetchedRows, since: int) -> np.ndarray:
        """Cache the fetched rows that no applied delta is newer than; bool [M]: which rows may be used at
        all. `since`: `_num_resets` when they were requested. Rows that were requested before a bootstrap or
        a refused record are not cached: they may lack a change that is not seen again."""
        version_M = np.uint64(packed_version(part.incarnation, 0)) + part.sequence_M
        bucket_M = kernels.buckets(keys.table_U, keys.id_U, self.num_buckets)
        with self._lock:
            applied_M = self._applied[name][bucket_M]
            valid_M = version_M >> _SEQUENCE_BITS >= applied_M >> _SEQUENCE_BITS
            current_M = valid_M & (version_M >= applied_M)
            if since == self._num_resets and not self.needs_bootstrap:
                stack = self._stacks[name]
                current_M &= stack.rows.index.find(keys) < 0
                stack.add(
                    keys.take(current_M),
                    part.rows_MD[current_M],
                    part.exists_M[current_M] != 0,
                    version_M[current_M],
                )
        return valid_M

    def _apply_barrier(self, stack: CachedTable, barrier: pb.Barrier) -> bool:
        version = packed_version(barrier.incarnation, 0)
        with self._lock:
            if version < int(self._applied[barrier.stack][barrier.bucket]):
                return False
            stack.drop(barrier.bucket, version)
            self._applied[barrier.stack][barrier.bucket] = version
        return True


def packed_version(incarnation: int, sequence: int) -> int:
    """Both in one integer that grows with them."""
    return incarnation << _SEQUENCE_BITS | sequence


class CachedTable:
    """Cached rows of one stack, evicted by CLOCK. Not thread-safe.

    It never holds more than `capacity` keys, a power of two. At most a quarter of them are keys that are
    known to have no row.
    """

    def __init__(self, tables: Sequence[Table], *, seed: int, num_buckets: int, capacity: int) -> None:
        self.rows = EmbeddingTable(tables, seed=seed, num_buckets=num_buckets)
        self.capacity, self.num_evicted = capacity, 0
        self.clear()

    def clear(self) -> None:
        """Remove all keys."""
        self.rows.clear()
        self._hand = self.num_without_row = 0
        self._version_N = np.zeros(self.rows.index.capacity, np.uint64)  # of each row, as `packed_version`

    @property
    def num_keys(self) -> int:
        return self.rows.index.num_live

    def find(self, keys: Keys) -> np.ndarray:
        """int64 [U]: row numbers, -1 = not cached. The clock hand spares the keys that were found once."""
        row_U = self.rows.index.find(keys)
        self.rows.index.flags_N[row_U[row_U >= 0]] |= USED
        return row_U

    def gather(self, keys: Keys, row_U: np.ndarray) -> np.ndarray:
        """float32 [U, D]: the rows with these numbers; initial values for keys without a row or not
        cached."""
        has_row_U = (row_U >= 0) & (self.rows.index.flags_N[row_U] & NO_ROW == 0)
        return self.rows.gather_at(keys, np.where(has_row_U, row_U, -1))

    def add(self, keys: Keys, rows_UD: np.ndarray, exists_U: np.ndarray, version_U: np.ndarray) -> None:
        """Insert unique keys that are not cached; others are evicted to make room.

        `exists_U` (bool): whether the key has a row. Of more keys than `capacity`, the last stay.
        """
        max_absent = self.capacity // _MAX_ABSENT_SHARE
        absent_M, with_M = np.flatnonzero(~exists_U)[-max_absent:], np.flatnonzero(exists_U)
        chosen_M = np.concatenate([absent_M, with_M])[-self.capacity :]
        num_absent = int((~exists_U[chosen_M]).sum())
        self._evict(self.num_without_row + num_absent - max_absent, NO_ROW)
        self._evict(self.num_keys + len(chosen_M) - self.capacity, 0)
        self.rows.reserve(len(chosen_M))
        if len(self._version_N) < self.rows.index.capacity:
            self._version_N = grown(self._version_N, self.rows.index.capacity)
        row_M = self.rows.put(keys.take(chosen_M), rows_UD[chosen_M])
        self._version_N[row_M] = version_U[chosen_M]
        self.rows.index.flags_N[row_M[:num_absent]] |= NO_ROW
        self.num_without_row += num_absent

    def update(self, keys: Keys, rows_LD: np.ndarray, version: int) -> None:
        """Apply a delta to its keys that are cached and older: the first L get these rows, the others have
        none."""
        row_U = self.rows.index.find(keys)
        older_U = (row_U >= 0) & (self._version_N[row_U] < np.uint64(version))
        num_live = len(rows_LD)
        live_M, gone_M = np.flatnonzero(older_U[:num_live]), np.flatnonzero(older_U[num_live:]) + num_live
        flags_N = self.rows.index.flags_N
        self.num_without_row -= self._count_without_row(row_U[older_U])
        self.rows.rows_ND[row_U[live_M]] = rows_LD[live_M]
        flags_N[row_U[live_M]] &= 255 - NO_ROW
        flags_N[row_U[gone_M]] |= NO_ROW
        self.num_without_row += len(gone_M)
        self._version_N[row_U[older_U]] = version

    def drop(self, bucket: int, below: int) -> None:
        """Remove a bucket's keys whose version is below this one."""
        row_M = self.rows.index.in_buckets((bucket,))
        self._remove(row_M[self._version_N[row_M] < np.uint64(below)])

    def _evict(self, num: int, only: int) -> None:
        if num > 0:
            row_M, self._hand = advance_hand(
                self.rows.index.flags_N, self.rows.index.used, self._hand, num, only
            )
            self.num_evicted += len(row_M)
            self._remove(row_M)

    def _remove(self, row_M: np.ndarray) -> None:
        self.num_without_row -= self._count_without_row(row_M)
        self.rows.index.remove(self.rows.index.keys_at(row_M))

    def _count_without_row(self, row_M: np.ndarray) -> int:
        return int((self.rows.index.flags_N[row_M] & NO_ROW != 0).sum())


def row_bytes(width: int) -> int:
    """Memory of one cached row."""
    return 4 * width + _OVERHEAD_BYTES


@njit(cache=True, nogil=True)
def advance_hand(flags_N: np.ndarray, used: int, hand: int, wanted: int, only: int) -> tuple[np.ndarray, int]:
    """Choose rows to evict by CLOCK: (int64 [M] row numbers, at most `wanted`; the new position of the hand).

    A row that was requested since the hand passed is spared once. `only`: flags of which a row must have one,
    0 = any row.
    """
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
                flags_N[hand] = flags & (255 - LIVE)  # so that it is not chosen twice
                found += 1
        hand = hand + 1 if hand + 1 < used else 0
    for m in range(found):
        flags_N[out_M[m]] |= LIVE
    return out_M[:found], hand


def precompile() -> None:
    """Compile the kernel into numba's cache."""
    advance_hand(np.zeros(1, np.uint8), 1, 0, 1, 0)


class PartialReplica:
    """Some buckets in a full replica, the others in a cache. Implements
    `serving.rows.row_follower.RowReplica`."""

    def __init__(self, replica: Replica, cache: RowCache) -> None:
        self.replica, self.cache = replica, cache
        self._replicated_B = np.zeros(replica.num_buckets, np.bool_)
        self._replicated_B[list(replica.buckets)] = True

    @property
    def needs_bootstrap(self) -> bool:
        return self.replica.needs_bootstrap or self.cache.needs_bootstrap

    @property
    def stale(self) -> Collection[object]:
        return self.replica.stale

    @property
    def num_rows(self) -> int:
        return self.replica.num_rows + self.cache.num_rows

    @property
    def incarnation(self) -> int:
        return max(self.replica.incarnation, self.cache.incarnation)

    def apply(self, message: pb.RowDelta | pb.Barrier) -> bool:
        """Apply a message of the topic; return whether it changed rows. Raises as `Replica.apply`."""
        return (self.replica if message.bucket in self.replica.buckets else self.cache).apply(message)

    def bootstrap(self, transports: Sequence[Transport]) -> None:
        """Read the replica's buckets and empty the cache. Raises as `Replica.bootstrap`."""
        self.cache.bootstrap(transports)
        self.replica.bootstrap(transports)

    def mark_stale(self, bucket: int) -> None:
        self.replica.mark_stale(bucket)
        if bucket not in self.replica.buckets:
            self.cache.mark_stale(bucket)

    def repair(self, transports: Sequence[Transport]) -> None:
        self.replica.repair(transports)

    def gather(self, lookup: Lookup) -> dict[str, np.ndarray]:
        """Stack → float32 [U, D]."""
        in_replica = {
            n: self._replicated_B[kernels.buckets(s.table_U, s.id_U, len(self._replicated_B))]
            for n, s in lookup.stacks.items()
        }
        held = self.replica.gather(_part(lookup, in_replica))
        cached = self.cache.gather(_part(lookup, {n: ~mask_U for n, mask_U in in_replica.items()}))
        out = {}
        for name, mask_U in in_replica.items():
            out[name] = np.empty((len(mask_U), held[name].shape[1]), np.float32)
            out[name][mask_U], out[name][~mask_U] = held[name], cached[name]
        return out


def _part(lookup: Lookup, chosen: dict[str, np.ndarray]) -> Lookup:
    return Lookup(
        {n: StackLookup(s.table_U[chosen[n]], s.id_U[chosen[n]], {}) for n, s in lookup.stacks.items()}
    )
