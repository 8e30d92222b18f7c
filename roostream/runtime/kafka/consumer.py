"""The consumer interface: records of chosen partitions, with offsets that the caller keeps. Also an in-memory
one for tests.

The Kafka implementation is roostream/runtime/kafka/kafka_consumer.py; tests/contract/test_record_consumers.py
runs over both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from roostream.errors import UnavailableError
from roostream.runtime.kafka.topics import Partition, Progress
from roostream.wire.records import Record


class RecordsGoneError(UnavailableError):
    """Retention deleted the next records. Continue at another offset, or start over."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartitionLag:
    """Position and end of one partition. Offsets are next offsets."""

    position: int
    stable_end: int  # last stable offset: the end for consumers of committed records
    high_watermark: int  # above stable_end while a transaction is open
    position_ms: int  # event time of the last record returned; 0 = none yet
    newest_ms: int  # event time of the newest record in the partition; 0 = none
    oldest: int = 0  # first offset that still exists
    lost: int = 0  # records of this partition in `RecordConsumer.num_lost`

    @property
    def records(self) -> int:
        return max(self.stable_end - self.position, 0)

    @property
    def hidden(self) -> int:
        """Records, and markers, that an open transaction hides."""
        return max(self.high_watermark - max(self.stable_end, self.position), 0)

    @property
    def event_ms(self) -> int:
        """Event-time lag: from the last record returned to the newest one; 0 at the end. Never of the wall
        clock (guarantee G8)."""
        return max(self.newest_ms - self.position_ms, 0) if self.records and self.position_ms else 0


class ReadLimits:
    """Offsets at which a consumer stops, for some of its partitions.

    A partition without a limit stops together with the limited partition of the same number: records about
    the same requests come no earlier than those.
    """

    def __init__(self, ends: Progress, next_offset: Callable[[Partition], int]) -> None:
        """`next_offset`: the offset of a partition's next record, or the lowest one that it can have."""
        self.ends, self.next_offset = dict(ends), next_offset
        self._by_number = {number: (topic, number) for topic, number in self.ends}

    def is_reached(self, partition: Partition) -> bool:
        limited = partition if partition in self.ends else self._by_number.get(partition[1])
        return limited is not None and self.next_offset(limited) >= self.ends[limited]


class RecordConsumer(Protocol):
    """Committed records of chosen partitions, in order within each. Single-threaded, except `lag` and
    `num_lost`."""

    @property
    def partitions(self) -> Sequence[Partition]:
        """The assigned partitions, in the order that breaks ties of time."""

    @property
    def num_lost(self) -> int:
        """Records, since this consumer was made, that retention deleted before they were returned; and
        offsets that were returned and that the log lost again after an unclean stop of the broker."""

    def seek(
        self, progress: Mapping[Partition, int], leader_epochs: Mapping[Partition, int] = MappingProxyType({})
    ) -> None:
        """Continue at these next offsets; a partition that is not named starts at its oldest record. Buffered
        records are dropped. Must come before the first `poll`.

        `leader_epochs`: what `leader_epochs` returned for these offsets. Without it, offsets that a broker
        lost and used again for other records cannot be told from those that were read.

        **If an offset is gone**: logs and counts what is lost in `num_lost`; continues at the oldest record
        where retention passed the offset, at the end where the offset lies beyond it. A log that was cut off
        below an offset that was read is read again from the cut, so `positions` can go back, also in a later
        `poll`. A consumer that may not skip raises RecordsGoneError.

        Raises:
            UnavailableError: the source is away, or a topic can't be read; nothing was changed.
        """

    def poll(self, max_records: int, timeout_s: float, partition: Partition | None = None) -> list[Record]:
        """At most `max_records` next records, of all partitions or of one `partition`.

        Returns as soon as there is a record, and [] after `timeout_s`, also while the source is away.

        Raises:
            RecordsGoneError: the next offset is gone, and this consumer may not skip; `seek` before the next
            `poll`.
        """

    def pause(self, partitions: Collection[Partition]) -> None:
        """Fetch nothing of exactly these partitions until the next call; records that are buffered may still
        be returned."""

    def set_limits(self, ends: Progress) -> None:
        """Return no record at or beyond these offsets (`ReadLimits`) until the next call; {} removes all
        limits.

        Any thread. Lower an existing limit only before a `seek`. Applies where partitions are merged, and to
        a `poll` of one partition.
        """

    def has_more(self, partition: Partition) -> bool | None:
        """Of a limited partition: whether `poll` can return another record. False: all records below the
        limit were returned. None: not known yet; call `poll`."""

    def positions(self) -> Progress:
        """Offset after the last record that `poll` returned, or the one of the last `seek`."""

    def leader_epochs(self, at: Progress) -> dict[Partition, int]:
        """The leader epochs of the records before these offsets, as far as they are known. Any thread."""

    def end_offsets(self) -> Progress:
        """Last stable offsets, asked now. UnavailableError: the source is away, or a topic can't be read."""

    def at_end(self) -> bool:
        """Every partition was returned up to its end, as of the source's last answer."""

    def lag(self) -> dict[Partition, PartitionLag]:
        """As of a moment ago; {} while the end offsets are unknown or not tracked. Sends no request; any
        thread."""

    def close(self) -> None:
        """Idempotent."""


