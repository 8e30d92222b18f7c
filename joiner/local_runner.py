"""Runs the local engine between Kafka topics, at least once.

    1 poll records and join them; the producer queues the outputs
    2 every checkpoint_interval_ms: wait until Kafka has acknowledged all outputs
    3 write a snapshot: the state, and the offsets of exactly the records it includes; commit these offsets to
      Kafka, so that a start without snapshots is not taken for the first one (`joiner.main.check_engine`)
    4 a restart continues from the newest readable snapshot

Outputs written between a snapshot and a crash are written again, with the same ids.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from confluent_kafka import KafkaError, KafkaException

from joiner.config import JoinerConfig
from joiner.event_decoder import Event, TimeMark
from joiner.local_engine import LocalEngine
from joiner.metrics import EventTimeProgress, JoinerMetrics
from joiner.outputs import Output
from roostream.errors import CheckpointError, OtherVersionError, UnavailableError
from roostream.runtime.backoff import Backoff
from roostream.runtime.checkpoint_store import CheckpointStore
from roostream.runtime.clock import Clock
from roostream.runtime.health import Health
from roostream.runtime.kafka import clients
from roostream.runtime.kafka.broker import Broker
from roostream.runtime.kafka.consumer import RecordConsumer
from roostream.runtime.kafka.kafka_consumer import ConsumerOptions
from roostream.runtime.kafka.topics import Partition, name_of
from roostream.runtime.log_rate_limit import LogRateLimit
from roostream.wire.records import Record

log = logging.getLogger("roostream.joiner")
_KEEP_SNAPSHOTS = 2
_SCHEMA_ERRORS = (CheckpointError, UnavailableError)
_POLL_RECORDS = 512


class KafkaSink:
    """Writes outputs with an idempotent producer."""

    def __init__(self, broker: Broker, prefix: str, gives_up: Callable[[], bool] = lambda: False) -> None:
        """`gives_up`: the process is ending and cannot wait for Kafka any longer."""
        self.prefix, self.gives_up = prefix, gives_up
        self._producer = clients.producer(broker)
        self._error = ""

    def write(self, outputs: Sequence[Output]) -> None:
        """Queue records for Kafka. Waits while the queue is full. Raises UnavailableError: the program is
        stopping and cannot wait; the records that were queued may still be delivered."""
        for output in outputs:
            clients.send(
                self._producer,
                name_of(self.prefix, output.topic),
                key=output.key,
                value=output.value,
                timestamp_ms=output.timestamp_ms or 0,  # librdkafka: 0 = now
                on_delivery=self._delivered,
                give_up=self.gives_up,
            )

    def flush(self, stop: threading.Event) -> bool:
        """Wait until all queued records are acknowledged; False if `stop` was set or it gave up first."""
        while clients.flush(self._producer, 0.2):
            if stop.is_set() or self.gives_up():
                return False
        if self._error:
            raise UnavailableError(
                f"Kafka refused a record of the joiner: {self._error}; fix the cause and restart the joiner"
            )
        return True

    def _delivered(self, error: KafkaError | None, message: Any) -> None:
        if error is not None:
            self._error = f"{message.topic()}: {error.str()}"


def offset_committer(
    broker: Broker, group: str, options: ConsumerOptions
) -> Callable[[Mapping[Partition, int]], None]:
    """A function that commits next offsets to a consumer group. It does not wait; a commit that fails is
    logged, and made good by the next one."""
    rate_limit = LogRateLimit()

    def failed(error: KafkaError | KafkaException) -> None:
        rate_limit.warning(log, "offsets", "the joiner's offsets were not committed to Kafka: %s", error)

    client = clients.consumer(broker, group, on_commit=lambda error, _: failed(error) if error else None)

    def commit(progress: Mapping[Partition, int]) -> None:
        places = [options.topic_partition(p, offset) for p, offset in progress.items()]
        try:
            client.poll(0)  # calls `on_commit` of earlier commits
            if places:
                client.commit(offsets=places, asynchronous=True)
        except KafkaException as error:
            failed(error)

    return commit


class SnapshotStore:
    """The newest two snapshots, as `snapshots/<number>` in a store."""

    def __init__(self, store: CheckpointStore) -> None:
        self.store = store
        self._newest = ""  # the last one that was restored or written

    def write(self, data: bytes) -> None:
        """Write a snapshot to the disk. Then delete all but the newest two, and unfinished files of killed
        processes.

        Raises:
            UnavailableError: the disk is full, or the newest snapshot is gone, for example because the disk
            is no longer mounted. Nothing was deleted.
        """
        names = self.names()
        if self._newest and self._newest not in names:
            raise UnavailableError(
                f"expected {self._newest} from before, but it is gone; mount its disk again, or restart the "
                "joiner if it was deleted"
            )
        number = int(names[-1].rsplit("/", 1)[1]) + 1 if names else 1
        newest = f"snapshots/{number:08d}"
        self.store.put(newest, data)
        self._newest = newest
        for name in names[: 1 - _KEEP_SNAPSHOTS]:
            self.store.delete(name)
        self.store.sweep()

    def names(self) -> list[str]:
        """The names of the snapshots, oldest first; other files of the directory are ignored."""
        names = self.store.list("snapshots")
        return [name for name in names if name.rsplit("/", 1)[1].isdecimal()]

    def restore(self, engine: LocalEngine) -> str:
        """Restore `engine` from the newest snapshot that can be read, and return its name. Without any
        snapshot return "" and leave the engine as it is.

        Raises:
            CheckpointError: there are snapshots, but none can be read.
            OtherVersionError: a version of Roostream with another format wrote the snapshot.
            ConfigError: the snapshot belongs to other topics.
        """
        names = self.names()
        for name in reversed(names):
            try:
                engine.restore(self.store.get(name))
                self._newest = name
                return name
            except OtherVersionError:
                raise
            except CheckpointError as error:
                log.warning("snapshot %s cannot be read, the one before it is tried: %s", name, error)
        if names:
            text = (
                f"none of {len(names)} snapshots is readable; remove them, and the joiner's consumer group "
                "in Kafka, to join from the oldest records"
            )
            raise CheckpointError(text)
        return ""


class LocalRunner:
    """The loop of the module's docstring."""

    def __init__(
        self,
        config: JoinerConfig,
        engine: LocalEngine,
        consumer: RecordConsumer,
        sink: KafkaSink,
        snapshots: SnapshotStore,
        *,
        commit_offsets: Callable[[Mapping[Partition, int]], None],
        clock: Clock,
        metrics: JoinerMetrics,
        health: Health,
    ) -> None:
        """`commit_offsets` takes the next offsets of each snapshot that was written."""
        self.config, self.engine, self.snapshots = config, engine, snapshots
        self.consumer, self.sink, self.commit_offsets = consumer, sink, commit_offsets
        self.clock, self.metrics, self.health = clock, metrics, health
        self._last_record_s = dict.fromkeys(engine.partitions, clock.monotonic_s())
        self._paused: set[Partition] = set()
        self._stop = threading.Event()
        self._log_rate_limit = LogRateLimit(clock.monotonic_s)
        self._schema_backoff = Backoff(what="a schema in the store", clock=clock)
        self._event_time, self._num_records = EventTimeProgress(clock), 0
        self._idleness_s = 0.0 if config.replay else config.idleness_ms / 1000

    def run(self, stop: threading.Event) -> None:
        """Join records until `stop` is set. Then a last snapshot includes all records that were read, unless
        Kafka or the disk is unavailable at that moment."""
        name = self.snapshots.restore(self.engine)  # 4
        log.info("joining continues from %s", name or "the oldest records, because there is no snapshot")
        Backoff(what="the event topics", clock=self.clock).until(
            lambda: self.consumer.seek(self._progress()), (UnavailableError,), stop
        )
        started_s = self.clock.monotonic_s()
        self._last_record_s = dict.fromkeys(self.engine.partitions, started_s)
        self._stop = stop
        checkpoint_s = started_s + self.config.checkpoint_interval_ms / 1000
        while not stop.is_set():
            self.step()
            if self.clock.monotonic_s() >= checkpoint_s:
                self.checkpoint(stop)
                checkpoint_s = self.clock.monotonic_s() + self.config.checkpoint_interval_ms / 1000
        if not self.checkpoint(threading.Event()):
            log.warning(
                "there is no snapshot of the last records, because Kafka did not acknowledge their outputs "
                "or the disk did not take it; a restart joins them again"
            )

    def step(self, timeout_s: float = 0.05) -> None:
        """Join the next records, find idle partitions, and pause partitions that are far ahead (1)."""
        records = self.consumer.poll(_POLL_RECORDS, timeout_s)
        now_s = self.clock.monotonic_s()
        for record in records:
            self._last_record_s[record.topic, record.partition] = now_s
            self._write(self.engine.process_decoded(record, self._decode(record)))
        self.metrics.records.inc(len(records))
        self._num_records += len(records)
        self.metrics.lost.set(self.consumer.num_lost)
        if self._idleness_s:
            self._set_idle_partitions(now_s)
        watermarks, max_drift_ms = self.engine.watermarks, self.config.max_drift_ms
        self._paused = {p for p in self.engine.partitions if watermarks.ahead_ms(p) > max_drift_ms}
        self.consumer.pause(self._paused)
        watermark_ms, reached_ms = self.engine.watermark_ms, watermarks.reached_ms
        self.metrics.set_state(watermark_ms, self.engine.num_keys, self.engine.num_requests, reached_ms)
        self.health.turned(self._event_time.observe(watermark_ms, self._num_records, reached_ms))

    def checkpoint(self, stop: threading.Event) -> bool:
        """Wait until Kafka has acknowledged all outputs, then write a snapshot (2, 3). Returns False if none
        was written, because `stop` was set, the sink gave up, or the disk is full or unavailable."""
        with self.health.waiting("Kafka to acknowledge the joiner's outputs"):
            acknowledged = self.sink.flush(stop)
        if acknowledged:
            started_s, snapshot = self.clock.monotonic_s(), self.engine.snapshot()
            try:
                self.snapshots.write(snapshot)
            except UnavailableError as error:  # a restart would join again what the last snapshot lacks
                text = "no snapshot was written (%s); the next checkpoint tries again"
                self._log_rate_limit.warning(log, "snapshot", text, error)
                return False
            if self._log_rate_limit.over("snapshot"):
                log.info("snapshots can be written again")
            self.commit_offsets(self._progress())
            duration_s = self.clock.monotonic_s() - started_s
            self.metrics.set_snapshot(
                self.clock.now_ms(), duration_s, len(snapshot), self.engine.rules_changed
            )
        return acknowledged

    def _progress(self) -> dict[Partition, int]:
        """The next offsets; a restored 0 says that nothing was read of the partition."""
        return {p: offset for p, offset in self.engine.next_offsets.items() if offset}

    def _decode(self, record: Record) -> Event | TimeMark | Output:
        """Decode a record; wait while its schema can't be loaded. Raises UnavailableError: stopped."""
        try:
            return self.engine.decoder.decode(record)
        except _SCHEMA_ERRORS as error:
            with self.health.waiting(str(error)):
                self._schema_backoff.wait(error, self._stop)
                return self._schema_backoff.until(
                    lambda: self.engine.decoder.decode(record), _SCHEMA_ERRORS, self._stop
                )

    def _set_idle_partitions(self, now_s: float) -> None:
        """Mark silent partitions as idle, except paused ones."""
        for partition in self._paused:
            self._last_record_s[partition] = now_s
        for partition, last_s in self._last_record_s.items():
            if now_s - last_s >= self._idleness_s and partition not in self.engine.watermarks.idle:
                self._write(self.engine.set_idle(partition))

    def _write(self, outputs: Sequence[Output]) -> None:
        if not outputs:
            return
        with self.health.waiting("Kafka to take the joiner's outputs"):
            self.sink.write(outputs)
        self.metrics.count_outputs(outputs)
