"""Event time of the local engine, partition by partition; joiner/java/EventTime.java follows the same rules in Flink."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import field

from roostream.runtime.event_time import START, SteppedEventTime
from roostream.runtime.kafka.topics import Partition


class SplitTime(SteppedEventTime, array_like=True):
    """How far one partition has come.

    No single event can carry it away (SteppedEventTime). Where several producers beat, the slowest of them holds it: what another one
    wrote says nothing of what this one still has to write. One whose beats are older than `silent_ms` is away and holds nothing.
    """

    beats: dict[str, int] = field(default_factory=dict)  # producer → its newest heartbeat

    def beat(self, time_ms: int, producer: str, silent_ms: int) -> None:
        """A heartbeat. Those who don't say who they are are believed like an event."""
        self.newest_ms = max(self.newest_ms, time_ms)
        if producer:
            self.beats[producer] = max(self.beats.get(producer, START), time_ms)
        self.beats = {name: ms for name, ms in self.beats.items() if ms >= self.newest_ms - silent_ms}

    def end(self, time_ms: int) -> None:
        """An end marker: no producer will write anything older."""
        self.newest_ms = max(self.newest_ms, time_ms)
        self.beats = {}

    def reached_ms(self, silent_ms: int) -> int:
        """START before the first record."""
        if len(self.beats) < 2:
            return self.newest_ms
        live = [ms for ms in self.beats.values() if ms >= self.newest_ms - silent_ms]
        return min(live) if len(live) > 1 else self.newest_ms


class Watermarks:
    """Watermark = min over partitions of (event time that it has reached - bound of disorder - 1 ms); START until each has had a
    record. It never goes back. Idle partitions don't hold it; a record makes a partition busy again."""

    def __init__(self, partitions: Iterable[Partition], lateness_ms: int) -> None:
        self.lateness_ms = lateness_ms
        self.reached_ms: dict[Partition, int] = dict.fromkeys(partitions, START)
        self.idle: set[Partition] = set()
        self.value_ms = START
        self._slowest_ms = START  # of the busy ones

    def restore(self, reached_ms: Mapping[Partition, int], value_ms: int) -> None:
        """Go on from a snapshot's; all partitions are busy."""
        self.reached_ms.update(reached_ms)
        self.value_ms = value_ms
        self._update()

    def observe(self, partition: Partition, reached_ms: int) -> int:
        """A record was read, with which its partition has reached `reached_ms`; the watermark after it."""
        before_ms, was_idle = self.reached_ms[partition], partition in self.idle
        self.reached_ms[partition] = reached_ms
        if was_idle:
            self.idle.discard(partition)
        elif before_ms > self._slowest_ms and reached_ms >= before_ms:
            return self.value_ms
        return self._update()

    def set_idle(self, partition: Partition) -> int:
        """No record for a while; the watermark without this partition. All idle: it stays."""
        self.idle.add(partition)
        return self._update()

    def ahead_ms(self, partition: Partition) -> int:
        """How far a partition has been read beyond the slowest busy one that has had a record."""
        reached_ms = self.reached_ms[partition]
        seen = [ms for p, ms in self.reached_ms.items() if ms != START and p not in self.idle]
        return reached_ms - min(seen, default=reached_ms) if reached_ms != START else 0

    def _update(self) -> int:
        busy = [ms for partition, ms in self.reached_ms.items() if partition not in self.idle]
        self._slowest_ms = min(busy, default=START)
        if self._slowest_ms != START:
            self.value_ms = max(self.value_ms, self._slowest_ms - self.lateness_ms - 1)
        return self.value_ms
