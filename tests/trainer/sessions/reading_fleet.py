"""A simulated reading fleet: workers, input readers and the controller's `ReaderMaster`, without threads,
processes or sockets. A schedule decides the order of all messages. It also kills readers, loses messages, and
lets readers continue after they have lost their leases."""

from __future__ import annotations

import random
from collections.abc import Sequence

from roostream.errors import FencedError, RoostreamError, TransportError
from roostream.runtime.clock import FakeClock
from roostream.runtime.kafka.topics import Partition, Progress
from roostream.runtime.rpc.transport import Answer, Arrays, Header, InMemoryTransport, Transport
from roostream.runtime.work_unit import TableInput
from roostream.schema.schema import Schema
from roostream.warehouse.readers.config import ReadersConfig
from roostream.warehouse.readers.prefetch_buffer import Fetch
from roostream.warehouse.readers.reader_program import ReaderAgent
from roostream.warehouse.readers.remote_rows import ReadersLink, RemoteSessionRows
from roostream.warehouse.readers.split_reader import SplitReader
from roostream.warehouse.sessions.session_rows import LocalSessionRows, OpenSession, SessionRows
from roostream.wire.batch import Batch
from tests.trainer import samples
from tests.trainer.loops import PARTITIONS
from tests.warehouse.memory_table import MemoryTable, table_of
from trainer.batch_source import NewestIds
from trainer.chunks import Chunk
from trainer.control.reader_master import ReaderMaster
from trainer.sessions.session_source import SessionSource

NUMBERS = [*range(1, 60), 3, 8, 41]


def session_of(table: MemoryTable, batch_requests: int = 3) -> tuple[TableInput, OpenSession]:
    opened = table.session(shuffle_seed=None, batch_requests=batch_requests)
    table_input = TableInput(
        table="memory",
        version=1,
        digest=opened.spec.digest,
        spec=opened.spec.plain(),
        rows=opened.order.rows,
        begins={},
        ends={},
    )
    return table_input, opened


class BreakableTransport:
    """A transport that raises TransportError while its name is in `broken`."""

    def __init__(self, inner: Transport, broken: Sequence[str], name: str) -> None:
        self.inner, self.broken, self.name = inner, broken, name

    def call(self, method: str, header: Header, arrays: Arrays = (), *, timeout_s: float = 30.0) -> Answer:
        if self.name in self.broken:
            raise TransportError(f"{self.name} is away")
        return self.inner.call(method, header, arrays, timeout_s=timeout_s)

    def close(self) -> None: ...


class FleetWorker:
    """A worker of the fleet. Of several workers, each reads the partition of its number."""

    def __init__(self, fleet: Fleet, number: int, limits: dict[str, int]) -> None:
        self.pending: list[Fetch] = []  # requests without an answer yet
        self.rows = fleet.client(number, **limits)
        self.source = fleet.batches(self.rows, number)


