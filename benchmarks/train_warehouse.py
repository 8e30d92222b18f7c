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
from benchmarks.harness.benchmark import Benchmark, Row, Subject, Work
from infra.options import StackOptions
from infra.stack import Stack
from roostream.cli.train.config import TrainConfig
from roostream.cli.train.offline import train_offline
from roostream.runtime.program import Stop
from roostream.runtime.scrape import fetch
from roostream.schema.registry import register
from roostream.schema.schema import Schema
from roostream.warehouse.archive import group_by_day, sample_rows
from roostream.warehouse.delta_table import ProgressStep
from roostream.warehouse.parquet_file import FileKey, write_rows
from roostream.warehouse.warehouse import Warehouse
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.records import Record
from trainer.config import LoopConfig

CANDIDATES = 20
_KINDS, _READY_S, _TRAIN_S, _NEVER_MS = 512, 120.0, 300.0, 600_000


class Turns:
    """The first step is for what warms up, and does nothing; the others are whole turns."""

    def __init__(self, turn: Callable[[], tuple[float, float]]) -> None:
        self._turn, self._is_first = turn, True
        self.requests, self.seconds = 1.0, 1.0

    def step(self) -> None:
        if self._is_first:
            self._is_first = False
            return
        self.requests, self.seconds = self._turn()

    def work(self) -> Work:
        return Work(self.step, lambda: self.requests, took_s=lambda: self.seconds)


@contextlib.contextmanager
def from_files(requests: int, batch_requests: int = 0) -> Iterator[Work]:
    """`roostream train` of so many, from nothing to the commit that has them all. `batch_requests`: in each
    batch from the first on; 0: as a stream's worker has them."""
    loop = (
        LoopConfig(batch_requests=batch_requests, first_batch_requests=batch_requests)
        if batch_requests
        else LoopConfig()
    )
    with tempfile.TemporaryDirectory() as folder:
        archived(Path(folder) / "warehouse", data.demo_schema(), requests)
        homes = itertools.count()

        def turn() -> tuple[float, float]:
            home = str(Path(folder) / f"home-{next(homes)}")
            config = TrainConfig(
                warehouse=str(Path(folder) / "warehouse"), home=home, schema=str(data.DEMO), partitions=4
            )
            told = train_offline(config, loop, Stop())
            assert told["rows"] == requests, told
            return float(requests), float(told["wall_s"])

        yield Turns(turn).work()


def archived(place: Path, schema: Schema, requests: int) -> None:
    """A warehouse of so many, a file a partition and day."""
    warehouse = Warehouse(place)
    warehouse.create()
    register(warehouse.store, schema)
    samples = [data.sample(schema, n, candidates=CANDIDATES) for n in range(min(_KINDS, requests))]
    for number in range(4):
        its = [record_of(samples[n % len(samples)], n) for n in range(number, requests, 4)]
        rows, dead = sample_rows(schema, its)
        assert not dead
        warehouse.samples.widen(rows.forms)
        where = FileKey(
            table="samples",
            day=next(iter(group_by_day(rows))),
            partition=number,
            fingerprint=schema.fingerprint,
        )
        files = [write_rows(warehouse.store, part, where) for part in group_by_day(rows).values()]
        warehouse.samples.commit(
            files, progress={f"samples/benchmark/{number}": ProgressStep(None, len(its))}
        )


def record_of(sample: pb.Sample, n: int) -> Record:
    """This sample as the one numbered `n`, of partition n mod 4."""
    sample.sample_id, sample.close_ms = n + 1, data.T0_MS + 100 * n
    sample.header.request_id, sample.header.time_ms = f"r{n}", sample.close_ms - 20_000
    return Record("samples", n % 4, n // 4, sample.close_ms, b"", wire.encode(wire.SAMPLE, sample))


@contextlib.contextmanager
def from_kafka(requests: int) -> Iterator[Work]:
    """A stack's worker with so many in its topic: from when all are written to when all are trained; what it
    trained before isn't counted. The stack is there for its own turn alone, so that it slows no other."""

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

    yield Turns(turn).work()


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


_HERE = "benchmarks.train_warehouse"
_ALONE = "benchmarks.common.read_alone"
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
                Subject("the session's source, from files", f"{_ALONE}:from_files", (_READ,)),
                Subject("a worker's source, from Kafka", f"{_ALONE}:from_kafka", (_READ,), "peer"),
            ),
        ),
    ),
    rounds=1,
    interpretation="""\
The demo's schema and default model, the same samples. From files: one process that has the controller, two shards and the worker,
from its begin to the commit that holds everything; no socket, no broker, nothing published or predicted. From Kafka: the stack's
own programs (broker, two shards, controller, worker) on the same cores, from when the topic has all samples to when all are
trained, without commits. Both in batches of 8 that grow by one each 1,024 requests; the two lines with other batches are other
models, of fewer steps (docs/decisions/0060). What the joiner takes before that isn't counted: a log's replay through a stack
takes that too.""",
)
