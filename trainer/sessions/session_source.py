"""Chunks from a session of the warehouse: the order of its splits, cut into chunks of whatever size training asks for.

Offsets are positions (roostream/warehouse/sessions/session.py). Which rows a chunk has is a function of the positions, the size asked for and
the bounds, never of when rows arrived: what comes slowly is waited for, and after a restore the same chunks come again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from roostream.runtime.clock import Clock
from roostream.runtime.kafka.consumer import PartitionLag
from roostream.runtime.kafka.topics import SAMPLES, Partition, Progress
from roostream.runtime.work_unit import TableInput
from roostream.warehouse.sessions.session import ReadOrder, TableSplit
from roostream.warehouse.sessions.session_rows import Piece, SessionRows
from roostream.wire.batch import Batch
from trainer.batch_source import Chunk, NewestIds
from trainer.pipeline.stage_timer import StageTimer

MAX_EXPECTED = 64  # splits of which readers are told that they come


class SessionSource:
    """See `BatchSource`. A chunk that isn't full comes only before a bound, or at the end of everything."""

    def __init__(
        self,
        order: ReadOrder,
        rows: SessionRows,
        empty: Batch,
        clock: Clock,
        *,
        partitions: Collection[Partition],
        newest: Callable[[int], NewestIds],
        stages: StageTimer | None = None,
    ) -> None:
        """`partitions`: of the stream that follows, corrections among them where they are trained; `empty`: a batch without
        requests; `newest`: partition → what the stream must not train again."""
        self.order, self.rows, self.empty, self.clock = order, rows, empty, clock
        self.stages = stages or StageTimer(clock)
        self._newest, self._all = newest, tuple(sorted(partitions))
        self._newest_known: dict[Partition, NewestIds] = {}
        self._ends: Progress = {}
        self._reached: Progress | None = None  # those of `_ends` before which nothing is left
        self._gathered: list[Piece] = []
        self._num_gathered = 0
        self._expected_for: tuple[bool, Progress] = False, {}  # are partitions asked for in turns? bounds
        self._begin(self._all)

    def poll(self, max_requests: int, timeout_s: float, partition: Partition | None = None) -> Chunk | None:
        ends, ends_s = self._ends, self.clock.monotonic_s() + timeout_s
        if (partition is not None, ends) != self._expected_for:
            self._expected_for = partition is not None, ends
            self._expect()
        while self._num_gathered < max_requests and (number := self._turn(partition, ends)) is not None:
            if not self._gather(number, max_requests, ends, max(ends_s - self.clock.monotonic_s(), 0.0)):
                return None
        if self._gathered:
            return self.rest(max_requests)
        return self._at_bounds(ends, partition)

    def rest(self, max_requests: int) -> Chunk | None:
        """What a slow reader hasn't let become whole."""
        if not self._gathered:
            return None
        with self.stages("decode"):
            batch = Batch.concat([piece.batch for piece in self._gathered])
        after: Progress = {
            (SAMPLES, number): self._at[number] for number in {int(p) for p in batch.partition_R.tolist()}
        }
        self._gathered, self._num_gathered = [], 0
        self._given |= after
        return Chunk(batch=batch, rejects=(), after=after, read_ms=self.clock.now_ms())

    def seek(self, at: Progress) -> None:
        self._begin(tuple(self._given))
        known = {
            partition: min(position, self._rows(partition))
            for partition, position in at.items()
            if partition in self._given
        }
        self._given |= known
        self._at |= {number: position for (topic, number), position in known.items() if topic == SAMPLES}
        self._expect()

    def assign(self, numbers: Collection[int], session: TableInput | None = None) -> None:
        """Of this session."""
        self._begin(tuple(partition for partition in self._all if partition[1] in numbers))

    def bound(self, ends: Progress) -> None:
        self._ends = dict(ends)

    @property
    def ended(self) -> bool:
        return bool(self._ends) and self._reached is self._ends

    def newest_ids(self, trained: Progress) -> Mapping[Partition, NewestIds]:
        rows = {partition: self._rows(partition) for partition in self._given if partition[0] == SAMPLES}
        if any(trained.get(partition, 0) < count for partition, count in rows.items()):
            return {}
        for partition in rows.keys() - self._newest_known.keys():
            self._newest_known[partition] = self._newest(partition[1])
        return {partition: self._newest_known[partition] for partition in rows}

    def positions(self) -> Progress:
        return dict(self._given)

    def lag(self) -> dict[Partition, PartitionLag]:
        """Of rows, as offsets."""
        return {
            partition: PartitionLag(
                position=at, stable_end=rows, high_watermark=rows, position_ms=0, newest_ms=0
            )
            for partition, at in dict(self._given).items()
            if (rows := self._rows(partition))
        }

    @property
    def num_lost(self) -> int:
        return 0

    def close(self) -> None:
        self.rows.close()

    # Inside

    def _begin(self, partitions: Sequence[Partition]) -> None:
        self._given: Progress = dict.fromkeys(partitions, 0)
        self._at = {number: 0 for topic, number in partitions if topic == SAMPLES}  # gathered up to it
        self._left: dict[int, tuple[Piece, int]] = {}  # read, and from which of its rows on it isn't gathered
        self._gathered, self._num_gathered = [], 0
        self._expected_for = False, {}

    def _rows(self, partition: Partition) -> int:
        return self.order.rows.get(partition[1], 0) if partition[0] == SAMPLES else 0

    def _end(self, number: int, ends: Progress) -> int:
        return min(self.order.rows.get(number, 0), ends.get((SAMPLES, number), 1 << 62))

    def _turn(self, partition: Partition | None, ends: Progress) -> int | None:
        """Of which the next rows are: the one asked for, or that of the first split in the order of all. None: none is
        left."""
        open_ = [number for number in self._at if self._at[number] < self._end(number, ends)]
        if partition is not None:
            return partition[1] if partition[1] in open_ else None
        splits = {number: self.order.split_at(number, self._at[number]) for number in open_}

        def place(number: int) -> int:
            split = splits[number]
            return split.number if split else 1 << 62

        return min(open_, key=place, default=None)

    def _gather(self, number: int, max_requests: int, ends: Progress, timeout_s: float) -> bool:
        """Some rows of this partition more. False: they aren't there yet."""
        piece, row = self._left.pop(number, (None, 0))
        if piece is None:
            split = self.order.split_at(number, self._at[number])
            assert split is not None
            piece = self.rows.piece(split, self._at[number], timeout_s)
            if piece is None:
                return False
        before = int(np.searchsorted(piece.at_R, self._end(number, ends)))
        taken_to = max(min(before, row + max_requests - self._num_gathered), row)
        taken = piece.between(row, taken_to)
        position, self._at[number] = self._at[number], min(taken.end, self._end(number, ends))
        if self.order.split_at(number, position) is not self.order.split_at(number, self._at[number]):
            self._expect()
        if taken_to < piece.num_rows:
            self._left[number] = piece, taken_to
        if taken.num_rows:
            self._gathered.append(taken)
            self._num_gathered += taken.num_rows
        return True

    def _expect(self) -> None:
        """What lies before the bounds comes first; of partitions in turns, the next split of each."""
        in_turns, ends = self._expected_for
        its = self.order.next_splits(self._at, MAX_EXPECTED)
        open_ = {number for number, at in self._at.items() if at < self._end(number, ends)}
        heads = {split.partition: split.number for split in reversed(its)} if in_turns else {}

        def turn(split: TableSplit) -> tuple[bool, bool, int]:
            is_bounded = split.at >= self._end(split.partition, ends) or split.partition not in open_
            return is_bounded, in_turns and split.number != heads[split.partition], split.number

        self.rows.expect(sorted(its, key=turn), self._at, len(open_) if in_turns else 1)

    def _at_bounds(self, ends: Progress, partition: Partition | None) -> Chunk | None:
        """As `bound` says: an empty chunk, so that the turn of a partition at its bound passes. None: everything was given."""
        if not ends:
            return None
        if partition is not None and self._turn(None, ends) is not None:
            return Chunk(
                batch=self.empty,
                rejects=(),
                after={partition: self._given[partition]},
                read_ms=self.clock.now_ms(),
            )
        self._reached = ends
        return None


def without_requests(batch: Batch) -> Batch:
    """An empty batch like this one."""
    return dataclasses.replace(batch.take_requests(np.arange(0)))
