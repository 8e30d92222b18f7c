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
from joiner.ingest import Beat, Event
from joiner.local_engine import LocalEngine
from joiner.meters import Meters
from roostream.errors import CheckpointError, UnavailableError
from roostream.runtime.backoff import Backoff
from roostream.runtime.checkpoint_store import CheckpointStore
from roostream.runtime.clock import Clock
from roostream.runtime.health import Health
from roostream.runtime.kafka.consumer import RecordConsumer
from roostream.runtime.kafka.topics import Partition
from roostream.wire.records import Record

log = logging.getLogger("roostream.joiner")
_KEPT = 2
_UNREADABLE = (CheckpointError, UnavailableError)
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
            raise CheckpointError(
                f"none of {len(names)} snapshots can be read; remove them to join from the oldest record"
            )
        return ""


class Pump:
    """One run of the engine; see the module for the numbers."""

    def __init__(
        self,
        config: JoinerConfig,
        engine: LocalEngine,
        source: RecordConsumer,
        sink: Sink,
        snapshots: Snapshots,
        *,
        clock: Clock,
        meters: Meters,
        health: Health,
    ) -> None:
        self.config, self.engine, self.source, self.sink, self.snapshots = (
            config,
            engine,
            source,
            sink,
            snapshots,
        )
        self.clock, self.meters, self.health = clock, meters, health
        self._heard_s: dict[Partition, float] = {}
        self._held: set[Partition] = set()
        self._stop = threading.Event()
        self._schemas = Backoff(what="a schema in the store", clock=clock)
        self._idleness_s = 0.0 if config.replay else config.idleness_ms / 1000

    def run(self, stop: threading.Event) -> None:
        """Until `stop` is set; the last snapshot includes all that was read."""
        name = self.snapshots.restore(self.engine)  # 4
        log.info("joining from %s", name or "the oldest records")
        progress = {
            p: offset for p, offset in self.engine.next_offsets.items() if offset
        }  # 0: nothing of it was read
        Backoff(what="the event topics", clock=self.clock).until(
            lambda: self.source.seek(progress), (UnavailableError,), stop
        )
        started_s = self.clock.monotonic_s()
        self._heard_s = dict.fromkeys(self.engine.partitions, started_s)
        self._stop = stop
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
            self._write(self.engine.take(record, self._read(record)))
        self.meters.read(len(records), self.source.num_lost)
        if self._idleness_s:
            self._find_idle(now_s)
        watermarks = self.engine.watermarks
        self._held = {p for p in self.engine.partitions if watermarks.ahead_ms(p) > self.config.drift_ms}
        self.source.pause(self._held)
        self.meters.state(self.engine.watermark_ms, self.engine.num_keys)
        self.health.turned()

    def _read(self, record: Record) -> Event | Beat | Output:
        """What the engine's reader makes of a record; waits while its schema can't be read. UnavailableError: stopped."""
        try:
            return self.engine.reader.read(record)
        except _UNREADABLE as error:
            with self.health.waiting(str(error)):
                self._schemas.wait(error, self._stop)
                return self._schemas.until(lambda: self.engine.reader.read(record), _UNREADABLE, self._stop)

    def checkpoint(self, stop: threading.Event) -> None:
        """Wait for all outputs to be acknowledged, then write a snapshot (2, 3). `stop` set first: none is written."""
        with self.health.waiting("Kafka to take what was joined"):
            taken = self.sink.flush(stop)
        if taken:
            self.snapshots.write(self.engine.snapshot())

    def _find_idle(self, now_s: float) -> None:
        """Those that have been silent, but for those that were not read."""
        for partition in self._held:
            self._heard_s[partition] = now_s
        for partition, heard_s in self._heard_s.items():
            if now_s - heard_s >= self._idleness_s and partition not in self.engine.watermarks.idle:
                self._write(self.engine.set_idle(partition))

    def _write(self, outputs: Sequence[Output]) -> None:
        self.sink.write(outputs)
        self.meters.wrote(outputs)
