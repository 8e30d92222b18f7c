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
from joiner.ingest import Reader
from joiner.join import Join
from joiner.local_watermark import Watermarks
from joiner.state import END, START, MemoryState
from joiner.turn import Turn
from roo.errors import CheckpointError
from roo.schema import Registry, Schema
from roo.wire import Record
from runtime.kafka.topics import EVENTS, Partition, Progress, all_partitions

_FORMAT = 2


class EngineSnapshot(msgspec.Struct, array_like=True):
    """Everything that the engine knows; a state's bytes are `entries.encode`'s."""

    watermark_ms: int
    splits: list[tuple[str, int, int, int]]  # topic, partition, next offset, newest timestamp
    states: dict[bytes, bytes]


class LocalEngine:
    """Single-threaded. `watermark_ms`, `next_offsets` and `num_keys` are for whoever runs it."""

    def __init__(self, config: JoinerConfig, schema: Schema, registry: Registry) -> None:
        self.reader = Reader(registry, schema.limits)
        self.join = Join(config.rules, registry, schema.limits.max_candidates)
        partitions = all_partitions(EVENTS, config.partitions)
        self.watermarks = Watermarks(partitions, config.lateness_ms)
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
        """One record: the event first, then what the watermark that it moves makes due."""
        outputs = self._event(record)
        partition = (record.topic, record.partition)
        self.next_offsets[partition] = record.offset + 1
        return outputs + self._advance(self.watermarks.observe(partition, record.timestamp_ms))

    def set_idle(self, partition: Partition) -> list[Output]:
        """A partition has been silent for the configured time."""
        return self._advance(self.watermarks.set_idle(partition))

    def end_of_input(self) -> list[Output]:
        """Nothing will come: every request closes, every orphan is given up. The engine is empty afterwards."""
        return self._advance(END)

    def _event(self, record: Record) -> list[Output]:
        event = self.reader.read(record)
        if event is None or isinstance(event, Output):
            return [] if event is None else [event]
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
        newest = self.watermarks.newest_ms
        splits = [(t, p, self.next_offsets.get((t, p), 0), ms) for (t, p), ms in newest.items()]
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
            version, snapshot = msgspec.msgpack.decode(data[8:], type=tuple[int, EngineSnapshot])
        except msgspec.MsgspecError as error:
            raise CheckpointError(f"a snapshot can't be read: {error}") from None
        if version != _FORMAT:
            raise CheckpointError(
                f"expected a snapshot of format {_FORMAT}, got {version}; restore it with the build that wrote it"
            )
        self._states = {key: decode(state) for key, state in snapshot.states.items()}
        self._timers = [(due_ms, key) for key, state in self._states.items() for due_ms in state.due]
        heapq.heapify(self._timers)
        self._watermark_ms = self.watermarks.value_ms = snapshot.watermark_ms
        for topic, partition, offset, newest_ms in snapshot.splits:
            self.next_offsets[topic, partition] = offset
            self.watermarks.newest_ms[topic, partition] = newest_ms
