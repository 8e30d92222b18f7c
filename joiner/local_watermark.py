"""Event time of the local engine: the rule that Flink's bounded-disorder generator follows, partition by partition."""

from __future__ import annotations

from collections.abc import Iterable

from joiner.state import START
from runtime.kafka.topics import Partition


class Watermarks:
    """Watermark = min over partitions of (newest record timestamp - bound - 1 ms); START until each has had a record.

    It never goes back. Idle partitions don't hold it; a record makes a partition busy again.
    """

    def __init__(self, partitions: Iterable[Partition], lateness_ms: int) -> None:
        self.lateness_ms = lateness_ms
        self.newest_ms: dict[Partition, int] = dict.fromkeys(partitions, START)
        self.idle: set[Partition] = set()
        self.value_ms = START

    def observe(self, partition: Partition, timestamp_ms: int) -> int:
        """A record was read; the watermark after it."""
        self.idle.discard(partition)
        if timestamp_ms > self.newest_ms.setdefault(partition, START):
            self.newest_ms[partition] = timestamp_ms
        return self._update()

    def set_idle(self, partition: Partition) -> int:
        """No record for a while; the watermark without this partition. All idle: it stays."""
        self.idle.add(partition)
        return self._update()

    def ahead_ms(self, partition: Partition) -> int:
        """How far a partition has been read beyond the slowest that has had a record."""
        seen = [ms for ms in self.newest_ms.values() if ms != START]
        return self.newest_ms[partition] - min(seen) if seen and self.newest_ms[partition] != START else 0

    def _update(self) -> int:
        busy = [ms for partition, ms in self.newest_ms.items() if partition not in self.idle]
        slowest_ms = min(busy, default=START)
        if slowest_ms != START:
            self.value_ms = max(self.value_ms, slowest_ms - self.lateness_ms - 1)
        return self.value_ms
