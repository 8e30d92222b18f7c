"""All rows as serving reads them: bootstrapped from the shards, kept up by the `rows` topic. No optimizer state.

A bucket of a stack is the unit of versions: (incarnation, sequence). It comes whole, as it was at one moment, from a shard's
scan; then every delta moves it on. What is not newer than the bucket is dropped, so that no row ever goes back (G4), whatever
is read twice or late. Behind a Barrier older incarnations are dropped too: the same topic then brings what they had changed.

Letters: U keys asked for, N places, D width.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from param_server import kernels
from param_server.deltas import columns_of
from param_server.index import KeyIndex, Keys, grown
from roo import roo_pb2 as pb
from roo.errors import SchemaError, UnavailableError
from roo.lookup import Lookup
from roo.schema import Schema, Table
from runtime.topics import NUM_BUCKETS
from runtime.transport import Transport

Version: TypeAlias = tuple[int, int]
"""(incarnation, sequence)."""

SCAN_ROWS = 50_000


@dataclasses.dataclass(frozen=True)
class Freshness:
    """The oldest event, close and training times behind the newest delta applied; 0 = unknown."""

    oldest_engagement_ms: int = 0
    oldest_close_ms: int = 0
    oldest_trained_ms: int = 0


class _Rows:
    """One stack's. Under the replica's lock."""

    def __init__(self, tables: Sequence[Table], seed: int, num_buckets: int) -> None:
        self.width = tables[0].dim
        self.seed = np.uint64(seed & (1 << 64) - 1)
        self.table_K = np.array([t.id for t in tables], np.uint32)
        self.scale_K = np.array([t.init_scale for t in tables], np.float32)
        self.index = KeyIndex(num_buckets)
        self.rows_ND = np.zeros((self.index.capacity, self.width), np.float32)
        self.versions: list[Version] = [(0, 0)] * num_buckets
        self.unsettled: dict[int, Version] = {}  # bucket → the delta with which all that a scan gave has been published

    def put(self, keys: Keys, rows_UD: np.ndarray) -> None:
        if self.index.reserve(len(keys)):
            self.rows_ND = grown(self.rows_ND, self.index.capacity)
        place_U, _ = self.index.add(keys)
        kernels.put_rows(self.rows_ND, place_U, rows_UD)

    def gather(self, keys: Keys) -> np.ndarray:
        out_UD = np.empty((len(keys), self.width), np.float32)
        kernels.gather(
            self.rows_ND, self.index.find(keys), keys.table_U, keys.id_U, self.seed, self.table_K, self.scale_K, out_UD
        )
        return out_UD


class Replica:
    """One writer, several readers; a reader sees whole rows, and all of one `gather` between two messages."""

    def __init__(self, schema: Schema, seed: int, *, num_buckets: int = NUM_BUCKETS) -> None:
        self.schema, self.seed, self.num_buckets = schema, seed, num_buckets
        self.needs_bootstrap = True
        self.freshness = Freshness()
        self.num_applied = self.num_dropped = 0
        self._stacks = {name: _Rows(tables, seed, num_buckets) for name, tables in schema.stacks.items()}
        self._lock = threading.Lock()

    @property
    def num_rows(self) -> int:
        return sum(rows.index.num_live for rows in self._stacks.values())

    def gather(self, lookup: Lookup) -> dict[str, np.ndarray]:
        """Stack → float32 [U, D]; keys without a row give the initial value that training begins with."""
        with self._lock:
            return {n: self._stacks[n].gather(Keys(s.table_U, s.id_U)) for n, s in lookup.stacks.items()}

    def version(self, stack: str, bucket: int) -> Version:
        return self._stacks[stack].versions[bucket]

    def apply(self, message: pb.RowDelta | pb.Barrier) -> bool:
        """Take one message of the topic; False if it was not newer than what is here.

        `needs_bootstrap` is True afterwards if deltas alone can't bring this replica up to date any more: note the topic's
        end, `bootstrap`, and go on from there.

        Raises:
            SchemaError: it names a stack or width that this schema doesn't have. Nothing was changed.
            WireError: its columns disagree. Nothing was changed.
        """
        rows = self._stacks.get(message.stack)
        if rows is None or message.bucket >= self.num_buckets:
            raise SchemaError(f"rows of stack {message.stack!r}, bucket {message.bucket}: the schema has no such; use one schema")
        if isinstance(message, pb.Barrier):
            return self._barrier(rows, message)
        keys, rows_LD = columns_of(message, rows.width)
        with self._lock:
            applied = self._is_newer(rows, message)
            if applied:
                rows.put(keys.take(np.arange(len(rows_LD))), rows_LD)
                rows.index.remove(keys.take(np.arange(len(rows_LD), len(keys))))
                self.freshness = Freshness(message.oldest_engagement_ms, message.oldest_close_ms, message.oldest_trained_ms)
        self.num_applied += applied
        self.num_dropped += not applied
        return applied

    def bootstrap(self, transports: Sequence[Transport], *, timeout_s: float = 30.0) -> None:
        """Take every shard's rows. Note the topic's end offsets before, and `apply` from there on afterwards.

        **If it fails** (UnavailableError, TransportError): the buckets that came are up to date, the others as they were;
        call again.
        """
        for stack in self._stacks:
            for transport in transports:
                cursor = 0
                while cursor >= 0:
                    header = {"stack": stack, "cursor": cursor, "limit": SCAN_ROWS}
                    answer, arrays = transport.call("scan", header, timeout_s=timeout_s)
                    self._take_page(stack, answer["buckets"], Keys(arrays[0], arrays[1]), arrays[2])
                    cursor = int(answer["cursor"])
        self.needs_bootstrap = False

    def _take_page(self, stack: str, buckets: Sequence[Sequence[int]], keys: Keys, rows_UD: np.ndarray) -> None:
        rows = self._stacks[stack]
        bucket_U = kernels.buckets(keys.table_U, keys.id_U, self.num_buckets)
        for bucket, incarnation, sequence, settles_at in buckets:
            chosen_U = bucket_U == bucket
            with self._lock:
                if (incarnation, sequence) < rows.versions[bucket]:
                    raise UnavailableError(
                        f"rows of {stack}, bucket {bucket}: expected version {rows.versions[bucket]} or later, got "
                        f"{(incarnation, sequence)}: that shard is being replaced; try again"
                    )
                rows.index.remove(rows.index.keys_at(rows.index.in_bucket(bucket)))
                rows.put(keys.take(chosen_U), rows_UD[chosen_U])
                rows.versions[bucket] = (incarnation, sequence)
                rows.unsettled.pop(bucket, None)
                if settles_at:
                    rows.unsettled[bucket] = (incarnation, settles_at)

    def _is_newer(self, rows: _Rows, delta: pb.RowDelta) -> bool:
        version = (delta.incarnation, delta.sequence)
        if not delta.more and version >= rows.unsettled.get(delta.bucket, (1 << 64, 0)):
            del rows.unsettled[delta.bucket]
        if version <= rows.versions[delta.bucket]:
            return False
        rows.versions[delta.bucket] = version
        return True

    def _barrier(self, rows: _Rows, barrier: pb.Barrier) -> bool:
        with self._lock:
            if barrier.incarnation < rows.versions[barrier.bucket][0]:
                return False
            unpublished = rows.unsettled.get(barrier.bucket, (barrier.incarnation, 0))[0] < barrier.incarnation
            self.needs_bootstrap |= barrier.rebootstrap or unpublished
            rows.versions[barrier.bucket] = max(rows.versions[barrier.bucket], (barrier.incarnation, 0))
        return True
