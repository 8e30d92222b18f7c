"""Throughput of a worker's input without training: batches of the same samples from warehouse files and from
Kafka."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.common import samples as data
from benchmarks.common.training_stack import until
from benchmarks.harness.benchmark import Work
from benchmarks.train_warehouse import CANDIDATES, Turns, archived, record_of
from infra.options import StackOptions
from infra.stack import Stack
from roostream.runtime.clock import SystemClock
from roostream.runtime.kafka import clients
from roostream.runtime.kafka.broker import Broker
from roostream.runtime.kafka.kafka_consumer import ConsumerOptions, KafkaConsumer
from roostream.runtime.kafka.topics import SAMPLES, all_partitions, name_of
from roostream.warehouse.sessions.sample_table import SampleTable
from roostream.warehouse.sessions.session import SessionSpec
from roostream.wire.decode import Decoder
from trainer.batch_source import BatchSource
from trainer.record_source import RecordSource
from trainer.sessions.session_source import open_session

_BATCH, _PARTITIONS, _POLL_S, _READY_S, _HORIZON_MS = 64, 4, 0.1, 120.0, 3_600_000
_KINDS, _WAIT_MS = 512, 500


def _read(source: BatchSource, requests: int) -> tuple[float, float]:
    """All of it, in a trainer's batches: how many, and the seconds."""
    began_s, count = time.monotonic(), 0
    while count < requests:
        chunk = source.poll(_BATCH, _POLL_S)
        count += chunk.batch.num_requests if chunk is not None else 0
    return float(count), time.monotonic() - began_s


@contextlib.contextmanager
def from_files(requests: int) -> Iterator[Work]:
    """As `roostream train` reads them: the files' bytes, pages, and batches of 64."""
    schema = data.demo_schema()
    with tempfile.TemporaryDirectory() as folder:
        archived(Path(folder), schema, requests)
        told = SampleTable(folder).newest(SessionSpec(table="", version=0), {})
        assert told is not None
        partitions = all_partitions((SAMPLES,), _PARTITIONS)

        def turn() -> tuple[float, float]:
            source = open_session(told, schema, partitions, _HORIZON_MS, SystemClock())
            with contextlib.closing(source):
                return _read(source, requests)

        yield Turns(turn).work()


@contextlib.contextmanager
def from_kafka(requests: int) -> Iterator[Work]:
    """As a stack's worker reads them: the consumer's messages, the decoder, and batches of 64."""
    schema = data.demo_schema()
    with (
        tempfile.TemporaryDirectory(prefix="roostream-bench-", ignore_cleanup_errors=True) as folder,
        Stack(Path(folder) / "home", StackOptions(replay=True, partitions=_PARTITIONS)) as stack,
    ):
        stack.start(["kafka"])
        stack.wait_ready("kafka", timeout_s=_READY_S)
        _produce(stack, requests)

        def turn() -> tuple[float, float]:
            reading = ConsumerOptions(partitions=all_partitions((SAMPLES,), _PARTITIONS), prefix=stack.prefix)
            reader = KafkaConsumer.open(Broker(stack.endpoints.kafka), "bench", reading)
            decoder = Decoder(schema, {schema.fingerprint: schema}.get)
            with contextlib.closing(
                RecordSource(reader, decoder, SystemClock(), max_wait_ms=_WAIT_MS)
            ) as source:
                source.seek({})
                return _read(source, requests)

        yield Turns(turn).work()


def _produce(stack: Stack, requests: int) -> None:
    producer = clients.producer(Broker(stack.endpoints.kafka))
    schema, topic = data.demo_schema(), name_of(stack.prefix, SAMPLES)
    samples = [data.sample(schema, n, candidates=CANDIDATES) for n in range(min(_KINDS, requests))]
    for n in range(requests):
        made = record_of(samples[n % len(samples)], n)
        clients.send(
            producer,
            topic,
            key=made.key,
            value=made.value,
            timestamp_ms=made.timestamp_ms,
            partition=made.partition,
        )
    until("all samples written", lambda: producer.flush(5) == 0, _READY_S, 0.02)
