"""Rows as serving reads them, all or some buckets' of them: bootstrapped from the shards, kept up by the `rows` topic. No
optimizer state. Where they are kept is the store's: this process' memory, or what several processes share (stores.py).

A bucket of a stack is the unit of versions: (incarnation, sequence). It comes whole, as it was at one moment, from a shard's
scan; then every delta moves it on. What is not newer than the bucket is dropped, so that no row ever goes back (G4), whatever
is read twice or late. Behind a Barrier older incarnations are dropped too: the same topic then brings what they had changed.
A bucket of which a delta was missed (a number left out, a record that can't be read) is stale until `mend` has read it from its
shard; it goes on with the rows that are here.

Letters: U keys asked for, D width.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from param_server import kernels
from param_server.config import MAX_PUBLISH_NORM
from param_server.deltas import columns_of
from param_server.index import Keys
from param_server.replica.shard_owners import asked_owners
from param_server.replica.stores import PrivateRows, RowStore
from roostream.errors import SchemaError, UnavailableError
from roostream.runtime.kafka.topics import DEFAULT_BUCKETS
from roostream.runtime.rpc.transport import Transport
from roostream.schema.schema import Schema
from roostream.wire import roo_pb2 as pb
from roostream.wire.lookup import Lookup

Version: TypeAlias = tuple[int, int]
"""(incarnation, sequence)."""

SCAN_ROWS = 50_000


@dataclasses.dataclass(frozen=True)
class Freshness:
    """The oldest event, close and training times behind the newest delta applied; 0 = unknown."""

    oldest_engagement_ms: int = 0
    oldest_close_ms: int = 0
    oldest_trained_ms: int = 0


class _StackRows(NamedTuple):
    """One stack's. Under the replica's lock."""

    store: RowStore
    versions: list[Version]  # by bucket
    unsettled: dict[int, Version]  # bucket → the delta with which all that a scan gave has been published


class Replica:
    """One writer, several readers; a reader sees whole rows, and all of one `gather` between two messages."""

    def __init__(
        self,
        schema: Schema,
        seed: int,
        *,
        num_buckets: int = DEFAULT_BUCKETS,
        max_norm: float = MAX_PUBLISH_NORM,
        buckets: Collection[int] = (),
        stores: Mapping[str, RowStore] | None = None,
    ) -> None:
        """`max_norm`: of a row in a delta; the shards' `max_publish_norm`. `buckets`: those whose rows are kept; none = all.
        `stores`: where each stack's are; None = in this process' memory."""
        self.schema, self.num_buckets, self.max_norm = schema, num_buckets, max_norm
        self.buckets = frozenset(buckets or range(num_buckets))
        self.needs_bootstrap = True
        self.stale: set[tuple[str, int]] = set()  # (stack, bucket); of the writer's thread
        self.freshness = Freshness()
        self.num_applied = self.num_dropped = 0
        stores = stores or {
            n: PrivateRows(t, seed=seed, num_buckets=num_buckets) for n, t in schema.stacks.items()
        }
        self._stacks = {name: _StackRows(store, [(0, 0)] * num_buckets, {}) for name, store in stores.items()}
        self._lock = threading.Lock()

    @property
    def num_rows(self) -> int:
        return sum(stack.store.num_rows for stack in self._stacks.values())

    def gather(self, lookup: Lookup) -> dict[str, np.ndarray]:
        """Stack → float32 [U, D]; keys without a row give the initial value that training begins with."""
        with self._lock:
            return {
                n: self._stacks[n].store.gather(Keys(s.table_U, s.id_U)) for n, s in lookup.stacks.items()
            }

    def version(self, stack: str, bucket: int) -> Version:
        return self._stacks[stack].versions[bucket]

    def apply(self, message: pb.RowDelta | pb.Barrier) -> bool:
        """Take one message of the topic; False if it was not newer than what is here.

        `needs_bootstrap` is True afterwards if deltas alone can't bring this replica up to date any more: note the topic's
        end, `bootstrap`, and go on from there.

        Raises:
            SchemaError: it names a stack or width that this schema doesn't have. Nothing was changed.
            WireError: its columns disagree, or a row is too long. Nothing was changed.

        After either, and for a record that is no message, `doubt` its bucket.
        """
        stack = self._stacks.get(message.stack)
        if stack is None or message.bucket >= self.num_buckets:
            raise SchemaError(
                f"rows of stack {message.stack!r}, bucket {message.bucket}: the schema has no such; use one schema"
            )
        if message.bucket not in self.buckets:
            return False
        if isinstance(message, pb.Barrier):
            return self._barrier(stack, message)
        keys, rows_LD = columns_of(message, stack.store.width, self.max_norm)
        with self._lock:
            applied = self._is_newer(stack, message)
            if applied:
                stack.store.put(keys.take(np.arange(len(rows_LD))), rows_LD)
                stack.store.remove(keys.take(np.arange(len(rows_LD), len(keys))))
                self.freshness = Freshness(
                    message.oldest_engagement_ms, message.oldest_close_ms, message.oldest_trained_ms
                )
        self.num_applied += applied
        self.num_dropped += not applied
        return applied

    def bootstrap(self, transports: Sequence[Transport], *, timeout_s: float = 30.0) -> None:
        """Take every shard's rows. Note the topic's end offsets before, and `apply` from there on afterwards.

        **If it fails** (UnavailableError, TransportError): the buckets that came are up to date, the others as they were;
        call again.
        """
        for stack in self._stacks:
            for transport in transports if len(self.buckets) == self.num_buckets else ():
                cursor = 0
                while cursor >= 0:
                    cursor = self._scan(transport, stack, cursor, SCAN_ROWS, timeout_s)
        if transports and len(self.buckets) < self.num_buckets:
            self.stale |= {(stack, bucket) for stack in self._stacks for bucket in self.buckets}
            self.mend(transports, timeout_s=timeout_s)
        self.needs_bootstrap = False

    def doubt(self, bucket: int) -> None:
        """A record of this bucket's rows was not applied: it may have brought anything."""
        if 0 <= bucket < self.num_buckets:
            self.stale |= {(stack, bucket) for stack in self._stacks if bucket in self.buckets}
        else:
            self.needs_bootstrap = True

    def mend(self, transports: Sequence[Transport], *, timeout_s: float = 30.0) -> None:
        """Take the stale buckets from their shards (`transports`, all of them, in order), whole and at least as new as what is
        here.

        **If it fails** (UnavailableError, TransportError): those that came are up to date, the others stale; call again.
        """
        if not self.stale:
            return
        owners = asked_owners(transports, self.num_buckets, timeout_s=timeout_s)
        for stack, bucket in sorted(self.stale):
            if (stack, bucket) in self.stale:  # a page may have brought several
                self._scan(transports[owners.owner_B[bucket]], stack, bucket, 1, timeout_s)

    def _scan(self, transport: Transport, stack: str, cursor: int, limit: int, timeout_s: float) -> int:
        header = {"stack": stack, "cursor": cursor, "limit": limit}
        answer, arrays = transport.call("scan", header, timeout_s=timeout_s)
        self._take_page(stack, answer["buckets"], Keys(arrays[0], arrays[1]), arrays[2])
        return int(answer["cursor"])

    def _take_page(
        self, name: str, buckets: Sequence[Sequence[int]], keys: Keys, rows_UD: np.ndarray
    ) -> None:
        stack = self._stacks[name]
        bucket_U = kernels.buckets(keys.table_U, keys.id_U, self.num_buckets)
        for bucket, incarnation, sequence, settles_at in buckets:
            if bucket not in self.buckets:
                continue
            chosen_U = bucket_U == bucket
            with self._lock:
                if (incarnation, sequence) < stack.versions[bucket]:
                    raise UnavailableError(
                        f"rows of {name}, bucket {bucket}: expected version {stack.versions[bucket]} or later, got "
                        f"{(incarnation, sequence)}: that shard is being replaced; try again"
                    )
                stack.store.replace(bucket, keys.take(chosen_U), rows_UD[chosen_U])
                stack.versions[bucket] = (incarnation, sequence)
                stack.unsettled.pop(bucket, None)
                self.stale.discard((name, bucket))
                if settles_at:
                    stack.unsettled[bucket] = (incarnation, settles_at)

    def _is_newer(self, stack: _StackRows, delta: pb.RowDelta) -> bool:
        version, (incarnation, sequence) = (delta.incarnation, delta.sequence), stack.versions[delta.bucket]
        if not delta.more and version >= stack.unsettled.get(delta.bucket, (1 << 64, 0)):
            del stack.unsettled[delta.bucket]
        if version <= (incarnation, sequence):
            return False
        if delta.sequence > (sequence + 1 if delta.incarnation == incarnation else 1):
            self.stale.add((delta.stack, delta.bucket))
        stack.versions[delta.bucket] = version
        return True

    def _barrier(self, stack: _StackRows, barrier: pb.Barrier) -> bool:
        with self._lock:
            if barrier.incarnation < stack.versions[barrier.bucket][0]:
                return False
            unpublished = (
                stack.unsettled.get(barrier.bucket, (barrier.incarnation, 0))[0] < barrier.incarnation
            )
            self.needs_bootstrap |= barrier.rebootstrap or unpublished
            stack.versions[barrier.bucket] = max(stack.versions[barrier.bucket], (barrier.incarnation, 0))
        return True
