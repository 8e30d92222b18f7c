"""The `local` engine: the same `join.py` in this process, one watermark, one heap of timers.

In-process (replays, tests): feed `process` in the order of arrival, then `end_of_input`. `joiner/local_pump.py` runs it between
Kafka topics.
"""

from __future__ import annotations

import heapq

import msgspec
import xxhash

from joiner.build import Output
from joiner.config import JoinerConfig
from joiner.entries import decode, encode
from joiner.ingest import Beat, Event, Reader
from joiner.join import Join
from joiner.local_watermark import SplitTime, Watermarks
from joiner.state import END, Engagement, Impression, MemoryState
from joiner.turn import Turn
from roostream.errors import CheckpointError
from roostream.runtime.event_time import START
from roostream.runtime.kafka.topics import EVENTS, Partition, Progress, all_partitions
from roostream.schema.schema import Registry, Schema
from roostream.wire import roo_pb2 as pb
from roostream.wire.records import Record

_FORMAT = 3


class EngineSnapshot(msgspec.Struct, array_like=True):
    """Everything that the engine knows; a state's bytes are `entries.encode`'s."""

    watermark_ms: int
    splits: list[tuple[str, int, int, SplitTime]]  # topic, partition, next offset
    states: dict[bytes, bytes]


class LocalEngine:
    """Single-threaded. `watermark_ms`, `watermarks`, `partitions`, `next_offsets` and `num_keys` are for whoever runs it."""

    def __init__(self, config: JoinerConfig, schema: Schema, registry: Registry) -> None:
        self.reader = Reader(registry, schema.limits)
        self.join = Join(config.rules, registry, schema.limits)
        self.partitions = all_partitions(EVENTS, config.partitions)
        self.watermarks = Watermarks(self.partitions, config.lateness_ms)
        self._drift_ms, self._silent_ms = config.drift_ms, config.producer_timeout_ms
        self._splits = {partition: SplitTime() for partition in self.partitions}
        self.next_offsets: Progress = {}
        self._states: dict[bytes, MemoryState] = {}
        self._timers: list[tuple[int, bytes]] = []  # (due_ms, key)
        self._watermark_ms = START

    @property
    def watermark_ms(self) -> int:
        return self._watermark_ms

    @property
    def num_keys(self) -> int:
        return len(self._states)

    def process(self, record: Record) -> list[Output]:
        """One record: the event first, then what the watermark that it moves makes due. Raises as `Reader.read`; the engine is
        then as before."""
        return self.take(record, self.reader.read(record))

    def take(self, record: Record, event: Event | Beat | Output) -> list[Output]:
        """`process` for whoever has read the record: `event` is what `reader` made of it."""
        partition = (record.topic, record.partition)
        self.next_offsets[partition] = record.offset + 1
        if isinstance(event, Output):
            return [event]  # it says nothing of the time
        outputs = self._join(record, event) if isinstance(event, (Impression, Engagement)) else []
        split = self._splits[partition]
        self._tell(split, record, event)
        return outputs + self._advance(self.watermarks.observe(partition, split.reached_ms(self._silent_ms)))

    def set_idle(self, partition: Partition) -> list[Output]:
        """A partition has been silent for the configured time."""
        return self._advance(self.watermarks.set_idle(partition))

    def end_of_input(self) -> list[Output]:
        """Nothing will come: every request closes, every orphan is given up. The engine is empty afterwards."""
        return self._advance(END)

    def _tell(self, split: SplitTime, record: Record, event: Event | Beat) -> None:
        """What a record says of event time; heartbeats whose record has another time say nothing."""
        if isinstance(event, (Impression, Engagement)):
            split.event(record.timestamp_ms, self._drift_ms)
        elif event.time_ms != record.timestamp_ms:
            return
        elif isinstance(event, pb.Heartbeat):
            split.beat(event.time_ms, event.producer, self._silent_ms)
        else:
            split.end(event.time_ms)

    def _join(self, record: Record, event: Event) -> list[Output]:
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

    def _finish(self, key: bytes, state: MemoryState, turn: Turn) -> list[Output]:
        for due_ms in turn.timers_ms:
            heapq.heappush(self._timers, (due_ms, key))
        if not state.requests:
            del self._states[key]
        return turn.outputs

    def snapshot(self) -> bytes:
        """Checksum, then the state and the offsets that it includes."""
        splits = [(t, p, self.next_offsets.get((t, p), 0), split) for (t, p), split in self._splits.items()]
        states = {key: encode(state) for key, state in self._states.items()}
        body = msgspec.msgpack.encode((_FORMAT, EngineSnapshot(self._watermark_ms, splits, states)))
        return xxhash.xxh3_64_digest(body) + body

    def restore(self, data: bytes) -> None:
        """Go on from a snapshot; for an engine that has processed nothing.

        Raises:
            CheckpointError: it is damaged, or another version's; the engine is as before.
        """
        try:
            if xxhash.xxh3_64_digest(data[8:]) != data[:8]:
                raise CheckpointError(f"a snapshot of {len(data)} bytes is damaged: its checksum is wrong")
            version, body = msgspec.msgpack.decode(data[8:], type=tuple[int, msgspec.Raw])
            if version != _FORMAT:
                raise CheckpointError(
                    f"expected a snapshot of format {_FORMAT}, got {version}; restore it with the build that wrote it"
                )
            snapshot = msgspec.msgpack.decode(body, type=EngineSnapshot)
        except msgspec.MsgspecError as error:
            raise CheckpointError(f"a snapshot can't be read: {error}") from None
        self._states = {key: decode(state) for key, state in snapshot.states.items()}
        self._timers = [(due_ms, key) for key, state in self._states.items() for due_ms in state.due]
        heapq.heapify(self._timers)
        self._watermark_ms = snapshot.watermark_ms
        for topic, partition, offset, split in snapshot.splits:
            self.next_offsets[topic, partition] = offset
            self._splits[topic, partition] = split
        reached_ms = {
            partition: split.reached_ms(self._silent_ms) for partition, split in self._splits.items()
        }
        self.watermarks.restore(reached_ms, snapshot.watermark_ms)