class MemoryConsumer:
    """A `RecordConsumer` of lists, merged by time. `trim` simulates retention, `away` an outage. `append` may
    follow a `poll`."""

    def __init__(
        self,
        partitions: Sequence[Partition],
        records: Iterable[Record] = (),
        *,
        skip_lost_records: bool = True,
    ) -> None:
        self.partitions, self.skip_lost_records = tuple(partitions), skip_lost_records
        self._lost = dict.fromkeys(self.partitions, 0)
        self.away = False
        self._logs: dict[Partition, list[Record]] = {p: [] for p in self.partitions}
        self._oldest = dict.fromkeys(self.partitions, 0)
        self._positions = dict.fromkeys(self.partitions, 0)
        self._position_ms = dict.fromkeys(self.partitions, 0)
        self._paused: set[Partition] = set()
        self.set_limits({})
        self.append(records)

    @property
    def num_lost(self) -> int:
        return sum(self._lost.values())

    def append(self, records: Iterable[Record]) -> None:
        """Offsets must be consecutive in each partition, from 0."""
        for record in records:
            log = self._logs[record.topic, record.partition]
            assert record.offset == len(log), (
                f"expected offset {len(log)} of partition {record.partition}, got {record.offset}"
            )
            log.append(record)

    def trim(self, partition: Partition, first: int) -> None:
        """Delete the records below offset `first`."""
        self._oldest[partition] = first

    def seek(
        self, progress: Mapping[Partition, int], leader_epochs: Mapping[Partition, int] = MappingProxyType({})
    ) -> None:
        self._check()
        wanted = {p: progress.get(p, self._oldest[p]) for p in self.partitions}
        there = {p: min(max(at, self._oldest[p]), len(self._logs[p])) for p, at in wanted.items()}
        lost = {p: abs(there[p] - at) for p, at in wanted.items()}
        if any(lost.values()) and not self.skip_lost_records:
            raise RecordsGoneError(
                f"expected offsets {wanted}, but {sum(lost.values())} records are gone; start at the "
                "oldest offset"
            )
        self._lost = {p: count + lost[p] for p, count in self._lost.items()}
        self._positions = there
        self._position_ms = dict.fromkeys(self.partitions, 0)

    def poll(self, max_records: int, timeout_s: float, partition: Partition | None = None) -> list[Record]:
        chosen = [p for p in self.partitions if p not in self._paused and partition in (None, p)]
        self._skip_lost(chosen)
        out: list[Record] = []
        while len(out) < max_records and not self.away:
            heads = [
                (self._logs[p][self._positions[p]].timestamp_ms, n)
                for n, p in enumerate(chosen)
                if self._positions[p] < len(self._logs[p]) and not self._limits.is_reached(p)
            ]
            if not heads:
                break
            oldest = chosen[min(heads)[1]]
            out.append(self._logs[oldest][self._positions[oldest]])
            self._positions[oldest] += 1
            self._position_ms[oldest] = out[-1].timestamp_ms
        return out

    def pause(self, partitions: Collection[Partition]) -> None:
        self._paused = set(partitions)

    def set_limits(self, ends: Progress) -> None:
        self._limits = ReadLimits(ends, lambda p: self._positions[p])

    def has_more(self, partition: Partition) -> bool | None:
        if self._limits.is_reached(partition):
            return False
        return True if self._positions[partition] < len(self._logs[partition]) else None

    def positions(self) -> Progress:
        return dict(self._positions)

    def leader_epochs(self, at: Progress) -> dict[Partition, int]:
        """Records in memory have none."""
        return {}

    def end_offsets(self) -> Progress:
        self._check()
        return {p: len(log) for p, log in self._logs.items()}

    def at_end(self) -> bool:
        return not self.away and all(self._positions[p] >= len(log) for p, log in self._logs.items())

    def lag(self) -> dict[Partition, PartitionLag]:
        if self.away:
            return {}
        return {
            p: PartitionLag(
                position=self._positions[p],
                stable_end=len(log),
                high_watermark=len(log),
                position_ms=self._position_ms[p],
                newest_ms=max((r.timestamp_ms for r in log[-256:]), default=0),
                oldest=self._oldest[p],
                lost=self._lost[p],
            )
            for p, log in self._logs.items()
        }

    def close(self) -> None:
        """Nothing to release."""

    def _skip_lost(self, chosen: Sequence[Partition]) -> None:
        for p in chosen:
            at, first = self._positions[p], self._oldest[p]
            if first <= at <= len(self._logs[p]):
                continue
            if not self.skip_lost_records:
                raise RecordsGoneError(f"{p}: offset {at} is gone, the oldest is {first}")
            self._positions[p] = first if at < first else len(self._logs[p])
            self._lost[p] += abs(self._positions[p] - at)

    def _check(self) -> None:
        if self.away:
            raise UnavailableError("records in memory: injected outage")
