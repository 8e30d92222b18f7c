"""`roostream archiver`: copies samples and corrections from Kafka to the warehouse's tables.

1 wait for the topics, whose ids are part of what is committed and must not change, and for a first schema in
  the checkpoint store
2 open the tables, which tell where to continue
3 read, write and commit until stopped; while Kafka or the warehouse is away, keep what was read and wait
4 on stop commit what was read, in the time that is left
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from functools import partial

from confluent_kafka import KafkaError

from roostream.errors import UnavailableError
from roostream.runtime import metrics_server
from roostream.runtime.backoff import Backoff
from roostream.runtime.clock import Clock, SystemClock
from roostream.runtime.health import Health
from roostream.runtime.kafka import clients
from roostream.runtime.kafka.kafka_consumer import ConsumerOptions, KafkaConsumer
from roostream.runtime.kafka.topics import CORRECTIONS, DEAD_LETTERS, SAMPLES, Partition, name_of
from roostream.runtime.log_rate_limit import LogRateLimit
from roostream.runtime.metrics_collector import MetricSpec, by_name, exported
from roostream.runtime.program import Stop
from roostream.runtime.store_identity import open_checkpoint_store, wait_for_store
from roostream.schema.registry import open_registry
from roostream.warehouse.archive import Archiver, DeadRecord, FlushPolicy, check_has_schemas
from roostream.warehouse.config import ArchiverConfig
from roostream.warehouse.warehouse import Warehouse
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb

log = logging.getLogger("roostream.archiver")
_POLL_S = 0.5
_MAX_BUFFERED_RECORDS = 512
_DEAD_LETTERS_TIMEOUT_S = 10.0
METRICS = {
    "roostream_archiver_rows_total": MetricSpec("records archived"),
    "roostream_archiver_files_total": MetricSpec("files written"),
    "roostream_archiver_bytes_total": MetricSpec("bytes written"),
    "roostream_archiver_dead_total": MetricSpec("records that cannot be decoded"),
    "roostream_archiver_commits_total": MetricSpec("commits to the warehouse"),
    "roostream_archiver_refused_total": MetricSpec(
        "commits refused because another archiver had committed first"
    ),
    "roostream_archiver_lost_total": MetricSpec("records that retention deleted before they were read"),
    "roostream_archiver_waiting_bytes": MetricSpec("bytes that wait for the next file"),
    "roostream_archiver_behind_records": MetricSpec("records that are not read yet", ("partition",)),
    "roostream_archiver_archivers": MetricSpec("number of archivers, of which this is one"),
}


def own_partitions(config: ArchiverConfig) -> tuple[Partition, ...]:
    """The partitions of this archiver. A sample and its corrections have the same partition number."""
    numbers = range(config.index, config.partitions, config.num_archivers)
    return tuple((topic, number) for topic in (SAMPLES, CORRECTIONS) for number in numbers)


class KafkaDeadLetters:
    """Sends dead letters to their topic. The key is the record's offset, as in the trainer's dead letters, so
    that consumers count each record once."""

    def __init__(self, config: ArchiverConfig, clock: Clock) -> None:
        self._broker, self._producer = config.broker, clients.producer(config.broker)
        self._topic = name_of(config.prefix, DEAD_LETTERS)
        self._max_raw_bytes, self._clock = config.max_raw_bytes, clock
        self._log_rate_limit = LogRateLimit(clock.monotonic_s)

    def send(self, dead: Sequence[DeadRecord]) -> None:
        """Send one dead letter per record and wait for the broker to acknowledge them.

        Raises:
            UnavailableError: not all were acknowledged in time, or Kafka refused one; sending them again is
            safe.
        """
        try:
            self._send(dead)
        except clients.ProducerFailedError:
            self._producer = clients.producer(self._broker)
            raise

    def _send(self, dead: Sequence[DeadRecord]) -> None:
        refused: list[KafkaError] = []

        def delivered(error: KafkaError | None, message: object) -> None:
            if error is not None:
                refused.append(error)

        for record, reason, error in dead:
            where = f"{record.topic}-{record.partition} offset {record.offset}"
            text = "%s goes to the dead letters: %s (%s)"
            self._log_rate_limit.warning(log, reason, text, where, reason, error)
            letter = pb.DeadLetter(
                reason=reason,
                topic=record.topic,
                partition=record.partition,
                offset=record.offset,
                error=error,
                raw=(record.value or b"")[: self._max_raw_bytes],
                raw_bytes=len(record.value or b""),
            )
            clients.send(
                self._producer,
                self._topic,
                key=record.offset.to_bytes(8, "little", signed=True),
                value=wire.encode(wire.DEAD_LETTER, letter),
                timestamp_ms=self._clock.now_ms(),
                on_delivery=delivered,
                give_up=lambda: True,  # at once if the queue is full
            )
        if left := clients.flush(self._producer, _DEAD_LETTERS_TIMEOUT_S):
            raise UnavailableError(
                f"expected {left} dead letters to be acknowledged within {_DEAD_LETTERS_TIMEOUT_S:g} s, got "
                "none; retrying"
            )
        if refused:
            raise UnavailableError(
                f"Kafka refused a dead letter: {refused[0].str()}; check the topic {self._topic}, and this "
                "machine's clock"
            )


def archive(config: ArchiverConfig, stop: Stop) -> None:
    """Run an archiver until `stop`.

    Raises:
        RoostreamError: a topic has another number of partitions than the settings say, or was created again,
        or the warehouse is damaged or belongs to another deployment.
    """
    health, clock = Health(config.stalled_after_ms / 1000), SystemClock()
    metrics_server.serve(config, health)
    topics = SAMPLES, CORRECTIONS
    with health.waiting("Kafka"):
        ids = clients.wait_for_topics(config.broker, config.prefix, topics, config.partitions, stop)
    partitions = own_partitions(config)
    options = ConsumerOptions(
        partitions=partitions,
        prefix=config.prefix,
        max_buffered=_MAX_BUFFERED_RECORDS,
        skip_lost_records=config.skip_lost,
        track_end_offsets=True,
    )
    reader = KafkaConsumer.open(config.broker, "archiver", options)
    store = open_checkpoint_store(config.store)
    wait_for_store(lambda: check_has_schemas(store, config.store), stop, health=health)
    archiver = Archiver(
        Warehouse(config.warehouse),
        reader,
        {topic: ids[name_of(config.prefix, topic)] for topic in topics},
        partial(clients.topic_ids, config.broker, config.prefix, topics),
        open_registry(store),
        store,
        FlushPolicy(bytes=config.flush_bytes, after_ms=config.flush_interval_ms),
        KafkaDeadLetters(config, clock).send,
        clock,
    )
    backoff = Backoff(what=f"the warehouse at {config.warehouse}, or Kafka")
    exporting = exported(lambda: metrics_of(archiver, config.num_archivers), METRICS)
    with contextlib.closing(reader), exporting:
        with health.waiting("warehouse"):
            backoff.until(archiver.open, (UnavailableError,), stop)
        while not stop.is_set():
            try:
                archiver.turn(_POLL_S)
                backoff.reached()
                health.turned()
            except UnavailableError as error:
                health.turned(str(error))
                backoff.wait(error, stop)
        archiver.flush()


def metrics_of(archiver: Archiver, num_archivers: int) -> dict[str, object]:
    """Full metric name → value."""
    lag = archiver.reader.lag()
    values = {
        **vars(archiver.counts),
        "lost": archiver.reader.num_lost,
        "waiting_bytes": archiver.num_buffered_bytes,
        "behind_records": {f"{topic}-{number}": behind.records for (topic, number), behind in lag.items()},
        "archivers": num_archivers,
    }
    return by_name(METRICS, "roostream_archiver_", values)
