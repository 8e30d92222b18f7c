"""Kafka → local engine → Kafka, at least once.

    1 poll records and join them; outputs are queued in the producer
    2 every checkpoint_interval: wait until all outputs are acknowledged
    3 write a snapshot: the state and the offsets of exactly the records that it includes
    4 a start goes on from the newest snapshot that can be read

What was written between a snapshot and a crash is written again, with the same ids.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Protocol

from joiner.build import Output
from joiner.config import JoinerConfig
from joiner.local_engine import LocalEngine
from joiner.meters import Meters
from roo.errors import CheckpointError, UnavailableError
from runtime.backoff import Backoff
from runtime.checkpoint_store import CheckpointStore
from runtime.clock import Clock
from runtime.health import Health
from runtime.kafka.record_reader import RecordReader
from runtime.kafka.topics import Partition

log = logging.getLogger("roostream.joiner")
_KEPT = 2
_POLL_RECORDS = 512


class Sink(Protocol):
    def write(self, outputs: Sequence[Output]) -> None:
        """Queue records; may wait for room."""

    def flush(self, stop: threading.Event) -> bool:
        """Wait until all that was queued is acknowledged; False if `stop` was set before."""


class Snapshots:
    """`snapshots/<number>` in a store, the newest two."""

    def __init__(self, store: CheckpointStore) -> None:
        self.store = store

    def write(self, data: bytes) -> None:
        """Durable before the older ones go. UnavailableError (disk full): the older ones stay."""
        names = self.store.list("snapshots")
        number = int(names[-1].rsplit("/", 1)[1]) + 1 if names else 1
        self.store.put(f"snapshots/{number:08d}", data)
        for name in names[: 1 - _KEPT]:
            self.store.delete(name)

    def restore(self, engine: LocalEngine) -> str:
        """Bring `engine` to the newest snapshot that can be read; its name, "" if there is none.

        Raises:
            CheckpointError: there are snapshots, and none can be read.
        """
        names = self.store.list("snapshots")
        for name in reversed(names):
            try:
                engine.restore(self.store.get(name))
                return name
            except CheckpointError as error:
                log.warning("%s is passed over: %s", name, error)
        if names:
            raise CheckpointError(f"none of {len(names)} snapshots can be read; remove them to join from the oldest record")
        return ""


class Pump:
    """One run of the engine; see the module for the numbers."""

    def __init__(
        self,
        config: JoinerConfig,
        engine: LocalEngine,
        source: RecordReader,
        sink: Sink,
        snapshots: Snapshots,
        *,
        clock: Clock,
        meters: Meters,
        health: Health,
    ) -> None:
        self.config, self.engine, self.source, self.sink, self.snapshots = config, engine, source, sink, snapshots
        self.clock, self.meters, self.health = clock, meters, health
        self._heard_s: dict[Partition, float] = {}
        self._idleness_s = 0.0 if config.replay else config.idleness_ms / 1000

    def run(self, stop: threading.Event) -> None:
        """Until `stop` is set; the last snapshot includes all that was read."""
        name = self.snapshots.restore(self.engine)  # 4
        log.info("joining from %s", name or "the oldest records")
        progress = {p: offset for p, offset in self.engine.next_offsets.items() if offset}  # 0: nothing of it was read
        Backoff(what="the event topics", clock=self.clock).until(lambda: self.source.seek(progress), (UnavailableError,), stop)
        started_s = self.clock.monotonic_s()
        self._heard_s = dict.fromkeys(self.engine.watermarks.newest_ms, started_s)
        due_s = started_s + self.config.checkpoint_interval_ms / 1000
        while not stop.is_set():
            self.step()
            if self.clock.monotonic_s() >= due_s:
                self.checkpoint(stop)
                due_s = self.clock.monotonic_s() + self.config.checkpoint_interval_ms / 1000
        self.checkpoint(threading.Event())

    def step(self, timeout_s: float = 0.05) -> None:
        """Join the records that are there, find idle partitions, hold those far ahead (1)."""
        records = self.source.poll(_POLL_RECORDS, timeout_s)
        now_s = self.clock.monotonic_s()
        for record in records:
            self._heard_s[record.topic, record.partition] = now_s
            self._write(self.engine.process(record))
        self.meters.read(len(records))
        if self._idleness_s:
            self._find_idle(now_s)
        ahead = {p for p in self.engine.watermarks.newest_ms if self.engine.watermarks.ahead_ms(p) > self.config.drift_ms}
        self.source.hold(ahead)
        self.meters.state(self.engine.watermark_ms, self.engine.num_keys)
        self.health.turned()

    def checkpoint(self, stop: threading.Event) -> None:
        """Wait for all outputs to be acknowledged, then write a snapshot (2, 3). `stop` set first: none is written."""
        with self.health.waiting("Kafka to take what was joined"):
            taken = self.sink.flush(stop)
        if taken:
            self.snapshots.write(self.engine.snapshot())

    def _find_idle(self, now_s: float) -> None:
        for partition, heard_s in self._heard_s.items():
            if now_s - heard_s >= self._idleness_s and partition not in self.engine.watermarks.idle:
                self._write(self.engine.set_idle(partition))

    def _write(self, outputs: Sequence[Output]) -> None:
        self.sink.write(outputs)
        self.meters.wrote(outputs)
