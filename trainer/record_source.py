"""Chunks from Kafka records, or from records in memory: consume, gather, decode."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType

from roostream.errors import UnavailableError
from roostream.runtime.clock import Clock
from roostream.runtime.kafka.consumer import PartitionLag, RecordConsumer
from roostream.runtime.kafka.topics import CORRECTIONS, Partition, Progress
from roostream.runtime.work_unit import TableInput
from roostream.wire.decode import Decoder
from roostream.wire.records import Record
from trainer.batch_source import NewestIds, refuse_session
from trainer.chunks import Chunk, Rejected
from trainer.pipeline.stage_timer import StageTimer


class RecordSource:
    """A `BatchSource`. A chunk is due when it is full, or `max_wait_ms` after its first record was read."""

    def __init__(
        self,
        consumer: RecordConsumer,
        decoder: Decoder,
        clock: Clock,
        *,
        max_wait_ms: int,
        stages: StageTimer | None = None,
        reopen: Callable[[tuple[Partition, ...]], RecordConsumer] | None = None,
    ) -> None:
        """`consumer`: of all partitions. `reopen`: opens a consumer of some of them; None = partitions cannot
        be assigned."""
        self.stages = stages or StageTimer(clock)
        self.consumer, self.decoder, self.clock, self.max_wait_ms = consumer, decoder, clock, max_wait_ms
        self._reopen, self._all = reopen, tuple(sorted(consumer.positions()))
        self._lost_before = 0
        self._waiting: list[Record] = []
        self._since_s = 0.0
        self._given: Progress = consumer.positions()
        self._ends: Progress = {}
        self._reached: Progress | None = None  # the bounds in `_ends` that are reached

    def poll(self, max_requests: int, timeout_s: float, partition: Partition | None = None) -> Chunk | None:
        before, ends, lost_before = len(self._waiting), self._ends, self.consumer.num_lost
        if partition is None and before:
            timeout_s = min(max(self.max_wait_ms / 1000 - self._waited_s(), 0.0), timeout_s)
        records = self.consumer.poll(max_requests - before, timeout_s, partition)
        if self.consumer.num_lost != lost_before:  # a broker may have given the offsets to other records
            next_offset = self.consumer.positions()
            next_offset |= {(r.topic, r.partition): r.offset for r in reversed(records)}
            self._waiting = [r for r in self._waiting if r.offset < next_offset[r.topic, r.partition]]
        self._waiting += records
        if self._waiting and not before:
            self._since_s = self.clock.monotonic_s()
        full = len(self._waiting) >= max_requests
        late = partition is None and self._waited_s() * 1000 >= self.max_wait_ms
        if self._waiting and (full or late):
            return self.rest(max_requests)
        return self._at_bounds(ends, max_requests, partition) if ends else None

    def rest(self, max_requests: int) -> Chunk | None:
        records, self._waiting = self._waiting[:max_requests], self._waiting[max_requests:]
        if not records:
            return None
        with self.stages("decode"):
            chunk = build_chunk(
                records, self.decoder, self.clock.now_ms(), corrections=reads_corrections(self._given)
            )
        self._given |= chunk.after
        return dataclasses.replace(chunk, leader_epochs=self.consumer.leader_epochs(chunk.after))

    def seek(self, at: Progress, leader_epochs: Mapping[Partition, int] = MappingProxyType({})) -> None:
        self.consumer.seek(at, leader_epochs)
        self._waiting.clear()
        self._given = self.consumer.positions()

    def assign(self, numbers: Collection[int], session: TableInput | None = None) -> None:
        refuse_session(session)
        wanted = tuple(partition for partition in self._all if partition[1] in numbers)
        if set(wanted) == self.consumer.positions().keys():
            return
        if self._reopen is None:
            raise UnavailableError(
                f"expected all partitions of this source, {list(self._all)}, got {list(wanted)}"
            )
        before, self.consumer = self.consumer, self._reopen(wanted)
        self._lost_before += before.num_lost
        before.close()
        self._waiting.clear()
        self._given = self.consumer.positions()

    def bound(self, ends: Progress) -> None:
        self.consumer.set_limits(ends)
        self._ends = dict(ends)  # after the consumer's limits, so that old limits never look reached

    @property
    def ended(self) -> bool:
        return bool(self._ends) and self._reached is self._ends

    def newest_ids(self, trained: Progress) -> Mapping[Partition, NewestIds]:
        """This source has no sessions."""
        return {}

    def positions(self) -> Progress:
        return dict(self._given)

    def lag(self) -> dict[Partition, PartitionLag]:
        return self.consumer.lag()

    @property
    def num_lost(self) -> int:
        return self._lost_before + self.consumer.num_lost

    def close(self) -> None:
        self.consumer.close()

    def _at_bounds(self, ends: Progress, max_requests: int, partition: Partition | None) -> Chunk | None:
        """A partial chunk before the bounds. None: it may still become full, or everything was returned."""
        left = {p: self.consumer.has_more(p) for p in ends}
        if None in left.values() or (any(left.values()) if partition is None else left.get(partition, True)):
            return None
        if self._waiting:
            return self.rest(max_requests)
        if partition is not None and any(left.values()):
            chunk = build_chunk(
                (), self.decoder, self.clock.now_ms(), corrections=reads_corrections(self._given)
            )
            return dataclasses.replace(chunk, after={partition: self._given[partition]})
        self._reached = ends
        return None

    def _waited_s(self) -> float:
        return self.clock.monotonic_s() - self._since_s


def reads_corrections(positions: Progress) -> bool:
    """Whether a source reads corrections."""
    return any(topic == CORRECTIONS for topic, _ in positions)


def build_chunk(
    records: Sequence[Record], decoder: Decoder, read_ms: int, *, corrections: bool = False
) -> Chunk:
    """Decode records to one chunk, in order. Never raises for invalid records. `corrections`: include those
    that have features."""
    batch, rejects = decoder.decode(records, corrections=corrections)
    return Chunk(
        batch=batch,
        rejects=[_rejected(records[reject.index], reject.reason, reject.error) for reject in rejects],
        after={(record.topic, record.partition): record.offset + 1 for record in records},
        read_ms=read_ms,
        records=records,
    )


def _rejected(record: Record, reason: str, error: str) -> Rejected:
    return Rejected((record.topic, record.partition), record.offset, reason, error, record.value or b"")
