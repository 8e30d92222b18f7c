"""Where records come from: an interface, the merge that every implementation shares, and one in memory.

Partitions are merged by record timestamp while a source lags: otherwise day 3 of one partition would be trained before day 1
of another is scored, and live metrics would have seen their own future.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from roo.wire import Record


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartitionLag:
    """How far one partition has been given out, and how far it reaches. Offsets are next offsets."""

    position: int
    stable_end: int  # last stable offset: what a reader of committed records can reach now
    high_watermark: int  # above stable_end while a transaction is open
    position_ms: int  # event time of the last record given; 0 = none yet
    newest_ms: int  # event time of the newest record there; 0 = none

    @property
    def records(self) -> int:
        return max(self.stable_end - self.position, 0)

    @property
    def event_ms(self) -> int:
        """Event-time lag: from the last record given to the newest one; 0 at the end. Never the wall clock's (G8)."""
        return max(self.newest_ms - self.position_ms, 0) if self.records and self.position_ms else 0


class Source(Protocol):
    """Records of one topic with manual offsets. One thread."""

    def poll(self, max_records: int, timeout_s: float, partition: int | None = None) -> list[Record]:
        """At most `max_records` next records: of all partitions merged by timestamp, or of one `partition` (exact mode).

        Returns what is there as soon as anything is, and [] after `timeout_s`. A source that is away is waited for: [].
        """

    def seek(self, offsets: Mapping[int, int]) -> None:
        """Go on from these next offsets; partitions not named, from their beginning. What was fetched is forgotten."""

    def positions(self) -> dict[int, int]:
        """Partition → offset after the last record that `poll` gave, or where `seek` put it."""

    def end_offsets(self) -> dict[int, int]:
        """Partition → last stable offset, as of a moment ago."""

    def lag(self) -> dict[int, PartitionLag]:
        """As of a moment ago; {} while the ends are not known. Never blocks for long."""

    def close(self) -> None:
        """Idempotent."""


class Merge:
    """Bounded buffers, one a partition; gives the oldest head.

    A partition that has nothing buffered and is not at its end may hold an older record, so nothing is given until it speaks;
    a partition at its end never holds up the others. `room` says who may be fetched.
    """

    def __init__(self, partitions: Sequence[int], buffered: int = 4096) -> None:
        self.buffered = buffered
        self._buffers: dict[int, deque[Record]] = {p: deque() for p in partitions}
        self._at_end: dict[int, bool] = dict.fromkeys(partitions, False)

    def offer(self, record: Record) -> None:
        self._buffers[record.partition].append(record)
        self._at_end[record.partition] = False

    def reached_end(self, partition: int) -> None:
        """Everything that exists now has been offered; until the next offer, this partition has no say."""
        self._at_end[partition] = True

    def is_drained(self, partition: int) -> bool:
        return self._at_end[partition] and not self._buffers[partition]

    def room(self, partition: int) -> int:
        return max(self.buffered - len(self._buffers[partition]), 0)

    def take(self, max_records: int) -> list[Record]:
        """Oldest first by (timestamp, partition), for as long as no silent partition could hold an older one."""
        out: list[Record] = []
        while len(out) < max_records:
            heads = [(b[0].timestamp_ms, p) for p, b in self._buffers.items() if b]
            if not heads or any(not b and not self._at_end[p] for p, b in self._buffers.items()):
                break
            out.append(self._buffers[min(heads)[1]].popleft())
        return out

    def take_of(self, partition: int, max_records: int) -> list[Record]:
        buffer = self._buffers[partition]
        return [buffer.popleft() for _ in range(min(max_records, len(buffer)))]

    def clear(self) -> None:
        for partition, buffer in self._buffers.items():
            buffer.clear()
            self._at_end[partition] = False


class ListSource:
    """Records in memory, for tests and in-process replays; `append` may go on while it is read."""

    def __init__(self, records: Iterable[Record] = (), num_partitions: int = 4) -> None:
        self._logs: dict[int, list[Record]] = {p: [] for p in range(num_partitions)}
        self._at = dict.fromkeys(self._logs, 0)
        self._position_ms = dict.fromkeys(self._logs, 0)
        self.append(records)

    def append(self, records: Iterable[Record]) -> None:
        """Offsets must go up by one in each partition, from 0."""
        for record in records:
            log = self._logs[record.partition]
            assert record.offset == len(log), f"expected offset {len(log)} of partition {record.partition}, got {record.offset}"
            log.append(record)

    def poll(self, max_records: int, timeout_s: float, partition: int | None = None) -> list[Record]:
        out: list[Record] = []
        while len(out) < max_records:
            heads = [(log[at].timestamp_ms, p) for p, log in self._logs.items() if (at := self._at[p]) < len(log)]
            if partition is not None:
                heads = [head for head in heads if head[1] == partition]
            if not heads:
                break
            chosen = min(heads)[1]
            out.append(self._logs[chosen][self._at[chosen]])
            self._at[chosen] += 1
            self._position_ms[chosen] = out[-1].timestamp_ms
        return out

    def seek(self, offsets: Mapping[int, int]) -> None:
        for p, log in self._logs.items():
            self._at[p] = offsets.get(p, 0)
            self._position_ms[p] = log[self._at[p] - 1].timestamp_ms if self._at[p] else 0

    def positions(self) -> dict[int, int]:
        return dict(self._at)

    def end_offsets(self) -> dict[int, int]:
        return {p: len(log) for p, log in self._logs.items()}

    def lag(self) -> dict[int, PartitionLag]:
        return {
            p: PartitionLag(
                position=self._at[p],
                stable_end=len(log),
                high_watermark=len(log),
                position_ms=self._position_ms[p],
                newest_ms=max((r.timestamp_ms for r in log[-256:]), default=0),
            )
            for p, log in self._logs.items()
        }

    def close(self) -> None:
        """Nothing is held."""
