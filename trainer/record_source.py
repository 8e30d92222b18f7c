"""Chunks from Kafka records, or from records in memory: consume, gather, decode."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType

from roostream.errors import UnavailableError, WireError
from roostream.runtime.clock import Clock
from roostream.runtime.event_time import SteppedEventTime
from roostream.runtime.kafka.consumer import PartitionLag, RecordConsumer
from roostream.runtime.kafka.topics import CORRECTIONS, SAMPLES, Partition, Progress
from roostream.runtime.work_unit import TableInput
from roostream.wire import roo_pb2 as pb
from roostream.wire.decode import Decoder
from roostream.wire.records import Record, decode
from trainer.batch_source import NewestIds, refuse_session
from trainer.chunks import Chunk, Rejected
from trainer.pipeline.stage_timer import StageTimer

_MAX_STEP_MS = 600_000  # by which one sample moves the newest close time of its partition


class CorrectionsBeforeTheirSamples:
    """Corrections that were read, and wait until their samples were.

    The joiner's transactions of the two topics end one after the other, so a reader can see a correction
    first. The gradient of a correction does not shrink as the logit grows. So a new model that trains
    hundreds of corrections before their samples has useless scores afterwards.
    """

    MAX_WAIT_S = 10.0
    """A sample that was read before this process started is not known."""
    MAX_WAITING = 4096
    """Of a partition; beyond it the oldest correction does not wait."""

    def __init__(self) -> None:
        # Newest close of the samples read, by number of the partition
        self._newest: dict[int, SteppedEventTime] = {}
        self._waiting: dict[int, deque[tuple[float, int, Record]]] = {}  # since when, close of the sample

    def admit(self, records: Sequence[Record], now_s: float) -> list[Record]:
        """`records` without the corrections that must wait, and behind them those that need not wait longer.
        Corrections of a partition stay in their order."""
        admitted = []
        for record in records:
            if record.topic == CORRECTIONS:
                waiting = self._waiting.setdefault(record.partition, deque())
                waiting.append((now_s, _close_ms(record), record))
                continue
            if record.topic == SAMPLES:
                newest = self._newest.setdefault(record.partition, SteppedEventTime())
                newest.event(record.timestamp_ms, _MAX_STEP_MS)
            admitted.append(record)
        for number, waiting in self._waiting.items():
            newest_ms = max(self._newest[number].newest_ms, 0) if number in self._newest else 0
            while waiting and (
                waiting[0][1] <= newest_ms
                or now_s - waiting[0][0] >= self.MAX_WAIT_S
                or len(waiting) > self.MAX_WAITING
            ):
                admitted.append(waiting.popleft()[2])
        return admitted

    def admit_all(self) -> list[Record]:
        """All that wait, because no more samples come."""
        admitted = [record for waiting in self._waiting.values() for _, _, record in waiting]
        self._waiting.clear()
        return admitted

    def clear(self) -> None:
        """Forget what was read."""
        self._newest.clear()
        self._waiting.clear()


def _close_ms(record: Record) -> int:
    """When the sample of a correction was closed; 0 for a record that cannot be decoded."""
    try:
        _, message = decode(record.value)
    except WireError:
        return 0
    return message.close_ms if isinstance(message, pb.Sample) else 0


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
        self._early = CorrectionsBeforeTheirSamples()
        self._since_s = 0.0
        self._given: Progress = consumer.positions()
        self._ends: Progress = {}
        self._reached: Progress | None = None  # the bounds in `_ends` that are reached

    def poll(self, max_requests: int, timeout_s: float, partition: Partition | None = None) -> Chunk | None:
        before, ends, lost_before = len(self._waiting), self._ends, self.consumer.num_lost
        if partition is None and before:
            timeout_s = min(max(self.max_wait_ms / 1000 - self._waited_s(), 0.0), timeout_s)
        is_full = before >= max_requests  # of corrections that waited
        records = [] if is_full else self.consumer.poll(max_requests - before, timeout_s, partition)
        if self.consumer.num_lost != lost_before:  # a broker may have given the offsets to other records
            next_offset = self.consumer.positions()
            next_offset |= {(r.topic, r.partition): r.offset for r in reversed(records)}
            self._waiting += self._early.admit_all()
            self._waiting = [r for r in self._waiting if r.offset < next_offset[r.topic, r.partition]]
        self._waiting += self._early.admit(records, self.clock.monotonic_s())
        if self._waiting and not before:
            self._since_s = self.clock.monotonic_s()
        full = len(self._waiting) >= max_requests
        late = partition is None and self._waited_s() * 1000 >= self.max_wait_ms
        if self._waiting and (full or late):
            return self._take(max_requests)
        return self._at_bounds(ends, max_requests, partition) if ends else None

    def poll_remaining(self, max_requests: int) -> Chunk | None:
        self._waiting += self._early.admit_all()
        return self._take(max_requests)

    def _take(self, max_requests: int) -> Chunk | None:
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
        self._early.clear()
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
        self._early.clear()
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
        if rest := self.poll_remaining(max_requests):
            return rest
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
