"""The embedding rows that serving reads: all of them, or all rows of some buckets. No optimizer state.

A replica is bootstrapped from the shards and kept up to date by the topic `rows`. Each (stack, bucket) has a
version (incarnation, sequence). A scan of a shard gives a bucket as it was at one moment; deltas move it on
from there. A message that is not newer than the bucket is dropped, so no row goes back to an older state
(guarantee G4). After a Barrier, messages of older incarnations are dropped too; the topic then brings the
rows that they had changed.

A bucket is stale if a delta of it was missed (a gap in the sequence, an unreadable record). Its rows stay in
use until `repair` has read the bucket from its shard.

Letters: U requested keys, L live keys of a delta, D width.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Collection, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from param_server import kernels
from param_server.config import MAX_PUBLISH_NORM
from param_server.deltas import columns_of
from param_server.embedding_table import EmbeddingTable, Keys, slices_of
from param_server.replica.shard_reads import fetch_bucket_map
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
    """The oldest engagement, close and training times behind the newest delta applied; 0 = unknown."""

    oldest_engagement_ms: int = 0
    oldest_close_ms: int = 0
    oldest_trained_ms: int = 0


class _StackReplica(NamedTuple):
    """One stack; guarded by the replica's lock."""

    rows: EmbeddingTable
    versions: list[Version]  # by bucket
    unsettled: dict[int, Version]  # bucket → the delta that publishes the last of what its scan returned
    # Bucket → versions of its slices, while they are newer than the bucket's.
    slices: dict[int, list[Version]]


