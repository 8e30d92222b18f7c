"""Partitions merged by record timestamp while a reader lags.

Otherwise day 3 of one partition would be trained or counted before day 1 of another, and live metrics would have seen their
own future.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from roostream.runtime.kafka.topics import Partition
from roostream.wire.records import Record


class Merge:
    """Bounded buffers, one a partition; gives the oldest head.

    A partition that has nothing buffered and is not at its end may hold an older record, so nothing is given until it speaks;
    a partition at its end never holds up the others. `room` says who may be fetched.
    """

    def __init__(
        self, partitions: Sequence[Partition], buffered: int = 4096, buffered_bytes: int = 8 << 20
    ) -> None:
        """Of equal times the partition named first comes first. `buffered`, `buffered_bytes`: records a partition, and their
        bytes: a record may be MAX_MESSAGE_BYTES, so that a number alone bounds no memory."""
        self.buffered, self.buffered_bytes = buffered, buffered_bytes
        self._bytes: dict[Partition, int] = dict.fromkeys(partitions, 0)
        self._buffers: dict[Partition, deque[Record]] = {p: deque() for p in partitions}
        self._at_end: dict[Partition, bool] = dict.fromkeys(partitions, False)

    def offer(self, record: Record) -> None:
        partition = record.topic, record.partition
        self._buffers[partition].append(record)
        self._bytes[partition] += len(record.value)
        self._at_end[partition] = False

    def reached_end(self, partition: Partition) -> None:
        """Everything that exists now has been offered; until the next offer, this partition has no say."""
        self._at_end[partition] = True

    def at_end(self, partition: Partition) -> bool:
        """All of it that exists has been offered."""
        return self._at_end[partition]

    def is_drained(self, partition: Partition) -> bool:
        """All of it that exists has been offered and given."""
        return self._at_end[partition] and not self._buffers[partition]

    def room(self, partition: Partition) -> int:
        """Records that may still be offered, if they are as large as those that are here."""
        by_bytes = self.buffered * (self.buffered_bytes - self._bytes[partition]) // self.buffered_bytes
        return max(min(self.buffered - len(self._buffers[partition]), by_bytes), 0)

    def head(self, partition: Partition) -> int | None:
        """Offset of its next record; None: none is here."""
        buffer = self._buffers[partition]
        return buffer[0].offset if buffer else None

    def take(self, max_records: int, closed: Callable[[Partition], bool] | None = None) -> list[Record]:
        """Oldest first by (timestamp, partition), for as long as no silent partition could hold an older one. A partition that is
        `closed` now has no say, and gives nothing."""
        out: list[Record] = []
        while len(out) < max_records:
            have_say = {p: b for p, b in self._buffers.items() if not closed(p)} if closed else self._buffers
            heads = [(b[0].timestamp_ms, n, p) for n, (p, b) in enumerate(have_say.items()) if b]
            if not heads or any(not b and not self._at_end[p] for p, b in have_say.items()):
                break
            out.append(self._pop(min(heads)[2]))
        return out

    def take_of(
        self, partition: Partition, max_records: int, closed: Callable[[Partition], bool] | None = None
    ) -> list[Record]:
        """The next of one partition, whatever the others hold, until it is `closed`."""
        out: list[Record] = []
        while len(out) < max_records and self._buffers[partition] and not (closed and closed(partition)):
            out.append(self._pop(partition))
        return out

    def take_any(self, max_records: int) -> list[Record]:
        """What is there, partition by partition."""
        out: list[Record] = []
        for partition in self._buffers:
            out += self.take_of(partition, max_records - len(out))
        return out

    def clear(self) -> None:
        """Forget what was offered, and who is at the end."""
        for partition, buffer in self._buffers.items():
            buffer.clear()
            self._bytes[partition] = 0
            self._at_end[partition] = False

    def _pop(self, partition: Partition) -> Record:
        record = self._buffers[partition].popleft()
        self._bytes[partition] -= len(record.value)
        return record
