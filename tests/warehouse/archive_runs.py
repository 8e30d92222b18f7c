"""Runs archivers over a topic in memory: in the process of the test, or in forked processes that are
killed."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from roostream.errors import UnavailableError
from roostream.runtime.checkpoint_store import CheckpointStore, FileStore
from roostream.runtime.clock import Clock, FakeClock, SystemClock
from roostream.runtime.kafka.consumer import MemoryConsumer
from roostream.schema.registry import register
from roostream.schema.schema import Schema
from roostream.warehouse.archive import Archiver, DeadRecord, FlushPolicy
from roostream.warehouse.compact import Compactor
from roostream.warehouse.config import CompactorConfig
from roostream.warehouse.warehouse import Warehouse
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.columnar import REQUEST, ColumnType
from roostream.wire.records import Record
from tests.trainer.memory_store import MemoryStore
from tests.warehouse.sample_cases import rich_records, rich_schema, with_joiner_keys

PARTITIONS, DAYS = 2, 12
DAY_MS = 86_400_000
TOPIC_IDS = {"samples": "topic-1", "corrections": "topic-2"}
FLUSH_POLICY = FlushPolicy(bytes=1 << 14, after_ms=200)

ReportStarted = Callable[[], object]


class FullDisk(FileStore):
    """A directory with room for `room` more files."""

    def __init__(self, root: Path, room: int) -> None:
        super().__init__(root)
        self.room = room

    def put(self, name: str, data: bytes) -> None:
        if not self.room:
            raise UnavailableError(f"{name} can't be written (No space left on device); free disk space")
        self.room -= 1
        super().put(name, data)


def stored_files(location: Path) -> set[str]:
    """The paths of all Parquet files with rows, whether a table names them or not."""
    return {str(path.relative_to(location)) for path in location.glob("*/1970-*/**/*.parquet")}


def make_topic_records(schema: Schema, per_partition: int, days: int = 1) -> list[Record]:
    """Build samples with distinct ids for each partition. They close in the order of their offsets, over
    `days` days."""
    records = []
    for p in range(PARTITIONS):
        for n, record in enumerate(with_joiner_keys(rich_records(schema, per_partition, partition=p))):
            records.append(
                _closed(record._replace(offset=n), n * days // per_partition, PARTITIONS * n + p + 1)
            )
    return records


def _closed(record: Record, day: int, number: int) -> Record:
    sample = pb.Sample.FromString(record.value[2:])
    sample.close_ms, sample.sample_id = sample.close_ms + day * DAY_MS, number
    return record._replace(value=wire.encode(wire.SAMPLE, sample), timestamp_ms=sample.close_ms)


def make_archiver(
    location: str | Path,
    records: Sequence[Record],
    numbers: Sequence[int] = range(PARTITIONS),
    clock: Clock | None = None,
    topics: Mapping[str, str] = TOPIC_IDS,
    memory: CheckpointStore | None = None,
) -> tuple[Archiver, MemoryConsumer, list[DeadRecord]]:
    """Build an archiver of these partitions. Return it, its consumer, and the list of records that it cannot
    read."""
    schema, dead = rich_schema(), list[DeadRecord]()
    partitions = [(name, n) for name in TOPIC_IDS for n in numbers]
    reader = MemoryConsumer(partitions, [r for r in records if (r.topic, r.partition) in partitions])
    registry, memory = {schema.fingerprint: schema}.get, memory or MemoryStore()
    register(memory, schema)
    archiver = Archiver(
        Warehouse(location),
        reader,
        dict(topics),
        lambda: topics,
        registry,
        memory,
        FLUSH_POLICY,
        dead.extend,
        clock or FakeClock(),
    )
    return archiver, reader, dead


def count_offsets(location: str | Path, table: str = "samples") -> Counter[tuple[int, int]]:
    """Count how often each (partition, offset) occurs in the table."""
    return Counter({at[:2]: n for at, n in count_rows(location, table).items()})


def count_rows(location: str | Path, table: str = "samples") -> Counter[tuple[int, int, int]]:
    """Count how often each (partition, offset, sample id) occurs in the table."""
    warehouse, found = Warehouse(location), Counter[tuple[int, int, int]]()
    column_types: dict[str, ColumnType] = {name: REQUEST[name] for name in ("offset", "sample_id")}
    for file in warehouse.tables[table].snapshot().files:
        columns, _ = warehouse.open_file(table, file).columns(column_types)
        pairs = zip(columns["offset"].values.tolist(), columns["sample_id"].values.tolist(), strict=True)
        found.update((file.partition, offset, id_) for offset, id_ in pairs)
    return found


def archive_until_done(location: str, records: Sequence[Record], report_started: ReportStarted) -> None:
    """Run an archiver until it has stored every record. It is the main function of a process that may be
    killed; the archiver continues at the progress in the table."""
    archiver, reader, _ = make_archiver(location, records, clock=SystemClock())
    archiver.open()
    report_started()
    while True:
        archiver.turn(0.0, max_records=13)
        if reader.at_end() and not archiver.num_buffered_bytes:
            return
        time.sleep(0.002)


def make_compactor(location: str | Path) -> Compactor:
    config = CompactorConfig(warehouse=str(location), seal_after_ms=0, vacuum_after_hours=1)
    return Compactor(Warehouse(location), config, SystemClock())


def compact_forever(location: str, report_started: ReportStarted) -> None:
    """Run a compactor until the process is killed."""
    compactor, stop = make_compactor(location), threading.Event()
    compactor.warehouse.create()
    report_started()
    while True:
        with contextlib.suppress(UnavailableError):
            compactor.run_once(stop)
        time.sleep(0.01)


@dataclasses.dataclass
class KillCounts:
    """The number of processes that were killed after they had started their work."""

    archivers: int = 0
    compactors: int = 0


def kill_competing_processes(location: Path, *, kills: int, per_partition: int, seed: int = 0) -> KillCounts:
    """Run two archivers of all partitions and two compactors. Kill one at a random moment after its start and
    restart it, until `kills` processes were killed. Then let the archivers finish. A separate process forks
    them, because threads of the libraries do not survive a fork."""
    arguments = map(str, (location, kills, per_partition, seed))
    command = [sys.executable, "-m", "tests.warehouse.archive_runs", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    return KillCounts(**json.loads(done.stdout))


class CompetingProcess(NamedTuple):
    """A forked process, and the pipe on which it reports that it has started its work."""

    pid: int
    started_pipe: int


def _fork_process(n: int, location: str, records: Sequence[Record]) -> CompetingProcess:
    """Fork process number n: 0 and 1 are archivers, 2 and 3 are compactors."""
    read_end, write_end = os.pipe()
    if pid := os.fork():
        os.close(write_end)
        return CompetingProcess(pid, read_end)
    code = 1
    try:
        report_started = functools.partial(os.write, write_end, b"!")
        if n < 2:
            archive_until_done(location, records, report_started)
        else:
            compact_forever(location, report_started)
        code = 0
    finally:
        os._exit(code)


def _kill(process: CompetingProcess, after_s: float = 0.0) -> bool:
    """Kill the process `after_s` after its start. Return False if it had ended by itself."""
    has_started = os.read(process.started_pipe, 1) == b"!"
    os.close(process.started_pipe)
    time.sleep(after_s)
    os.kill(process.pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(process.pid, 0)[1]) == -signal.SIGKILL and has_started


def _run_competing_processes(location: str, kills: int, per_partition: int, seed: int) -> KillCounts:
    rng, kill_counts = random.Random(seed), KillCounts()
    records = make_topic_records(rich_schema(), per_partition, DAYS)
    processes = [_fork_process(n, location, records) for n in range(4)]
    while kill_counts.archivers + kill_counts.compactors < kills:
        victim = rng.randrange(4)
        was_killed = _kill(processes[victim], rng.uniform(0.0, 0.6))
        kill_counts.archivers += was_killed and victim < 2
        kill_counts.compactors += was_killed and victim >= 2
        processes[victim] = _fork_process(victim, location, records)
        print(kill_counts, file=sys.stderr, flush=True)
    for process in processes[:2]:
        assert os.waitpid(process.pid, 0)[1] == 0
    for process in processes[2:]:
        _kill(process)
    return kill_counts


if __name__ == "__main__":
    print(json.dumps(dataclasses.asdict(_run_competing_processes(sys.argv[1], *map(int, sys.argv[2:])))))
