"""The `local` engine: the join in one process, with one watermark over all partitions and one heap of timers.

For replays and tests, call `process` in the order of arrival, then `end_of_input`. `joiner/local_runner.py`
runs it on Kafka.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import msgspec
import xxhash

from joiner.config import JoinerConfig
from joiner.event_decoder import Event, EventDecoder, TimeMark
from joiner.join import Join, StepResult
from joiner.outputs import Output
from joiner.state import END, GONE, PHASES, Engagement, Impression, MemoryState, decode, encode
from roostream.errors import CheckpointError, ConfigError, OtherVersionError
from roostream.runtime.event_time import START, SteppedEventTime
from roostream.runtime.kafka.topics import EVENTS, Partition, Progress, all_partitions
from roostream.schema.schema import Registry, Schema
from roostream.wire import roo_pb2 as pb
from roostream.wire.event_checks import MAX_TIME_MS
from roostream.wire.records import Record

log = logging.getLogger("roostream.joiner")
_FORMAT = 3


class PartitionTime(SteppedEventTime, array_like=True):
    """Event time that one partition has reached; joiner/java/EventTime.java follows the same rules in Flink.

    No single event can move it far (`SteppedEventTime`). If several producers send heartbeats, the slowest
    one holds it back, because the others' records say nothing about what that producer will still write. A
    producer whose last heartbeat is more than `timeout_ms` old is ignored.
    """

    heartbeats: dict[str, int] = msgspec.field(default_factory=dict)  # producer → newest heartbeat

    def heartbeat(self, time_ms: int, producer: str, timeout_ms: int) -> None:
        """Note a heartbeat; one without the name of its producer counts as an event."""
        self.newest_ms = max(self.newest_ms, time_ms)
        if producer:
            self.heartbeats[producer] = max(self.heartbeats.get(producer, START), time_ms)
        oldest_ms = self.newest_ms - timeout_ms
        self.heartbeats = {name: ms for name, ms in self.heartbeats.items() if ms >= oldest_ms}

    def end_marker(self, time_ms: int) -> None:
        """Note an end marker: no producer will write anything older."""
        self.newest_ms = max(self.newest_ms, time_ms)
        self.heartbeats = {}

    def reached_ms(self, timeout_ms: int) -> int:
        """The event time that the partition has reached, in ms; START before its first record."""
        if len(self.heartbeats) < 2:
            return self.newest_ms
        live = [ms for ms in self.heartbeats.values() if ms >= self.newest_ms - timeout_ms]
        return min(live) if len(live) > 1 else self.newest_ms


class Watermarks:
    """Watermark = minimum over partitions of (event time reached - lateness - 1 ms); START until each
    partition has a record.

    It never decreases. Idle partitions do not hold it back; a record makes its partition busy again.
    """

    def __init__(self, partitions: Iterable[Partition], lateness_ms: int) -> None:
        self.lateness_ms = lateness_ms
        self.reached_ms: dict[Partition, int] = dict.fromkeys(partitions, START)
        self.idle: set[Partition] = set()
        self.value_ms = START
        self._slowest_ms = START  # of the busy partitions

    def restore(self, reached_ms: Mapping[Partition, int], value_ms: int) -> None:
        """Continue from a snapshot; all partitions are busy."""
        self.reached_ms.update(reached_ms)
        self.value_ms = value_ms
        self._update()

    def observe(self, partition: Partition, reached_ms: int) -> int:
        """Note that a record moved the event time of its partition to `reached_ms`; return the watermark."""
        before_ms, was_idle = self.reached_ms[partition], partition in self.idle
        self.reached_ms[partition] = reached_ms
        if was_idle:
            self.idle.discard(partition)
        elif before_ms > self._slowest_ms and reached_ms >= before_ms:
            return self.value_ms
        return self._update()

    def set_idle(self, partition: Partition) -> int:
        """Leave this partition out, and return the new watermark; if all are idle, it stays where it is."""
        self.idle.add(partition)
        return self._update()

    def ahead_ms(self, partition: Partition) -> int:
        """Return the lead of a partition over the slowest other one, in ms. Idle partitions and those without
        a record do not count; 0 for a partition without a record."""
        reached_ms = self.reached_ms[partition]
        seen = [ms for p, ms in self.reached_ms.items() if ms != START and p not in self.idle]
        return reached_ms - min(seen, default=reached_ms) if reached_ms != START else 0

    def _update(self) -> int:
        busy = [ms for partition, ms in self.reached_ms.items() if partition not in self.idle]
        self._slowest_ms = min(busy, default=START)
        if self._slowest_ms != START:
            self.value_ms = max(self.value_ms, self._slowest_ms - self.lateness_ms - 1)
        return self.value_ms


class EngineSnapshot(msgspec.Struct, array_like=True):
    """The complete engine; states are encoded by `joiner.state.encode`."""

    watermark_ms: int
    partitions: list[tuple[str, int, int, PartitionTime]]  # topic, number, next offset, event time
    states: dict[bytes, bytes]
    rules: str = ""  # `Rules.text`; empty in snapshots that were written before it was kept
    topics: dict[str, str] = {}  # name → the broker's topic id; empty in older snapshots and in replays


class LocalEngine:
    """Not thread-safe."""

    def __init__(
        self,
        config: JoinerConfig,
        schema: Schema,
        registry: Registry,
        topics: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`topics`: full name of an event topic → the broker's topic id; {} = of no broker."""
        self.decoder, self._topics = EventDecoder(registry, schema.limits), dict(topics)
        self.join, self._rules = Join(config.rules, registry, schema.limits), config.rules.text
        self.rules_changed = False  # the restored snapshot was written under other rules
        self.partitions = all_partitions(EVENTS, config.partitions)
        self.watermarks = Watermarks(self.partitions, config.lateness_ms)
        self._max_step_ms, self._producer_timeout_ms = config.max_drift_ms, config.producer_timeout_ms
        self._times = {partition: PartitionTime() for partition in self.partitions}
        self.next_offsets: Progress = {}
        self._states: dict[bytes, MemoryState] = {}
        self.num_requests = [0] * len(PHASES)  # by phase
        self._timers: list[tuple[int, bytes]] = []  # heap of (due_ms, key)
        self._watermark_ms = START

    @property
    def watermark_ms(self) -> int:
        return self._watermark_ms

    @property
    def num_keys(self) -> int:
        return len(self._states)

    def process(self, record: Record) -> list[Output]:
        """Join one record, then do what the new watermark makes due.

        Raises:
            CheckpointError, UnavailableError: as `EventDecoder.decode`; the engine is unchanged.
        """
        return self.process_decoded(record, self.decoder.decode(record))

    def process_decoded(self, record: Record, event: Event | TimeMark | Output) -> list[Output]:
        """`process` for a record that `decoder` has decoded."""
        partition = (record.topic, record.partition)
        self.next_offsets[partition] = record.offset + 1
        if isinstance(event, Output):
            return [event]  # a dead letter does not advance event time
        outputs: list[Output] = []
        time = self._times[partition]
        if isinstance(event, (Impression, Engagement)):
            outputs = self._apply(record, event)
            time.event(record.timestamp_ms, self._max_step_ms)
        elif event.time_ms == record.timestamp_ms and 1 <= event.time_ms <= MAX_TIME_MS:  # others are ignored
            if isinstance(event, pb.Heartbeat):
                time.heartbeat(event.time_ms, event.producer, self._producer_timeout_ms)
            else:
                time.end_marker(event.time_ms)
        return outputs + self._advance(
            self.watermarks.observe(partition, time.reached_ms(self._producer_timeout_ms))
        )

    def set_idle(self, partition: Partition) -> list[Output]:
        """Leave out a partition that was silent for `idleness_ms`; return what this makes due."""
        return self._advance(self.watermarks.set_idle(partition))

    def end_of_input(self) -> list[Output]:
        """Close every request and refuse every orphan. The engine is empty afterwards."""
        return self._advance(END)

    def _apply(self, record: Record, event: Event) -> list[Output]:
        assert record.key is not None
        state = self._states.get(record.key)
        if state is None:
            state = self._states[record.key] = MemoryState()
        return self._finish(record.key, state, self.join.apply(state, record.key, event, self._watermark_ms))

    def _advance(self, watermark_ms: int) -> list[Output]:
        self._watermark_ms = max(self._watermark_ms, watermark_ms)
        outputs: list[Output] = []
        while self._timers and self._timers[0][0] <= self._watermark_ms:
            due_ms, key = heapq.heappop(self._timers)
            state = self._states.get(key)
            if state is not None:
                outputs += self._finish(key, state, self.join.advance(state, key, due_ms, self._watermark_ms))
        return outputs

    def _finish(self, key: bytes, state: MemoryState, step: StepResult) -> list[Output]:
        for before, after in step.phase_changes:
            if before != GONE:
                self.num_requests[before] -= 1
            if after != GONE:
                self.num_requests[after] += 1
        for due_ms in step.timers_ms:
            heapq.heappush(self._timers, (due_ms, key))
        if not state.requests:
            del self._states[key]
        return step.outputs

    def snapshot(self) -> bytes:
        """A checksum, then the state with the offsets of exactly the records it includes."""
        partitions = [(t, p, self.next_offsets.get((t, p), 0), time) for (t, p), time in self._times.items()]
        states = {key: encode(state) for key, state in self._states.items()}
        snapshot = EngineSnapshot(self._watermark_ms, partitions, states, self._rules, self._topics)
        body = msgspec.msgpack.encode((_FORMAT, snapshot))
        return xxhash.xxh3_64_digest(body) + body

    def restore(self, data: bytes) -> None:
        """Continue from a snapshot; only for an engine that has processed nothing.

        Raises:
            CheckpointError: the snapshot is damaged; the engine is unchanged.
            OtherVersionError: it has another format; the engine is unchanged.
            ConfigError: its offsets are of another cluster, or of topics that were deleted since; the engine
            is unchanged.
        """
        try:
            if xxhash.xxh3_64_digest(data[8:]) != data[:8]:
                raise CheckpointError(f"the snapshot ({len(data)} bytes) is damaged: wrong checksum")
            version, body = msgspec.msgpack.decode(data[8:], type=tuple[int, msgspec.Raw])
            if version != _FORMAT:
                text = f"expected a snapshot of format {_FORMAT}, got {version}; use the build that wrote it"
                raise OtherVersionError(text)
            snapshot = msgspec.msgpack.decode(body, type=EngineSnapshot)
        except msgspec.MsgspecError as error:
            raise CheckpointError(f"the snapshot can't be decoded: {error}") from None
        if self._topics and snapshot.topics and snapshot.topics != self._topics:
            raise ConfigError(
                f"the snapshot's offsets are of the topics {snapshot.topics}, got {self._topics}: they were "
                "created again, or this is another cluster. Restore the old broker's data, or remove the "
                "snapshots to join all records of the present topics"
            )
        self.rules_changed = bool(snapshot.rules) and snapshot.rules != self._rules
        if self.rules_changed:
            log.warning(
                "the rules of the join have changed, from %s to %s; what applies to requests that are "
                "already open: docs/decisions/0003-join-semantics.md",
                snapshot.rules,
                self._rules,
            )
        self._states = {key: decode(state) for key, state in snapshot.states.items()}
        self._timers = [(due_ms, key) for key, state in self._states.items() for due_ms in state.due]
        heapq.heapify(self._timers)
        self.num_requests = [0] * len(PHASES)
        for state in self._states.values():
            for request in state.requests.values():
                self.num_requests[request.phase] += 1
        self._watermark_ms = snapshot.watermark_ms
        for topic, partition, offset, time in snapshot.partitions:
            self.next_offsets[topic, partition] = offset
            self._times[topic, partition] = time
        reached_ms = {p: time.reached_ms(self._producer_timeout_ms) for p, time in self._times.items()}
        self.watermarks.restore(reached_ms, snapshot.watermark_ms)
