"""How much faster is training from warehouse files than from Kafka?

Trains the same samples from warehouse files in one process, and from Kafka with the worker of a stack.
"""

from __future__ import annotations

import contextlib
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.common import samples as data
from benchmarks.common.training_stack import PROGRAMS, Feed, until
from benchmarks.harness.benchmark import Benchmark, Row, Subject, TurnResult, WholeTurn
from infra.options import StackOptions
from infra.stack import Stack
from roostream.cli.train.config import TrainConfig
from roostream.cli.train.offline import train_offline
from roostream.runtime.clock import SystemClock
from roostream.runtime.kafka import clients
from roostream.runtime.kafka.broker import Broker
from roostream.runtime.kafka.kafka_consumer import ConsumerOptions, KafkaConsumer
from roostream.runtime.kafka.topics import SAMPLES, all_partitions, name_of
from roostream.runtime.program import Stop
from roostream.runtime.scrape import fetch
from roostream.schema.registry import register
from roostream.schema.schema import Schema
from roostream.warehouse.archive import group_by_day, sample_rows
from roostream.warehouse.delta_table import ProgressStep
from roostream.warehouse.parquet_file import FileKey, write_rows
from roostream.warehouse.sessions.sample_table import SampleTable
from roostream.warehouse.sessions.session import SessionSpec
from roostream.warehouse.warehouse import Warehouse
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.decode import Decoder
from roostream.wire.records import Record
from trainer.batch_source import BatchSource
from trainer.config import LoopConfig
from trainer.record_source import RecordSource
from trainer.sessions.session_source import open_session

CANDIDATES = 20
_KINDS, _READY_S, _TRAIN_S, _NEVER_MS = 512, 120.0, 300.0, 600_000
_BATCH, _PARTITIONS, _POLL_S, _HORIZON_MS, _WAIT_MS = 64, 4, 0.1, 3_600_000, 500


def _turns(turn: Callable[[], tuple[float, float]]) -> WholeTurn:
    """`turn` returns requests and seconds."""
    return WholeTurn(lambda: TurnResult(*turn()))


@contextlib.contextmanager
def from_files(requests: int, batch_requests: int = 0) -> Iterator[WholeTurn]:
    """`roostream train`, from an empty model to the commit with all requests. `batch_requests`: of every
    batch; 0 = the sizes of a stream's worker."""
    loop = (
        LoopConfig(batch_requests=batch_requests, first_batch_requests=batch_requests)
        if batch_requests
        else LoopConfig()
    )
    with tempfile.TemporaryDirectory() as folder:
        write_archive(Path(folder) / "warehouse", data.demo_schema(), requests)
        homes = itertools.count()

        def turn() -> tuple[float, float]:
            home = str(Path(folder) / f"home-{next(homes)}")
            config = TrainConfig(
                warehouse=str(Path(folder) / "warehouse"), home=home, schema=str(data.DEMO), partitions=4
            )
            report = train_offline(config, loop, Stop())
            assert report["rows"] == requests, report
            return float(requests), float(report["wall_s"])

        yield _turns(turn)


def write_archive(place: Path, schema: Schema, requests: int) -> None:
    """Write a warehouse of this many requests, with a file per partition and day."""
    warehouse = Warehouse(place)
    warehouse.create()
    register(warehouse.store, schema)
    samples = [data.sample(schema, n, candidates=CANDIDATES) for n in range(min(_KINDS, requests))]
    for number in range(4):
        records = [record_of(samples[n % len(samples)], n) for n in range(number, requests, 4)]
        rows, dead = sample_rows(schema, records)
        assert not dead
        warehouse.samples.widen(rows.column_types)
        where = FileKey(
            table="samples",
            day=next(iter(group_by_day(rows))),
            partition=number,
            fingerprint=schema.fingerprint,
        )
        files = [write_rows(warehouse.store, part, where) for part in group_by_day(rows).values()]
        warehouse.samples.commit(
            files, progress={f"samples/benchmark/{number}": ProgressStep(None, len(records))}
        )


