"""What of a stack readers are yet to be told: which rows, in which version, and how old the events behind them are.

Letters: M rows or keys of one delta, L its live ones, D width, B buckets.

A round takes everything that is unpublished; it is then in flight until its deltas are acknowledged, or unpublished again.
One round at a time. A bucket's deltas of one incarnation are numbered from 1 in the order in which they were taken.
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
    """One message of `rows`, before it is encoded."""

    stack: str
    bucket: int
    sequence: int
    table: int
    id_M: np.ndarray  # int64: live ones first
    rows_LD: np.ndarray  # float32
    more: bool  # other deltas of this bucket and round follow
    oldest_engagement_ms: int
    oldest_close_ms: int
    oldest_trained_ms: int


class PublishRound(NamedTuple):
    incarnation: int
    deltas: list[Delta]


class Rollback(NamedTuple):
    """What readers may have seen beyond the manifest: deltas from these offsets on."""

    incarnation: int
    rows_end: dict[int, int]
    buckets: frozenset[int]  # the shard's


class BucketScan(NamedTuple):
    """What a reader gets of a bucket that it asks for."""

    bucket: int
    sequence: int  # of the last delta taken
    settles_at: int  # the delta with which readers have got all of this; 0 = they have
    incarnation: int
    keys: Keys
    rows_MD: np.ndarray


class Outbox:
    """Of stack `name`, whose rows are marked in the index of `embeddings`; under the same lock as these."""

    def __init__(self, name: str, embeddings: EmbeddingTable) -> None:
        self.name, self.embeddings, self.max_delta_bytes = name, embeddings, MAX_DELTA_BYTES
        self.num_withheld = 0  # rows that were not finite or too large when their turn came
        self._waiting = no_keys()
        self._flying = no_keys()
        self._times_3B = np.zeros((3, embeddings.num_buckets), np.int64)
        self._flying_3B = np.zeros((3, embeddings.num_buckets), np.int64)
        self.begin()

    def begin(self) -> None:
        """A new incarnation: sequences begin again. What is unpublished stays so."""
        self.sequence_B = np.zeros(self.embeddings.num_buckets, np.int64)
        self.acknowledged_B = np.zeros(self.embeddings.num_buckets, np.int64)

    def touch(self, touched_B: np.ndarray, engagement_ms: int, close_ms: int, trained_ms: int) -> None:
        """Buckets (bool [B]) got updates from events as old as these; 0 = unknown."""
        times_3 = np.array([engagement_ms, close_ms, trained_ms], np.int64)
        self._times_3B[:, touched_B] = _older(self._times_3B[:, touched_B], times_3[:, None])

    def add_tombstones(self, keys: Keys) -> None:
        """Readers are to be told that these keys have no row."""
        self._waiting = join_keys(self._waiting, keys)

    def tombstones(self) -> Keys:
        """Those that readers haven't got; some may have a row again by now."""
        return join_keys(self._waiting, self._flying)

    def settles_at(self, bucket: int, row_M: np.ndarray) -> int:
        """The sequence with which readers of `bucket`, whose rows are at these places, have all that the rows hold now; 0 = they
        have it already."""
        waiting = bool((self.embeddings.index.flags_N[row_M] & UNPUBLISHED).any()) or bool(
            (
                buckets_of(self._waiting.id_U, self._waiting.table_U, self.embeddings.num_buckets) == bucket
            ).any()
        )
        sequence = int(self.sequence_B[bucket])
        return sequence + 1 if waiting else sequence if self.acknowledged_B[bucket] < sequence else 0

    def page(self, bucket: int, row_M: np.ndarray, max_norm: float, incarnation: int) -> BucketScan:
        """`bucket`, whose rows are at these places, as far as they may be published."""
        rows_MD = kernels.take_rows(self.embeddings.rows_ND, row_M)
        good_M = kernels.publishable(rows_MD, max_norm)
        keys, settles_at = self.embeddings.index.keys_at(row_M[good_M]), self.settles_at(bucket, row_M)
        return BucketScan(
            bucket, int(self.sequence_B[bucket]), settles_at, incarnation, keys, rows_MD[good_M]
        )

    def take(self, max_norm: float) -> list[Delta]:
        """Deltas of everything unpublished, numbered; they are in flight until `settle`. Rows that are not finite, or larger
        than `max_norm`, are counted and left out: readers keep what they have, or are told that there is none where what they
        have is of a history that is over."""
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
        gone = self._waiting.take(index.find(self._waiting) < 0)
        gone = gone.take(KeyIndex(self.embeddings.num_buckets).add_new(gone))
        self._flying, self._waiting = gone, no_keys()
        self._flying_3B, self._times_3B = self._times_3B, np.zeros_like(self._times_3B)
        return self._deltas(index.keys_at(row_M), rows_MD, join_keys(gone, withheld))

    def settle(self, acknowledged: bool, incarnation_is_same: bool = True) -> None:
        """The round's deltas were all acknowledged, or some of them may be lost: then everything in it is unpublished again."""
        if acknowledged:
            self.embeddings.index.replace_flags(IN_FLIGHT, also=DISOWNED)
        else:
            self.embeddings.index.replace_flags(IN_FLIGHT, UNPUBLISHED)
        if not acknowledged:
            self._waiting = join_keys(self._flying, self._waiting)
            self._times_3B = _older(self._times_3B, self._flying_3B)
        elif incarnation_is_same:
            self.acknowledged_B = self.sequence_B.copy()
        self._flying = no_keys()

    def _deltas(self, live: Keys, rows_MD: np.ndarray, gone: Keys) -> list[Delta]:
        keys = join_keys(live, gone)
        bucket_M = buckets_of(keys.id_U, keys.table_U, self.embeddings.num_buckets)
        order_M = np.lexsort(
            (keys.table_U, bucket_M)
        )  # stable: of each table of a bucket the live keys come first
        bucket_M, table_M = bucket_M[order_M], keys.table_U[order_M]
        most = max(self.max_delta_bytes // (8 + 4 * self.embeddings.width), 1)
        starts = _starts(bucket_M, table_M, most)
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
                    *self._flying_3B[:, bucket].tolist(),
                )
            )
        return deltas


def _starts(bucket_M: np.ndarray, table_M: np.ndarray, most: int) -> list[int]:
    """Where deltas begin: at each new bucket or table, and after `most` keys of one."""
    if not len(bucket_M):
        return []
    changes = np.flatnonzero((np.diff(bucket_M) != 0) | (np.diff(table_M.astype(np.int64)) != 0)) + 1
    edges = [0, *changes.tolist(), len(bucket_M)]
    return [at for a, b in itertools.pairwise(edges) for at in range(a, b, most)]


def _older(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Elementwise the smaller time, where 0 is unknown."""
    return np.where((a == 0) | ((b > 0) & (b < a)), b, a)
