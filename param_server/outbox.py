"""The outbox of a stack: which rows replicas have not got yet, in which version, and how old the events
behind them are.

A round takes everything that is unpublished. It is in flight until its deltas are acknowledged, else it is
unpublished again. One round at a time. A bucket's deltas of one incarnation are numbered from 1 in the order
in which they were taken.

A round is taken in steps, so that the shard's lock is held for a few milliseconds at a time, however many
rows there are: `collect` marks the rows, `plan` orders them, `number` gives the deltas their numbers, and
`copy` copies the rows of one delta. A row that changes between these steps is unpublished again, and the next
round sends it once more.

Letters: M rows or keys of one delta, L its live ones, D width, B buckets.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator
from typing import NamedTuple, TypeVar

import numpy as np

from param_server import kernels
from param_server.embedding_table import EmbeddingTable, KeyIndex, Keys, join_keys
from param_server.kernels import DISOWNED, IN_FLIGHT, UNPUBLISHED
from roostream.schema.ids import buckets_of

MAX_DELTA_BYTES = 512 << 10
SLICE_ROWS = 1 << 18
"""Rows that are read while the shard's lock is held once."""

T = TypeVar("T")


def run_to_end(steps: Generator[None, None, T]) -> T:
    """Run all steps at once; return their result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


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


class PlannedDelta(NamedTuple):
    """A delta whose rows have not been copied yet."""

    stack: str
    bucket: int
    sequence: int
    table: int
    row_M: np.ndarray  # int64: row numbers
    id_M: np.ndarray  # int64: ids of these rows
    gone_id_M: np.ndarray  # int64: ids whose rows are gone
    is_first: bool  # of this bucket and round
    more: bool


class PublishRound(NamedTuple):
    """The deltas of one round."""

    incarnation: int
    deltas: list[PlannedDelta]


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
        # Rows that could not be published since the start: not finite, or too long
        self.num_withheld = 0
        self.clear()

    def clear(self) -> None:
        """Forget all rows, tombstones and times: the table has none of these rows any more."""
        self._unsent: list[Keys] = []  # tombstones
        self._inflight: list[Keys] = []  # tombstones
        self._inflight_rows: list[np.ndarray] = []  # int64: numbers of the rows that are IN_FLIGHT
        self._has_numbers = True  # False between `collect` and `number`
        self._times_3B = np.zeros((3, self.embeddings.num_buckets), np.int64)
        self._inflight_times_3B = np.zeros((3, self.embeddings.num_buckets), np.int64)
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
        if len(keys):
            self._unsent.append(keys)

    def tombstones(self) -> Keys:
        """Keys whose tombstones are not acknowledged; some may have a row again by now."""
        return join_keys(*self._unsent, *self._inflight)

    def settled_after(self, bucket: int, row_M: np.ndarray) -> int:
        """The delta after which replicas of `bucket` have everything that its rows hold now; 0 = they have it
        already."""
        # Rows whose deltas have no numbers yet are in a delta after the last one, as unpublished rows are.
        flags = UNPUBLISHED if self._has_numbers else UNPUBLISHED | IN_FLIGHT
        gone = join_keys(*self._unsent, *(() if self._has_numbers else self._inflight))
        unpublished = bool((self.embeddings.index.flags_N[row_M] & flags).any()) or bool(
            (buckets_of(gone.id_U, gone.table_U, self.embeddings.num_buckets) == bucket).any()
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

    def collect(self) -> Generator[None, None, tuple[np.ndarray, Keys, Keys]]:
        """First step of a round: mark everything that is unpublished as in flight, until `settle`.

        Returns (row numbers int64 [M], their keys, keys that have no row). The lock may be released between
        two steps of the generator.
        """
        index = self.embeddings.index
        self._has_numbers = False
        self._inflight, self._unsent = self._unsent, []
        self._inflight_times_3B, self._times_3B = self._times_3B, np.zeros_like(self._times_3B)
        keys, absent = [], []
        for rows in index.slices(SLICE_ROWS):
            row_M = index.flagged(UNPUBLISHED, rows)
            index.replace_flags_at(row_M, UNPUBLISHED, IN_FLIGHT)
            self._inflight_rows.append(row_M)
            keys.append(index.keys_at(row_M))
            yield
        for gone in self._inflight:
            absent.append(gone.take(index.find(gone) < 0))
            yield
        return (
            np.concatenate([np.zeros(0, np.int64), *self._inflight_rows]),
            join_keys(*keys),
            join_keys(*absent),
        )

    def plan(self, row_M: np.ndarray, live: Keys, gone: Keys) -> list[PlannedDelta]:
        """Second step: divide what `collect` returned into deltas, without numbers. Needs no lock."""
        gone = gone.take(KeyIndex(self.embeddings.num_buckets).add_new(gone))
        keys = join_keys(live, gone)
        bucket_M = buckets_of(keys.id_U, keys.table_U, self.embeddings.num_buckets)
        # Stable: live keys come first in each table of a bucket.
        order_M = np.lexsort((keys.table_U, bucket_M))
        bucket_M, table_M = bucket_M[order_M], keys.table_U[order_M]
        max_keys = max(self.max_delta_bytes // (8 + 4 * self.embeddings.width), 1)
        starts = _starts(bucket_M, table_M, max_keys)
        planned = []
        for n, start in enumerate(starts):
            end = starts[n + 1] if n + 1 < len(starts) else len(order_M)
            chosen, bucket = order_M[start:end], int(bucket_M[start])
            live_L = chosen[chosen < len(live)]
            planned.append(
                PlannedDelta(
                    stack=self.name,
                    bucket=bucket,
                    sequence=0,
                    table=int(table_M[start]),
                    row_M=row_M[live_L],
                    id_M=keys.id_U[live_L],
                    gone_id_M=keys.id_U[chosen[chosen >= len(live)]],
                    is_first=start == 0 or int(bucket_M[start - 1]) != bucket,
                    more=end < len(order_M) and int(bucket_M[end]) == bucket,
                )
            )
        return planned

    def number(self, planned: list[PlannedDelta]) -> list[PlannedDelta]:
        """Third step: give the deltas the next numbers of their buckets."""
        numbered = []
        for delta in planned:
            self.sequence_B[delta.bucket] += 1
            numbered.append(delta._replace(sequence=int(self.sequence_B[delta.bucket])))
        self._has_numbers = True
        return numbered

    def copy(self, planned: PlannedDelta, max_norm: float) -> Delta | None:
        """Last step, for each delta: copy its rows as they are now. None: nothing of it has to be sent.

        Rows that are not finite, or longer than `max_norm`, are counted and left out. Replicas keep what they
        have, or get a tombstone if what they have belongs to a history that was rolled back. Rows that have
        expired since `collect` are left out; the next round has their tombstones.
        """
        index = self.embeddings.index
        here_M = (index.flags_N[planned.row_M] & IN_FLIGHT) != 0
        row_M, id_M = planned.row_M[here_M], planned.id_M[here_M]
        rows_MD = kernels.take_rows(self.embeddings.rows_ND, row_M)
        good_M = kernels.publishable(rows_MD, max_norm)
        gone_id_M = planned.gone_id_M
        if not good_M.all():
            self.num_withheld += int(len(good_M) - good_M.sum())
            disowned_M = ~good_M & ((index.flags_N[row_M] & DISOWNED) != 0)
            gone_id_M = np.concatenate([gone_id_M, id_M[disowned_M]])
            id_M, rows_MD = id_M[good_M], rows_MD[good_M]
        if not len(id_M) and not len(gone_id_M) and planned.is_first and not planned.more:
            return None
        return Delta(
            planned.stack,
            planned.bucket,
            planned.sequence,
            planned.table,
            np.concatenate([id_M, gone_id_M]),
            rows_MD,
            planned.more,
            *self._inflight_times_3B[:, planned.bucket].tolist(),
        )

    def settle(self, acknowledged: bool, incarnation_is_same: bool = True) -> Generator[None, None, None]:
        """End the round: its deltas were all acknowledged, or some may be lost and everything in it is
        unpublished again. The lock may be released between two steps of the generator."""
        while self._inflight_rows:
            row_M = self._inflight_rows.pop()
            if acknowledged:
                self.embeddings.index.replace_flags_at(row_M, IN_FLIGHT, also=DISOWNED)
            else:
                self.embeddings.index.replace_flags_at(row_M, IN_FLIGHT, UNPUBLISHED)
            if self._inflight_rows:
                yield
        if not acknowledged:
            self._unsent = [*self._inflight, *self._unsent]
            self._times_3B = _older(self._times_3B, self._inflight_times_3B)
        elif incarnation_is_same:
            self.acknowledged_B = self.sequence_B.copy()
        self._inflight, self._has_numbers = [], True
        self._inflight_times_3B = np.zeros_like(self._times_3B)


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
