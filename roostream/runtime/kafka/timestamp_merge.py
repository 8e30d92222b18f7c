"""Merges partitions by record timestamp while a consumer lags.

Without it day 3 of one partition would be trained or counted before day 1 of another, and live metrics would
have seen their own future.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from roostream.runtime.kafka.topics import Partition
from roostream.wire.records import Record


class TimestampMerge:
    """Bounded buffers, one a partition; `take` returns the oldest buffered record first.

    A partition with an empty buffer that is not at its end may hold an older record, so nothing is returned
    until it delivers. A partition at its end never holds up the others. `num_free` says how many records may
    be fetched.
    """

    def __init__(
        self, partitions: Sequence[Partition], max_buffered: int = 4096, max_buffered_bytes: int = 8 << 20
    ) -> None:
        """At equal times the partition that is named first comes first. Both limits apply to each partition:
        one record may have MAX_MESSAGE_BYTES, so a number of records alone bounds no memory."""
        self.max_buffered, self.max_buffered_bytes = max_buffered, max_buffered_bytes
        self._bytes: dict[Partition, int] = dict.fromkeys(partitions, 0)
        self._buffers: dict[Partition, deque[Record]] = {p: deque() for p in partitions}
        self._at_end: dict[Partition, bool] = dict.fromkeys(partitions, False)

    def offer(self, record: Record) -> None:
        partition = record.topic, record.partition
        self._buffers[partition].append(record)
        self._bytes[partition] += len(record.value)
        self._at_end[partition] = False

    def reached_end(self, partition: Partition) -> None:
        """All existing records were offered; until the next offer the others do not wait for this
        partition."""
        self._at_end[partition] = True

    def at_end(self, partition: Partition) -> bool:
        return self._at_end[partition]

    def is_drained(self, partition: Partition) -> bool:
        """All existing records were offered and taken."""
        return self._at_end[partition] and not self._buffers[partition]

    def num_free(self, partition: Partition) -> int:
        """Records that may still be offered if they are as large as those in the buffer."""
        free_bytes = self.max_buffered_bytes - self._bytes[partition]
        by_bytes = self.max_buffered * free_bytes // self.max_buffered_bytes
        return max(min(self.max_buffered - len(self._buffers[partition]), by_bytes), 0)

    def head(self, partition: Partition) -> int | None:
        """Offset of the next buffered record; None: the buffer is empty."""
        buffer = self._buffers[partition]
        return buffer[0].offset if buffer else None

    def take(self, max_records: int, is_closed: Callable[[Partition], bool] | None = None) -> list[Record]:
        """Oldest first by (timestamp, partition), while no silent partition could hold an older record. A
        partition for which `is_closed` is true returns nothing, and the others do not wait for it."""
        out: list[Record] = []
        while len(out) < max_records:
            buffers = (
                {p: b for p, b in self._buffers.items() if not is_closed(p)} if is_closed else self._buffers
            )
            heads = [(b[0].timestamp_ms, n, p) for n, (p, b) in enumerate(buffers.items()) if b]
            if not heads or any(not b and not self._at_end[p] for p, b in buffers.items()):
                break
            out.append(self._pop(min(heads)[2]))
        return out

    def take_from(
        self, partition: Partition, max_records: int, is_closed: Callable[[Partition], bool] | None = None
    ) -> list[Record]:
        """The next records of one partition, whatever the others hold."""
        out: list[Record] = []
        while (
            len(out) < max_records and self._buffers[partition] and not (is_closed and is_closed(partition))
        ):
            out.append(self._pop(partition))
        return out

    def take_any(self, max_records: int) -> list[Record]:
        """Buffered records, partition by partition."""
        out: list[Record] = []
        for partition in self._buffers:
            out += self.take_from(partition, max_records - len(out))
        return out

    def truncate(self, partition: Partition, end: int) -> None:
        """Forget the buffered records of a partition from offset `end` on; it may get more records."""
        buffer = self._buffers[partition]
        while buffer and buffer[-1].offset >= end:
            self._bytes[partition] -= len(buffer.pop().value)
        self._at_end[partition] = False

    def clear(self) -> None:
        """Forget all records, and which partitions are at their end."""
        for partition, buffer in self._buffers.items():
            buffer.clear()
            self._bytes[partition] = 0
            self._at_end[partition] = False

    def _pop(self, partition: Partition) -> Record:
        record = self._buffers[partition].popleft()
        self._bytes[partition] -= len(record.value)
        return record