class Fleet:
    """Workers and readers of one session. `limits`: settings of `ReadersConfig`."""

    def __init__(
        self, table: MemoryTable | None = None, num_readers: int = 2, num_workers: int = 1, **limits: int
    ) -> None:
        self.clock = FakeClock(samples.T0)
        self.table = table or table_of(samples.records(NUMBERS), rows_of_file=6, seed=2)
        self.table_input, self.session = session_of(self.table)
        self.incarnation, self.worker_incarnation = 1, 1
        self.schema: Schema = samples.schema()
        self.master = ReaderMaster(
            lambda: (self.incarnation, self.table_input), self.schema, self.clock, long_poll_s=0
        )
        self.silent: list[str] = []  # readers that cannot reach the controller
        self.unreachable: list[str] = []  # readers that workers cannot reach
        self.readers: dict[str, ReaderAgent] = {}
        self.num_started, self.num_workers = 0, num_workers
        for _ in range(num_readers):
            self.start_reader()
        self.workers = [FleetWorker(self, number, limits) for number in range(num_workers)]

    @property
    def rows(self) -> RemoteSessionRows:
        """The remote rows of the first worker."""
        return self.workers[0].rows

    @property
    def source(self) -> SessionSource:
        return self.workers[0].source

    # Parts

    def start_reader(self) -> None:
        self.num_started += 1
        reader = SplitReader(self.clock, max_bytes=1 << 20, max_pieces=6)
        agent = ReaderAgent(
            reader,
            f"r{self.num_started}:1",
            2,
            lambda table_input, schema: (LocalSessionRows(self.session, self.table), self.schema),
        )
        self.readers[agent.at] = agent

    def controller(self, name: str = "") -> Transport:
        return BreakableTransport(InMemoryTransport(self.master.handle), self.silent, name)

    def dial(self, address: str) -> Transport:
        return BreakableTransport(InMemoryTransport(self.readers[address].handle), self.unreachable, address)

    def client(self, number: int, **limits: int) -> RemoteSessionRows:
        link = ReadersLink(
            controller=self.controller,
            dial=self.dial,
            worker=number,
            incarnation=lambda: self.worker_incarnation,
            wait_s=0,
        )
        config = ReadersConfig(**{"by": "programs", "max_pieces": 4, "max_in_flight": 3, **limits})  # type: ignore[arg-type]
        return RemoteSessionRows(self.table_input.digest, self.schema, link, config, self.clock)

    def batches(self, rows: SessionRows, number: int = 0) -> SessionSource:
        empty = self.table.empty()
        source = SessionSource(
            self.session.order,
            rows,
            empty,
            self.clock,
            partitions=PARTITIONS,
            newest=lambda n: NewestIds(empty.offset_R, empty.offset_R),
        )
        if self.num_workers > 1:
            source.assign([number])
        source.seek({})
        return source

    # Steps

    def reader_renews_leases(self, at: str) -> None:
        try:
            self.readers[at].renew_leases(self.controller(at))
        except RoostreamError:
            assert at in self.silent

    def reader_reads(self, at: str) -> None:
        self.readers[at].reader.step(0.0)

    def worker_requests_splits(self, worker: int = 0) -> None:
        try:
            self.workers[worker].rows.ask(self.controller())
        except FencedError:
            assert self.worker_incarnation != self.incarnation

    def worker_starts_fetch(self, worker: int = 0) -> None:
        client = self.workers[worker]
        fetch = client.rows.buffer.next_fetch(client.rows.scaler.in_flight)
        if fetch is not None:
            client.pending.append(fetch)

    def deliver_answer(self, number: int = 0, worker: int = 0) -> None:
        """Deliver the answer to one of the worker's pending requests."""
        client = self.workers[worker]
        if client.pending:
            fetch = client.pending.pop(number % len(client.pending))
            transport = self.dial(fetch.address) if fetch.address in self.readers else _DeadTransport()
            client.rows.fetch(fetch, transport)

    def poll(self, size: int = 5, partition: Partition | None = None, worker: int = 0) -> Chunk | None:
        return self.workers[worker].source.poll(size, 0.0, partition)

    def restore(self, *progress: Progress) -> None:
        """Start a new incarnation, and move each worker back to an earlier commit. Answers to its old
        requests may still arrive."""
        self.incarnation += 1
        for worker, offsets in zip(self.workers, progress, strict=True):
            worker.source.seek(offsets)
        self.worker_incarnation = self.incarnation

    def turn(self, draw: random.Random) -> None:
        """Run one random action that is not a fault."""
        at = draw.choice(sorted(self.readers)) if self.readers else ""
        worker = draw.randrange(self.num_workers)
        match draw.choice(("asks", "reads", "reads", "want", "fetch", "fetch", "answer", "answer")):
            case "asks" if at:
                self.reader_renews_leases(at)
            case "reads" if at:
                self.reader_reads(at)
            case "want":
                self.worker_requests_splits(worker)
            case "fetch":
                self.worker_starts_fetch(worker)
            case "answer":
                self.deliver_answer(draw.randrange(8), worker)
        self.clock.advance(draw.choice((0.0, 0.02, 0.08)))


class _DeadTransport:
    """A transport to a reader that is dead."""

    def call(self, method: str, header: Header, arrays: Arrays = (), *, timeout_s: float = 30.0) -> Answer:
        raise TransportError("it is gone")

    def close(self) -> None: ...


def bits(batch: Batch) -> list[bytes]:
    """The type, shape and bytes of every array of a batch."""
    arrays = [value for value in vars(batch).values() if hasattr(value, "tobytes")]
    for lists in (batch.ro_lists, batch.nro_lists):
        arrays += [lists.lengths_KN, lists.values, lists.present_KN, *lists.columns.values()]
        arrays += [lists.weights] if lists.weights is not None else []
    return [f"{array.dtype}{array.shape}".encode() + array.tobytes() for array in arrays]
