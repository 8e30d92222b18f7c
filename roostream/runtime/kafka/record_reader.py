"""Records with offsets that their reader keeps: an interface, and one in memory. Kafka's is `roostream/runtime/kafka/reader.py`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol

from roostream.errors import UnavailableError
from roostream.runtime.kafka.topics import Partition, Progress
from roostream.wire.records import Record


class RecordsGoneError(UnavailableError):
    """Retention deleted what was to be read next: go on from elsewhere, or begin anew."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartitionLag:
    """How far one partition has been given out, and how far it reaches. Offsets are next offsets."""

    position: int
    stable_end: int  # last stable offset: what a reader of committed records can reach now
    high_watermark: int  # above stable_end while a transaction is open
    position_ms: int  # event time of the last record given; 0 = none yet
    newest_ms: int  # event time of the newest record there; 0 = none
    oldest: int = 0  # below it everything was deleted
    lost: int = 0  # of this partition's records, as `RecordReader.num_lost`

    @property
    def records(self) -> int:
        return max(self.stable_end - self.position, 0)

    @property
    def hidden(self) -> int:
        """Records that an open transaction hides, and its markers."""
        return max(self.high_watermark - max(self.stable_end, self.position), 0)

    @property
    def event_ms(self) -> int:
        """Event-time lag: from the last record given to the newest one; 0 at the end. Never the wall clock's (G8)."""
        return max(self.newest_ms - self.position_ms, 0) if self.records and self.position_ms else 0


class ReadLimits:
    """How far a reader may go: of some partitions, an offset that it gives nothing from on."""

    def __init__(self, ends: Progress, next_of: Callable[[Partition], int]) -> None:
        """`next_of`: the offset of a partition's next record, or, where none is there, the lowest that it can have."""
        self.ends, self.next_of = dict(ends), next_of
        self._by_number = {number: (topic, number) for topic, number in self.ends}

    def closes(self, partition: Partition) -> bool:
        """Its next record isn't to be given now."""
        bounded = partition if partition in self.ends else self._by_number.get(partition[1])
        return bounded is not None and self.next_of(bounded) >= self.ends[bounded]


class RecordReader(Protocol):
    """Committed records of chosen partitions, in order within each. One thread, but for `lag` and `num_lost`."""

    @property
    def partitions(self) -> Sequence[Partition]:
        """What is read, in the order that breaks ties of time."""

    @property
    def num_lost(self) -> int:
        """Records that retention deleted before they were given, and offsets that were given and that the log has lost again
        (an unclean stop of the broker), since this reader was made."""

    def seek(self, progress: Mapping[Partition, int]) -> None:
        """Go on from these next offsets; a partition that isn't named, from its oldest record. What was fetched is forgotten.
        Comes before the first `poll`.

        **If an offset is gone**: says so and counts what is lost in `num_lost`; goes on from the oldest record where retention
        passed the offset, from the end where it lies beyond. A reader that may not skip raises RecordsGoneError.

        Raises:
            UnavailableError: the source is away, or a topic can't be read; nothing was changed.
        """

    def poll(self, max_records: int, timeout_s: float, partition: Partition | None = None) -> list[Record]:
        """At most `max_records` next records: of all partitions, or of one `partition`.

        Returns what is there as soon as anything is, and [] after `timeout_s`. A source that is away is waited for: [].

        Raises:
            RecordsGoneError: the next offset is gone, and this reader may not skip; `seek` before the next `poll`.
        """

    def hold(self, partitions: Collection[Partition]) -> None:
        """Fetch nothing of exactly these partitions for now; what was fetched before may still come."""

    def bound(self, ends: Progress) -> None:
        """Give nothing of these partitions from these offsets on, until told otherwise; {} = everything. A partition that isn't
        named waits with the one of its number that is: what is about the same records comes no earlier than they do. Any
        thread. Only a `seek` may follow where an end is lowered. Kept by what merges, and where one partition is asked for."""

    def left(self, partition: Partition) -> bool | None:
        """Of a bounded partition: whether a record is there that `poll` may give. False: all before the bound was given. None:
        not known yet; `poll`."""

    def positions(self) -> Progress:
        """Offset after the last record that `poll` gave, or where `seek` put it."""

    def end_offsets(self) -> Progress:
        """Last stable offsets, asked now. UnavailableError: the source is away, or a topic can't be read."""

    def at_end(self) -> bool:
        """Every partition has been given to what was its end when the source last spoke of it."""

    def lag(self) -> dict[Partition, PartitionLag]:
        """As of a moment ago; {} while the ends are not known, or are not followed. Asks nobody; any thread."""

    def close(self) -> None:
        """Idempotent."""


