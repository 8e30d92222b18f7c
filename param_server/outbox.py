"""The outbox of a stack: which rows replicas have not got yet, in which version, and how old the events
behind them are.

A round takes everything that is unpublished. It is in flight until its deltas are acknowledged, else it is
unpublished again. One round at a time. A bucket's deltas of one incarnation are numbered from 1 in the order
in which they were taken.

Letters: M rows or keys of one delta, L its live ones, D width, B buckets.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np

from param_server import kernels
from param_server.embedding_table import EmbeddingTable, KeyIndex, Keys, join_keys, no_keys
from param_server.kernels import DISOWNED, IN_FLIGHT, UNPUBLISHED
from roostream.schema.ids import buckets_of

MAX_DELTA_BYTES = 512 << 10


class Delta(NamedTuple):
    """One message of the topic `rows`, before it is encoded."""

    stack: str
    bucket: int
    sequence: int
    table: int
    id_M: np.ndarray  # int64: live keys first
    rows_LD: np.ndarray  # float32
    more: bool  # more deltas of this bucket and round follow
    oldest_engagement_ms: int
    oldest_close_ms: int
    oldest_trained_ms: int


class PublishRound(NamedTuple):
    """The deltas of one round."""

    incarnation: int
    deltas: list[Delta]


class Rollback(NamedTuple):
    """What replicas may have seen beyond the manifest: deltas from these offsets on."""

    incarnation: int
    rows_end: dict[int, int]
    buckets: frozenset[int]  # the shard's


class BucketScan(NamedTuple):
    """One bucket as a scan returns it."""

    bucket: int
    sequence: int  # last delta taken
    settles_at: int  # the delta after which replicas have all of this; 0 = they have it
    incarnation: int
    keys: Keys
    rows_MD: np.ndarray


class Outbox:
    """The outbox of stack `name`, whose rows are marked in the index of `embeddings`; guarded by the same
    lock."""

    def __init__(self, name: str, embeddings: EmbeddingTable) -> None:
        self.name, self.embeddings, self.max_delta_bytes = name, embeddings, MAX_DELTA_BYTES
        self.num_withheld = 0  # rows that could not be published: not finite, or too long
        self._unsent = no_keys()
        self._inflight = no_keys()
        self._times_3B = np.zeros((3, embeddings.num_buckets), np.int64)
        self._inflight_times_3B = np.zeros((3, embeddings.num_buckets), np.int64)
        self.begin_incarnation()

    def begin_incarnation(self) -> None:
        """Start a new incarnation: sequence numbers start again. What is unpublished stays so."""
        self.sequence_B = np.zeros(self.embeddings.num_buckets, np.int64)
        self.acknowledged_B = np.zeros(self.embeddings.num_buckets, np.int64)

    def note_change(self, touched_B: np.ndarray, engagement_ms: int, close_ms: int, trained_ms: int) -> None:
        """Note that buckets (bool [B]) changed because of events of these times; 0 = unknown."""
        times_3 = np.array([engagement_ms, close_ms, trained_ms], np.int64)
        self._times_3B[:, touched_B] = _older(self._times_3B[:, touched_B], times_3[:, None])

    def add_tombstones(self, keys: Keys) -> None:
        """Record that replicas must delete the rows of these keys."""
        self._unsent = join_keys(self._unsent, keys)

    def tombstones(self) -> Keys:
        """Keys whose tombstones are not acknowledged; some may have a row again by now."""
        return join_keys(self._unsent, self._inflight)

    def settled_after(self, bucket: int, row_M: np.ndarray) -> int:
        """The delta after which replicas of `bucket` have everything that its rows hold now; 0 = they have it
        already."""
        unpublished = bool((self.embeddings.index.flags_N[row_M] & UNPUBLISHED).any()) or bool(
            (buckets_of(self._unsent.id_U, self._unsent.table_U, self.embeddings.num_buckets) == bucket).any()
        )
        sequence = int(self.sequence_B[bucket])
        return sequence + 1 if unpublished else sequence if self.acknowledged_B[bucket] < sequence else 0

    def scan_bucket(self, bucket: int, row_M: np.ndarray, max_norm: float, incarnation: int) -> BucketScan:
        """`bucket`, whose rows are these, as far as they may be published."""
        rows_MD = kernels.take_rows(self.embeddings.rows_ND, row_M)
        good_M = kernels.publishable(rows_MD, max_norm)
        keys, settles_at = self.embeddings.index.keys_at(row_M[good_M]), self.settled_after(bucket, row_M)
        return BucketScan(
            bucket, int(self.sequence_B[bucket]), settles_at, incarnation, keys, rows_MD[good_M]
        )

    def take(self, max_norm: float) -> list[Delta]:
        """Take and number deltas of everything unpublished; they are in flight until `settle`.

        Rows that are not finite, or longer than `max_norm`, are counted and left out. Replicas keep what they
        have, or get a tombstone if what they have belongs to a history that was rolled back.
        """
        index = self.embeddings.index
        row_M = index.flagged(UNPUBLISHED)
        index.replace_flags(UNPUBLISHED, IN_FLIGHT)
        rows_MD = kernels.take_rows(self.embeddings.rows_ND, row_M)
        good_M = kernels.publishable(rows_MD, max_norm)
        self.num_withheld += int(len(good_M) - good_M.sum())
        withheld = no_keys()
        if not good_M.all():
            withheld = index.keys_at(row_M[~good_M & ((index.flags_N[row_M] & DISOWNED) != 0)])
            row_M, rows_MD = row_M[good_M], rows_MD[good_M]
        gone = self._unsent.take(index.find(self._unsent) < 0)
        gone = gone.take(KeyIndex(self.embeddings.num_buckets).add_new(gone))
        self._inflight, self._unsent = gone, no_keys()
        self._inflight_times_3B, self._times_3B = self._times_3B, np.zeros_like(self._times_3B)
        return self._deltas(index.keys_at(row_M), rows_MD, join_keys(gone, withheld))

    def settle(self, acknowledged: bool, incarnation_is_same: bool = True) -> None:
        """End the round: its deltas were all acknowledged, or some may be lost and everything in it is
        unpublished again."""
        if acknowledged:
            self.embeddings.index.replace_flags(IN_FLIGHT, also=DISOWNED)
        else:
            self.embeddings.index.replace_flags(IN_FLIGHT, UNPUBLISHED)
        if not acknowledged:
            self._unsent = join_keys(self._inflight, self._unsent)
            self._times_3B = _older(self._times_3B, self._inflight_times_3B)
        elif incarnation_is_same:
            self.acknowledged_B = self.sequence_B.copy()
        self._inflight = no_keys()

    def _deltas(self, live: Keys, rows_MD: np.ndarray, gone: Keys) -> list[Delta]:
        keys = join_keys(live, gone)
        bucket_M = buckets_of(keys.id_U, keys.table_U, self.embeddings.num_buckets)
        order_M = np.lexsort(
            (keys.table_U, bucket_M)
        )  # stable: live keys come first in each table of a bucket
        bucket_M, table_M = bucket_M[order_M], keys.table_U[order_M]
        max_keys = max(self.max_delta_bytes // (8 + 4 * self.embeddings.width), 1)
        starts = _starts(bucket_M, table_M, max_keys)
        deltas = []
        for n, start in enumerate(starts):
            end = starts[n + 1] if n + 1 < len(starts) else len(order_M)
            chosen = order_M[start:end]
            bucket = int(bucket_M[start])
            self.sequence_B[bucket] += 1
            deltas.append(
                Delta(
                    self.name,
                    bucket,
                    int(self.sequence_B[bucket]),
                    int(table_M[start]),
                    keys.id_U[chosen],
                    rows_MD[chosen[chosen < len(live)]],
                    end < len(order_M) and int(bucket_M[end]) == bucket,
                    *self._inflight_times_3B[:, bucket].tolist(),
                )
            )
        return deltas


def _starts(bucket_M: np.ndarray, table_M: np.ndarray, max_keys: int) -> list[int]:
    """Where deltas begin: at each new bucket or table, and after `max_keys` keys of one."""
    if not len(bucket_M):
        return []
    changes = np.flatnonzero((np.diff(bucket_M) != 0) | (np.diff(table_M.astype(np.int64)) != 0)) + 1
    edges = [0, *changes.tolist(), len(bucket_M)]
    return [at for a, b in itertools.pairwise(edges) for at in range(a, b, max_keys)]


def _older(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Elementwise the smaller time, where 0 is unknown."""
    return np.where((a == 0) | ((b > 0) & (b < a)), b, a)