class Replica:
    """One writer thread, several readers. A reader sees whole rows, and one `gather` sees no message half
    applied."""

    def __init__(
        self,
        schema: Schema,
        seed: int,
        *,
        num_buckets: int = DEFAULT_BUCKETS,
        max_norm: float = MAX_PUBLISH_NORM,
        buckets: Collection[int] = (),
    ) -> None:
        """`max_norm`: norm limit of a row in a delta, the shards' `max_publish_norm`. `buckets`: the buckets
        that are kept, () = all."""
        self.schema, self.num_buckets, self.max_norm = schema, num_buckets, max_norm
        self.buckets = frozenset(buckets or range(num_buckets))
        self.needs_bootstrap = True
        self.stale: set[tuple[str, int]] = set()  # (stack, bucket); used by the writer thread only
        self.freshness = Freshness()
        self.num_applied = self.num_dropped = 0
        self.tables = {
            name: EmbeddingTable(tables, seed=seed, num_buckets=num_buckets)
            for name, tables in schema.stacks.items()
        }
        self._stacks = {
            name: _StackReplica(rows, [(0, 0)] * num_buckets, {}, {}) for name, rows in self.tables.items()
        }
        self._lock = threading.Lock()

    @property
    def num_rows(self) -> int:
        return sum(table.index.num_live for table in self.tables.values())

    def gather(self, lookup: Lookup) -> dict[str, np.ndarray]:
        """Stack → float32 [U, D]. Keys without a row give the initial value that training begins with."""
        with self._lock:
            return {n: self.tables[n].gather(Keys(s.table_U, s.id_U)) for n, s in lookup.stacks.items()}

    @property
    def incarnation(self) -> int:
        """The newest incarnation of which rows or barriers were applied."""
        return max(max(stack.versions)[0] for stack in self._stacks.values())

    def version(self, stack: str, bucket: int) -> Version:
        return self._stacks[stack].versions[bucket]

    def apply(self, message: pb.RowDelta | pb.Barrier) -> bool:
        """Apply one message of the topic; return False if it is not newer than the bucket.

        `needs_bootstrap` is True afterwards if deltas alone cannot bring this replica up to date. Then note
        the topic's end offsets, call `bootstrap`, and continue from those offsets.

        Raises:
            SchemaError: the schema does not have this stack, bucket or width. Nothing was changed.
            WireError: its columns disagree, or a row is too long. Nothing was changed.

        After either error, and for a record that cannot be decoded, call `mark_stale` for its bucket.
        """
        stack = self._stacks.get(message.stack)
        if stack is None or message.bucket >= self.num_buckets:
            raise unknown_bucket(message)
        if message.bucket not in self.buckets:
            return False
        if isinstance(message, pb.Barrier):
            return self._apply_barrier(stack, message)
        keys, rows_LD = columns_of(message, stack.rows.width, self.max_norm)
        num_live = len(rows_LD)
        with self._lock:
            applied = self._advance_version(stack, message)
            if applied:
                older_U = self._older(stack, message, keys)
                live_L, gone_M = older_U[:num_live], np.flatnonzero(older_U[num_live:]) + num_live
                stack.rows.reserve(int(live_L.sum()))
                stack.rows.put(keys.take(np.flatnonzero(live_L)), rows_LD[live_L])
                stack.rows.index.remove(keys.take(gone_M))
                self.freshness = Freshness(
                    message.oldest_engagement_ms, message.oldest_close_ms, message.oldest_trained_ms
                )
        self.num_applied += applied
        self.num_dropped += not applied
        return applied

    def bootstrap(self, transports: Sequence[Transport], *, timeout_s: float = 30.0) -> None:
        """Read all rows from the shards. Note the topic's end offsets before, and `apply` from there
        afterwards.

        **If it fails** (UnavailableError: also if no shard has a bucket; TransportError): the buckets that
        were read are up to date, the others are unchanged; call again.
        """
        if len(self.buckets) == self.num_buckets:
            for stack in self._stacks if transports else ():
                left = set(self.buckets)
                for transport in transports:
                    cursor = 0
                    while cursor >= 0:
                        cursor, read = self._scan(transport, stack, cursor, SCAN_ROWS, timeout_s)
                        left.difference_update(read)
                if left:
                    raise UnavailableError(
                        f"rows of {stack}: expected each bucket from one of {len(transports)} shards, got "
                        f"none of {len(left)} buckets such as {min(left)}: buckets are being moved, or "
                        "`shards` names one shard twice; try again"
                    )
        elif transports:
            self.stale |= {(stack, bucket) for stack in self._stacks for bucket in self.buckets}
            self.repair(transports, timeout_s=timeout_s)
        self.needs_bootstrap = False

    def mark_stale(self, bucket: int) -> None:
        """Record that a message of this bucket was not applied. An unknown bucket number makes every row
        doubtful."""
        if 0 <= bucket < self.num_buckets:
            self.stale |= {(stack, bucket) for stack in self._stacks if bucket in self.buckets}
        else:
            self.needs_bootstrap = True

    def repair(self, transports: Sequence[Transport], *, timeout_s: float = 30.0) -> None:
        """Read the stale buckets from their shards (`transports`: all shards, in order).

        **If it fails** (UnavailableError: also if a shard does not return a bucket that it should own;
        TransportError): the buckets that were read are up to date, the others stay stale; call again.
        """
        if not self.stale:
            return
        owners = fetch_bucket_map(transports, self.num_buckets, timeout_s=timeout_s)
        for stack, bucket in sorted(self.stale):
            if (stack, bucket) in self.stale:  # an earlier page may have brought it
                self._scan(transports[owners.owner_B[bucket]], stack, bucket, 1, timeout_s)
        if self.stale:
            stack, bucket = min(self.stale)
            raise UnavailableError(
                f"rows of {stack}: expected bucket {bucket} from shard {owners.owner_B[bucket]}, got none: "
                "buckets are being moved, or `shards` are not in the order of their `index`; try again"
            )

    def _scan(
        self, transport: Transport, stack: str, cursor: int, limit: int, timeout_s: float
    ) -> tuple[int, list[int]]:
        """Read buckets from number `cursor` on, about `limit` rows; return the next cursor, -1 at the end,
        and the buckets that were read."""
        header = {"stack": stack, "cursor": cursor, "limit": limit}
        answer, (table_U, id_U, rows_UD, *_) = transport.call("scan", header, timeout_s=timeout_s)
        if num_slices := int(answer.get("num_slices", 0)):
            bucket = int(answer["cursor"])
            if bucket in self.buckets:
                self._scan_slices(transport, stack, bucket, num_slices, timeout_s)
            return bucket + 1, [bucket]
        self._apply_scan(stack, answer["buckets"], Keys(table_U, id_U), rows_UD)
        return int(answer["cursor"]), [int(bucket) for bucket, *_ in answer["buckets"]]

    def _scan_slices(
        self, transport: Transport, name: str, bucket: int, num_slices: int, timeout_s: float
    ) -> None:
        """Read a bucket that is too large for one answer, slice by slice.

        The bucket changes meanwhile, so each slice has a version of its own; a delta is applied to the slices
        that are older than it, until all are equal. **If it fails:** the slices that were read are up to
        date, the bucket stays stale; call again.
        """
        stack, settles_at, versions = self._stacks[name], (0, 0), list[Version]()
        for index in range(num_slices):
            header = {"stack": name, "cursor": bucket, "limit": 1, "slice": index, "num_slices": num_slices}
            answer, (table_U, id_U, rows_UD, *_) = transport.call("scan", header, timeout_s=timeout_s)
            ((_, incarnation, sequence, settles),) = answer["buckets"]
            version = (int(incarnation), int(sequence))
            with self._lock:
                if version < stack.versions[bucket]:
                    raise _being_replaced(name, bucket, stack.versions[bucket], version)
                # Of slices that were cut in another number, the newest version is a safe one.
                known = stack.slices.get(bucket, [stack.versions[bucket]])
                known = known if len(known) == num_slices else [max(known)] * num_slices
                if version < known[index]:
                    raise _being_replaced(name, bucket, known[index], version)
                stack.slices[bucket] = known
                self._replace_slice(stack, bucket, index, num_slices, Keys(table_U, id_U), rows_UD)
                known[index] = version
            versions.append(version)
            if settles:
                settles_at = max(settles_at, (version[0], int(settles)))
        if versions[0][0] != versions[-1][0]:
            raise UnavailableError(
                f"rows of {name}, bucket {bucket}: the shard was restored while it was read; try again"
            )
        with self._lock:
            stack.versions[bucket] = min(versions)
            stack.unsettled.pop(bucket, None)
            self.stale.discard((name, bucket))
            if settles_at[1]:
                stack.unsettled[bucket] = settles_at

    def _replace_slice(
        self, stack: _StackReplica, bucket: int, index: int, num_slices: int, keys: Keys, rows_UD: np.ndarray
    ) -> None:
        """Make these keys the only ones of a slice."""
        present = stack.rows.index.keys_at(stack.rows.index.in_buckets((bucket,)))
        in_slice_U = slices_of(present, self.num_buckets, num_slices) == index
        stack.rows.index.remove(present.take(np.flatnonzero(in_slice_U)))
        stack.rows.reserve(len(keys))
        stack.rows.put(keys, rows_UD)

    def _older(self, stack: _StackReplica, delta: pb.RowDelta, keys: Keys) -> np.ndarray:
        """bool [U]: keys whose rows are older than the delta. All are, unless the bucket was read in
        slices."""
        version, versions = (delta.incarnation, delta.sequence), stack.slices.get(delta.bucket)
        if versions is None:
            return np.ones(len(keys), np.bool_)
        older_K = np.array([known < version for known in versions])
        if older_K.all():
            del stack.slices[delta.bucket]
        older_U: np.ndarray = older_K[slices_of(keys, self.num_buckets, len(versions))]
        return older_U

    def _apply_scan(
        self, name: str, buckets: Sequence[Sequence[int]], keys: Keys, rows_UD: np.ndarray
    ) -> None:
        stack = self._stacks[name]
        bucket_U = kernels.buckets(keys.table_U, keys.id_U, self.num_buckets)
        for bucket, incarnation, sequence, settles_at in buckets:
            if bucket not in self.buckets:
                continue
            chosen_U = bucket_U == bucket
            with self._lock:
                newest = max([stack.versions[bucket], *stack.slices.get(bucket, ())])
                if (incarnation, sequence) < newest:
                    raise _being_replaced(name, bucket, newest, (incarnation, sequence))
                stack.slices.pop(bucket, None)
                stack.rows.replace_bucket(bucket, keys.take(chosen_U), rows_UD[chosen_U])
                stack.versions[bucket] = (incarnation, sequence)
                stack.unsettled.pop(bucket, None)
                self.stale.discard((name, bucket))
                if settles_at:
                    stack.unsettled[bucket] = (incarnation, settles_at)

    def _advance_version(self, stack: _StackReplica, delta: pb.RowDelta) -> bool:
        """Move the bucket to the delta's version; False if the delta is not newer. A gap makes the bucket
        stale."""
        version, (incarnation, sequence) = (delta.incarnation, delta.sequence), stack.versions[delta.bucket]
        if not delta.more and version >= stack.unsettled.get(delta.bucket, (1 << 64, 0)):
            del stack.unsettled[delta.bucket]
        if version <= (incarnation, sequence):
            return False
        if delta.sequence > (sequence + 1 if delta.incarnation == incarnation else 1):
            self.stale.add((delta.stack, delta.bucket))
        stack.versions[delta.bucket] = version
        return True

    def _apply_barrier(self, stack: _StackReplica, barrier: pb.Barrier) -> bool:
        with self._lock:
            if barrier.incarnation < stack.versions[barrier.bucket][0]:
                return False
            unsettled, _ = stack.unsettled.get(barrier.bucket, (barrier.incarnation, 0))
            self.needs_bootstrap |= barrier.rebootstrap or unsettled < barrier.incarnation
            stack.versions[barrier.bucket] = max(stack.versions[barrier.bucket], (barrier.incarnation, 0))
        return True


def _being_replaced(name: str, bucket: int, known: Version, got: Version) -> UnavailableError:
    return UnavailableError(
        f"rows of {name}, bucket {bucket}: expected version {known} or later, got {got}: that shard is being "
        "replaced; try again"
    )


def unknown_bucket(message: pb.RowDelta | pb.Barrier) -> SchemaError:
    """The error for a message about a stack or bucket that this replica does not have."""
    return SchemaError(
        f"rows of stack {message.stack!r}, bucket {message.bucket}: expected a stack and bucket of this "
        "deployment; give serving and the shards one schema and one number of buckets"
    )
