"""Chunks from a warehouse session: its splits in order, cut into chunks of the requested size.

The worker reads the rows itself, or through `reader` programs.

Offsets are positions (roostream/warehouse/sessions/session.py). The rows of a chunk depend on the positions,
the requested size and the bounds only, never on when rows arrive: slow rows are waited for, and after a
restore the same chunks come again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from roostream.runtime.clock import Clock
from roostream.runtime.kafka.consumer import PartitionLag
from roostream.runtime.kafka.topics import SAMPLES, Partition, Progress
from roostream.runtime.work_unit import TableInput
from roostream.schema.schema import Schema
from roostream.warehouse.sessions.session import ReadOrder, TableSplit
from roostream.warehouse.sessions.session_rows import (
    LocalSessionRows,
    OpenSession,
    Piece,
    SessionRows,
    recent_sample_ids,
)
from roostream.wire.batch import Batch
from roostream.wire.decode import Decoder
from trainer.batch_source import BatchSource, ForwardingSource, NewestIds
from trainer.chunks import Chunk
from trainer.pipeline.stage_timer import StageTimer

if TYPE_CHECKING:
    from roostream.warehouse.sessions.sample_table import TableFiles

MAX_EXPECTED = 64  # splits that readers prefetch


class SessionSource:
    """A `BatchSource`. Partial chunks come only before a bound, or at the end of the session."""

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
        """`partitions`: of the stream that follows, including corrections if they are trained. `empty`: a
        batch without requests. `newest`: partition → samples that the stream must not train again."""
        self.order, self.rows, self.empty, self.clock = order, rows, empty, clock
        self.stages = stages or StageTimer(clock)
        self._newest, self._all = newest, tuple(sorted(partitions))
        self._newest_known: dict[Partition, NewestIds] = {}
        self._ends: Progress = {}
        self._reached: Progress | None = None  # the bounds in `_ends` that are reached
        self._gathered: list[Piece] = []
        self._num_gathered = 0
        self._expected_for: tuple[bool, Progress] = False, {}  # whether partitions are read in turns; bounds
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
            return self.poll_remaining(max_requests)
        return self._at_bounds(ends, partition)

    def poll_remaining(self, max_requests: int) -> Chunk | None:
        """A partial chunk, when a reader is too slow for a full one."""
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

    def seek(self, at: Progress, leader_epochs: Mapping[Partition, int] = MappingProxyType({})) -> None:
        """Positions in a session are not offsets of Kafka, so there are no leader epochs."""
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
        """Assign partitions of this session."""
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
        """Lag in rows of the session."""
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

    # Internals

    def _begin(self, partitions: Sequence[Partition]) -> None:
        self._given: Progress = dict.fromkeys(partitions, 0)
        self._at = {number: 0 for topic, number in partitions if topic == SAMPLES}  # rows gathered so far
        self._left: dict[int, tuple[Piece, int]] = {}  # read piece and its first row that is not gathered
        self._gathered, self._num_gathered = [], 0
        self._expected_for = False, {}

    def _rows(self, partition: Partition) -> int:
        return self.order.rows.get(partition[1], 0) if partition[0] == SAMPLES else 0

    def _end(self, number: int, ends: Progress) -> int:
        return min(self.order.rows.get(number, 0), ends.get((SAMPLES, number), 1 << 62))

    def _turn(self, partition: Partition | None, ends: Progress) -> int | None:
        """Number of the partition of the next rows: the requested one, or that of the first split in the
        session's order. None: nothing is left."""
        open_ = [number for number in self._at if self._at[number] < self._end(number, ends)]
        if partition is not None:
            return partition[1] if partition[1] in open_ else None
        splits = {number: self.order.split_at(number, self._at[number]) for number in open_}

        def split_number(number: int) -> int:
            split = splits[number]
            return split.number if split else 1 << 62

        return min(open_, key=split_number, default=None)

    def _gather(self, number: int, max_requests: int, ends: Progress, timeout_s: float) -> bool:
        """Gather more rows of this partition. False: they have not arrived yet."""
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
        """Announce the next splits: those before the bounds first, and for partitions in turns the next split
        of each."""
        in_turns, ends = self._expected_for
        splits = self.order.next_splits(self._at, MAX_EXPECTED)
        open_ = {number for number, at in self._at.items() if at < self._end(number, ends)}
        heads = {split.partition: split.number for split in reversed(splits)} if in_turns else {}

        def turn(split: TableSplit) -> tuple[bool, bool, int]:
            is_bounded = split.at >= self._end(split.partition, ends) or split.partition not in open_
            return is_bounded, in_turns and split.number != heads[split.partition], split.number

        self.rows.expect(sorted(splits, key=turn), self._at, len(open_) if in_turns else 1)

    def _at_bounds(self, ends: Progress, partition: Partition | None) -> Chunk | None:
        """An empty chunk for a partition at its bound, so that its turn passes. None: everything was
        returned."""
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


OpenRows: TypeAlias = "Callable[[TableInput, OpenSession, TableFiles], SessionRows]"
"""Opens the rows of a session."""


def local_rows(table_input: TableInput, session: OpenSession, rows: TableFiles) -> SessionRows:
    """The rows of a session, read in the worker's own process."""
    return LocalSessionRows(session, rows)


def open_session(
    table_input: TableInput,
    schema: Schema,
    partitions: Sequence[Partition],
    horizon_ms: int,
    clock: Clock,
    stages: StageTimer | None = None,
    open_rows: OpenRows = local_rows,
) -> SessionSource:
    """Open a session. `partitions`: of the stream that follows. `horizon_ms`: how long sample ids are
    remembered.

    Raises:
        UnavailableError: the table cannot be read now.
        CheckpointError: the version is absent or has changed.
        ModuleNotFoundError: this environment has no packages for a warehouse.
    """
    from roostream.warehouse.sessions.sample_table import SampleTable

    session, rows = SampleTable(table_input.table).open_session(table_input, schema)
    empty, _ = Decoder(schema, lambda fingerprint: None).decode([])

    def newest(number: int) -> NewestIds:
        return NewestIds(*recent_sample_ids(session, rows, number, horizon_ms))

    return SessionSource(
        session.order,
        open_rows(table_input, session, rows),
        empty,
        clock,
        partitions=partitions,
        newest=newest,
        stages=stages,
    )


class PhasedSource(ForwardingSource):
    """A `BatchSource` that switches between the stream and a warehouse session, as the controller decides at
    each restore. It starts with the stream, which stays open."""

    def __init__(self, stream: BatchSource, open_session: Callable[[TableInput], BatchSource]) -> None:
        """`open_session` raises as `assign`."""
        self.stream, self.open_session = stream, open_session
        self.source = stream

    def assign(self, numbers: Collection[int], session: TableInput | None = None) -> None:
        opened = self.open_session(session) if session else self.stream
        if self.source is not self.stream:
            self.source.close()
        self.source = opened
        self.source.assign(numbers)

    def close(self) -> None:
        if self.source is not self.stream:
            self.source.close()
        self.stream.close()