def record_of(sample: pb.Sample, n: int) -> Record:
    """The sample with number `n`, in partition n mod 4."""
    sample.sample_id, sample.close_ms = n + 1, data.T0_MS + 100 * n
    sample.header.request_id, sample.header.time_ms = f"r{n}", sample.close_ms - 20_000
    return Record("samples", n % 4, n // 4, sample.close_ms, b"", wire.encode(wire.SAMPLE, sample))


@contextlib.contextmanager
def from_kafka(requests: int) -> Iterator[WholeTurn]:
    """A stack's worker, from when the topic has all requests until all are trained. Requests trained before
    are not counted. The stack runs only during its turn."""

    def turn() -> tuple[float, float]:
        with tempfile.TemporaryDirectory(prefix="roostream-bench-", ignore_cleanup_errors=True) as folder:
            options = StackOptions(overrides={"controller": {"commit_interval_ms": _NEVER_MS}})
            with Stack(Path(folder) / "home", options) as stack:
                stack.start(PROGRAMS)
                stack.wait_ready("workers", timeout_s=_READY_S)
                feed = Feed(stack, rate=1e9, ahead=requests).open()
                try:
                    return _trained(stack, feed, requests)
                finally:
                    feed.close()

    yield _turns(turn)


def _trained(stack: Stack, feed: Feed, requests: int) -> tuple[float, float]:
    def trained() -> float:
        return (
            fetch(stack.endpoints.metrics["worker"], timeout_s=2.0).value("roostream_worker_requests_total")
            or 0.0
        )

    until("all samples written", lambda: feed.num_sent >= requests, _READY_S, 0.02)
    began_s, before = time.monotonic(), trained()
    until("all samples trained", lambda: trained() >= requests, _TRAIN_S, 0.05)
    return max(requests - before, 1.0), time.monotonic() - began_s


def _read(source: BatchSource, requests: int) -> tuple[float, float]:
    """Read all requests in batches. Returns their number and the seconds."""
    began_s, count = time.monotonic(), 0
    while count < requests:
        chunk = source.poll(_BATCH, _POLL_S)
        count += chunk.batch.num_requests if chunk is not None else 0
    return float(count), time.monotonic() - began_s


@contextlib.contextmanager
def read_from_files(requests: int) -> Iterator[WholeTurn]:
    """The session source of `roostream train`, without training."""
    schema = data.demo_schema()
    with tempfile.TemporaryDirectory() as folder:
        write_archive(Path(folder), schema, requests)
        table = SampleTable(folder).newest(SessionSpec(table="", version=0), {})
        assert table is not None
        partitions = all_partitions((SAMPLES,), _PARTITIONS)

        def turn() -> tuple[float, float]:
            source = open_session(table, schema, partitions, _HORIZON_MS, SystemClock())
            with contextlib.closing(source):
                return _read(source, requests)

        yield _turns(turn)


@contextlib.contextmanager
def read_from_kafka(requests: int) -> Iterator[WholeTurn]:
    """The Kafka source of a worker, without training."""
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

        yield _turns(turn)


def _produce(stack: Stack, requests: int) -> None:
    producer = clients.producer(Broker(stack.endpoints.kafka))
    schema, topic = data.demo_schema(), name_of(stack.prefix, SAMPLES)
    samples = [data.sample(schema, n, candidates=CANDIDATES) for n in range(min(_KINDS, requests))]
    for n in range(requests):
        _, partition, _, time_ms, key, value = record_of(samples[n % len(samples)], n)
        clients.send(producer, topic, key=key, value=value, timestamp_ms=time_ms, partition=partition)
    until("all samples written", lambda: producer.flush(5) == 0, _READY_S, 0.02)


_HERE = "benchmarks.train_warehouse"
_REQUESTS, _READ = 10_000, 30_000

BENCHMARK = Benchmark(
    name="train-warehouse",
    summary="How much sooner is the past trained from files than from Kafka?",
    rows=(
        Row(
            name="10,000 requests of 20 candidates",
            unit="requests",
            subjects=(
                Subject("roostream train, from files", f"{_HERE}:from_files", (_REQUESTS,)),
                Subject(
                    "the same in batches of 64 from the first on",
                    f"{_HERE}:from_files",
                    (_REQUESTS, 64),
                    "stage",
                ),
                Subject("the same in batches of 512", f"{_HERE}:from_files", (_REQUESTS, 512), "stage"),
                Subject("a stack's worker, from Kafka", f"{_HERE}:from_kafka", (_REQUESTS,), "peer"),
            ),
        ),
        Row(
            name="30,000 requests of 20 candidates, read and not trained",
            unit="requests",
            subjects=(
                Subject("the session's source, from files", f"{_HERE}:read_from_files", (_READ,)),
                Subject("a worker's source, from Kafka", f"{_HERE}:read_from_kafka", (_READ,), "peer"),
            ),
        ),
    ),
    rounds=1,
    interpretation="""\
From files, one process has the controller, two shards and the worker, and runs from its start to the commit
of everything. From Kafka, a stack's own programs run on the same cores, from when the topic has all samples
to when all are trained, without commits. Both start with batches of 8 that grow by one each 1,024 requests;
the two rows with other batches train other models with fewer steps (decision 0060). The second table reads
the same samples without training. The joiner's time is not counted.""",
)