class MemoryReader:
    """See RecordReader: lists, merged by time. `append` may go on while it is read; `trim` is retention; `away` an outage."""

    def __init__(
        self, partitions: Sequence[Partition], records: Iterable[Record] = (), *, skips_lost: bool = True
    ) -> None:
        self.partitions, self.skips_lost = tuple(partitions), skips_lost
        self._lost = dict.fromkeys(self.partitions, 0)
        self.away = False
        self._logs: dict[Partition, list[Record]] = {p: [] for p in self.partitions}
        self._first = dict.fromkeys(self.partitions, 0)
        self._at = dict.fromkeys(self.partitions, 0)
        self._position_ms = dict.fromkeys(self.partitions, 0)
        self._held: set[Partition] = set()
        self.bound({})
        self.append(records)

    @property
    def num_lost(self) -> int:
        return sum(self._lost.values())

    def append(self, records: Iterable[Record]) -> None:
        """Offsets must go up by one in each partition, from 0."""
        for record in records:
            log = self._logs[record.topic, record.partition]
            assert record.offset == len(log), (
                f"expected offset {len(log)} of partition {record.partition}, got {record.offset}"
            )
            log.append(record)

    def trim(self, partition: Partition, first: int) -> None:
        """Records below offset `first` are deleted."""
        self._first[partition] = first

    def seek(self, progress: Mapping[Partition, int]) -> None:
        self._check()
        wanted = {p: progress.get(p, self._first[p]) for p in self.partitions}
        there = {p: min(max(at, self._first[p]), len(self._logs[p])) for p, at in wanted.items()}
        lost = {p: abs(there[p] - at) for p, at in wanted.items()}
        if any(lost.values()) and not self.skips_lost:
            raise RecordsGoneError(
                f"expected the offsets {wanted}, {sum(lost.values())} of them are gone; begin at the oldest"
            )
        self._lost = {p: count + lost[p] for p, count in self._lost.items()}
        self._at = there
        self._position_ms = dict.fromkeys(self.partitions, 0)

    def poll(self, max_records: int, timeout_s: float, partition: Partition | None = None) -> list[Record]:
        chosen = [p for p in self.partitions if p not in self._held and partition in (None, p)]
        self._skip_lost(chosen)
        out: list[Record] = []
        while len(out) < max_records and not self.away:
            heads = [
                (self._logs[p][self._at[p]].timestamp_ms, n)
                for n, p in enumerate(chosen)
                if self._at[p] < len(self._logs[p]) and not self._limits.closes(p)
            ]
            if not heads:
                break
            oldest = chosen[min(heads)[1]]
            out.append(self._logs[oldest][self._at[oldest]])
            self._at[oldest] += 1
            self._position_ms[oldest] = out[-1].timestamp_ms
        return out

    def hold(self, partitions: Collection[Partition]) -> None:
        self._held = set(partitions)

    def bound(self, ends: Progress) -> None:
        self._limits = ReadLimits(ends, lambda p: self._at[p])

    def left(self, partition: Partition) -> bool | None:
        if self._limits.closes(partition):
            return False
        return True if self._at[partition] < len(self._logs[partition]) else None

    def positions(self) -> Progress:
        return dict(self._at)

    def end_offsets(self) -> Progress:
        self._check()
        return {p: len(log) for p, log in self._logs.items()}

    def at_end(self) -> bool:
        return not self.away and all(self._at[p] >= len(log) for p, log in self._logs.items())

    def lag(self) -> dict[Partition, PartitionLag]:
        if self.away:
            return {}
        return {
            p: PartitionLag(
                position=self._at[p],
                stable_end=len(log),
                high_watermark=len(log),
                position_ms=self._position_ms[p],
                newest_ms=max((r.timestamp_ms for r in log[-256:]), default=0),
                oldest=self._first[p],
                lost=self._lost[p],
            )
            for p, log in self._logs.items()
        }

    def close(self) -> None:
        """Nothing is held."""

    def _skip_lost(self, chosen: Sequence[Partition]) -> None:
        for p in chosen:
            at, first = self._at[p], self._first[p]
            if first <= at <= len(self._logs[p]):
                continue
            if not self.skips_lost:
                raise RecordsGoneError(f"{p}: offset {at} is gone, the oldest is {first}")
            self._at[p] = first if at < first else len(self._logs[p])
            self._lost[p] += abs(self._at[p] - at)

    def _check(self) -> None:
        if self.away:
            raise UnavailableError("records in memory: injected outage")
