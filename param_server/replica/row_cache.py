"""The rows that requests ask for, within a bound of memory, where all of them are too many: read from the shards when they are
missed, kept up by the `rows` topic, forgotten when others need the room.

What is here has a version each: that of the bucket's last delta when the shard gave the row. A delta changes what is here and
older than it, and brings nothing. So that nothing that is here misses a change:

1 Only what is followed is kept: the topic's ends are noted (`bootstrap`) before the first row is read.
2 A row that was read is kept unless a later delta of its bucket was applied meanwhile: that may have had it. It is used once.
3 Where a number was left out, keys older than the one before the next are forgotten; behind a Barrier those of older
  incarnations; of a record that was refused, the bucket's.

Rows never go back (G4): what is here is changed by newer deltas only, and a shard of an older incarnation is not believed.

Letters: U keys asked for, M missed ones, D width, B buckets.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import deque
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from param_server import kernels
from param_server.config import MAX_PUBLISH_NORM
from param_server.deltas import columns_of
from param_server.index import Keys
from param_server.replica.cached_stack import CachedStack, bytes_of_a_row
from param_server.replica.shard_reads import Fetched, ShardReads
from roostream.errors import SchemaError
from roostream.runtime.kafka.topics import DEFAULT_BUCKETS
from roostream.runtime.rpc.transport import Transport
from roostream.schema.schema import Schema
from roostream.wire import roo_pb2 as pb
from roostream.wire.lookup import Lookup

_MIN_KEYS = 64
_MAX_WAITING = 64  # gathers whose misses are to be read later
_ALL = (1 << 64) - 1
_SEQUENCE_BITS = 40


@dataclasses.dataclass(frozen=True, kw_only=True)
class CachePolicy:
    """How much is kept, and what a missed key costs: a wait for its shard, or its initial value until it was read beside."""

    max_bytes: int
    waits: bool = True
    max_norm: float = MAX_PUBLISH_NORM  # of a row in a delta; the shards' `max_publish_norm`


class RowCache:
    """See `serving.rows.row_follower.RowReplica`. Thread-safe."""

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
        self.num_asked = self.num_missed = self.num_unread = self.num_passed = 0
        keys = policy.max_bytes // sum(bytes_of_a_row(tables[0].dim) for tables in schema.stacks.values())
        capacity = 1 << (max(keys, _MIN_KEYS).bit_length() - 1)
        self._stacks = {
            name: CachedStack(tables, seed=seed, num_buckets=num_buckets, capacity=capacity)
            for name, tables in schema.stacks.items()
        }
        self._known = {
            name: np.zeros(num_buckets, np.uint64) for name in schema.stacks
        }  # B: newest version applied
        self._lock = threading.Lock()
        self._waiting: deque[Mapping[str, Keys]] = deque(maxlen=_MAX_WAITING)
        self._asked = threading.Event()
        self._of_thread = threading.local()

    @property
    def num_rows(self) -> int:
        return sum(stack.num_keys - stack.num_without_row for stack in self._stacks.values())

    @property
    def num_without_row(self) -> int:
        return sum(stack.num_without_row for stack in self._stacks.values())

    @property
    def num_evicted(self) -> int:
        return sum(stack.num_evicted for stack in self._stacks.values())

    @property
    def complete(self) -> bool:
        """Whether this thread's newest gather had in time what it waited for."""
        return bool(getattr(self._of_thread, "complete", True))

    def gather(self, lookup: Lookup) -> dict[str, np.ndarray]:
        """Stack → float32 [U, D]; initial values for keys without a row, and for those that couldn't be read in time."""
        out: dict[str, np.ndarray] = {}
        missed: dict[str, np.ndarray] = {}
        with self._lock:
            for name, found in lookup.stacks.items():
                keys, stack = Keys(found.table_U, found.id_U), self._stacks[name]
                place_U = stack.find(keys)
                out[name] = stack.rows(keys, place_U)
                missed[name] = np.flatnonzero(place_U < 0)
                self.num_asked += len(keys)
        wanted = {
            name: Keys(lookup.stacks[name].table_U[at_M], lookup.stacks[name].id_U[at_M])
            for name, at_M in missed.items()
            if len(at_M)
        }
        num_missed = sum(map(len, wanted.values()))
        self.num_missed += num_missed
        num_read = self._read(wanted, missed, out) if wanted else 0
        self.num_unread += num_missed - num_read
        self._of_thread.complete = num_read == num_missed or not self.policy.waits
        return out

    def run(self, stop: threading.Event) -> None:
        """Read beside what gathers didn't wait for, and who has which bucket, until `stop`."""
        while not stop.is_set():
            self.reads.learn()
            if self._asked.wait(0.2):
                self.read_waiting()

    def read_waiting(self) -> None:
        """Read what gathers didn't wait for."""
        self._asked.clear()
        while self._waiting:
            wanted = self._waiting.popleft()
            for name, parts in self.reads.read(wanted).items():
                for part in parts:
                    self._keep(name, wanted[name].take(part.at_M), part)

    def apply(self, message: pb.RowDelta | pb.Barrier) -> bool:
        """Take one message of the topic; False if it was not newer than what was applied. Raises as `Replica.apply`."""
        stack = self._stacks.get(message.stack)
        if stack is None or message.bucket >= self.num_buckets:
            raise SchemaError(
                f"rows of stack {message.stack!r}, bucket {message.bucket}: the schema has no such; use one schema"
            )
        if isinstance(message, pb.Barrier):
            return self._barrier(stack, message)
        keys, rows_LD = columns_of(message, stack.held.width, self.policy.max_norm)
        version = version_of(message.incarnation, message.sequence)
        with self._lock:
            known = int(self._known[message.stack][message.bucket])
            if version <= known:
                return False
            if version != known + 1:
                stack.drop(message.bucket, version - 1)
            stack.change(keys, rows_LD, version)
            self._known[message.stack][message.bucket] = version
        return True

    def bootstrap(self, transports: Sequence[Transport]) -> None:
        """The topic's ends were noted: what comes from now on is followed."""
        self.reads.learn()
        with self._lock:
            for name, stack in self._stacks.items():
                stack.clear()
                self._known[name][:] = 0
            self.needs_bootstrap = False

    def doubt(self, bucket: int) -> None:
        """A record of this bucket was not applied: it may have brought anything."""
        with self._lock:
            if 0 <= bucket < self.num_buckets:
                for stack in self._stacks.values():
                    stack.drop(bucket, _ALL)
            else:
                self.needs_bootstrap = True

    def mend(self, transports: Sequence[Transport]) -> None:
        """Nothing is ever stale: what may be is forgotten."""

    def _read(
        self, wanted: Mapping[str, Keys], missed: Mapping[str, np.ndarray], out: Mapping[str, np.ndarray]
    ) -> int:
        """Fill in what the shards give in time; for how many keys they did."""
        if not self.policy.waits:
            self._waiting.append(wanted)
            self._asked.set()
            return 0
        num_read = 0
        for name, parts in self.reads.read(wanted).items():
            for part in parts:
                believed_M = self._keep(name, wanted[name].take(part.at_M), part)
                out[name][missed[name][part.at_M[believed_M]]] = part.rows_MD[believed_M]
                num_read += int(believed_M.sum())
        return num_read

    def _keep(self, name: str, keys: Keys, part: Fetched) -> np.ndarray:
        """bool [M]: which of the rows that a shard gave may be used; those that no delta passed are held."""
        version_M = np.uint64(version_of(part.incarnation, 0)) + part.sequence_M
        bucket_M = kernels.buckets(keys.table_U, keys.id_U, self.num_buckets)
        with self._lock:
            known_M = self._known[name][bucket_M]
            believed_M = version_M >> _SEQUENCE_BITS >= known_M >> _SEQUENCE_BITS
            kept_M = believed_M & (version_M >= known_M)
            self.num_passed += int((believed_M & ~kept_M).sum())
            if not self.needs_bootstrap:
                stack = self._stacks[name]
                kept_M &= stack.held.index.find(keys) < 0
                stack.add(
                    keys.take(kept_M), part.rows_MD[kept_M], part.there_M[kept_M] != 0, version_M[kept_M]
                )
        return believed_M

    def _barrier(self, stack: CachedStack, barrier: pb.Barrier) -> bool:
        version = version_of(barrier.incarnation, 0)
        with self._lock:
            if version < int(self._known[barrier.stack][barrier.bucket]):
                return False
            stack.drop(barrier.bucket, version)
            self._known[barrier.stack][barrier.bucket] = version
        return True


def version_of(incarnation: int, sequence: int) -> int:
    """Both in one number that grows with them."""
    return incarnation << _SEQUENCE_BITS | sequence
