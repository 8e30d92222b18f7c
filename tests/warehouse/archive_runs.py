"""Archivers over a topic in memory, in this process or in ones that are killed."""

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
from roostream.runtime.checkpoint_store import CheckpointStore
from roostream.runtime.clock import Clock, FakeClock, SystemClock
from roostream.runtime.kafka.consumer import MemoryConsumer
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
from tests.warehouse.sample_cases import keyed, rich_records, rich_schema

PARTITIONS, DAYS = 2, 12
DAY_MS = 86_400_000
TOPIC_IDS = {"samples": "topic-1", "corrections": "topic-2"}
RULE = FlushPolicy(bytes=1 << 14, after_ms=200)


Begun = Callable[[], object]


def topic(schema: Schema, per_partition: int, days: int = 1) -> list[Record]:
    """Samples with distinct ids, alternately in each partition; they close in order, over so many days."""
    made = []
    for p in range(PARTITIONS):
        for n, record in enumerate(keyed(rich_records(schema, per_partition, partition=p))):
            made.append(_closed(record._replace(offset=n), n * days // per_partition, PARTITIONS * n + p + 1))
    return made


def _closed(record: Record, day: int, number: int) -> Record:
    sample = pb.Sample.FromString(record.value[2:])
    sample.close_ms, sample.sample_id = sample.close_ms + day * DAY_MS, number
    return record._replace(value=wire.encode(wire.SAMPLE, sample), timestamp_ms=sample.close_ms)


def an_archiver(
    place: str | Path,
    records: Sequence[Record],
    numbers: Sequence[int] = range(PARTITIONS),
    clock: Clock | None = None,
    topics: Mapping[str, str] = TOPIC_IDS,
    memory: CheckpointStore | None = None,
) -> tuple[Archiver, MemoryConsumer, list[DeadRecord]]:
    """An archiver of these partition numbers, its consumer, and the records that it could not read."""
    schema, dead = rich_schema(), list[DeadRecord]()
    partitions = [(name, n) for name in TOPIC_IDS for n in numbers]
    reader = MemoryConsumer(partitions, [r for r in records if (r.topic, r.partition) in partitions])
    registry = {schema.fingerprint: schema}.get
    archiver = Archiver(
        Warehouse(place),
        reader,
        dict(topics),
        lambda: topics,
        registry,
        memory or MemoryStore(),
        RULE,
        dead.extend,
        clock or FakeClock(),
    )
    return archiver, reader, dead


def places(place: str | Path, table: str = "samples") -> Counter[tuple[int, int]]:
    """(partition, offset) of every row of a table → how often it is there."""
    return Counter({at[:2]: n for at, n in rows_at(place, table).items()})


def rows_at(place: str | Path, table: str = "samples") -> Counter[tuple[int, int, int]]:
    """(partition, offset, sample id) of every row of a table → how often it is there."""
    warehouse, found = Warehouse(place), Counter[tuple[int, int, int]]()
    column_types: dict[str, ColumnType] = {name: REQUEST[name] for name in ("offset", "sample_id")}
    for file in warehouse.tables[table].snapshot().files:
        columns, _ = warehouse.open_file(table, file).columns(column_types)
        pairs = zip(columns["offset"].values.tolist(), columns["sample_id"].values.tolist(), strict=True)
        found.update((file.partition, offset, id_) for offset, id_ in pairs)
    return found


def archive_until_done(place: str, records: Sequence[Record], begun: Begun) -> None:
    """The body of a process that is killed: continue where the table says until every record is stored."""
    archiver, reader, _ = an_archiver(place, records, clock=SystemClock())
    archiver.open()
    begun()
    while True:
        archiver.turn(0.0, max_records=13)
        if reader.at_end() and not archiver.num_buffered_bytes:
            return
        time.sleep(0.002)


def a_compactor_of(place: str | Path) -> Compactor:
    config = CompactorConfig(warehouse=str(place), seal_after_ms=0, vacuum_after_hours=1)
    return Compactor(Warehouse(place), config, SystemClock())


def compact_for_ever(place: str, begun: Begun) -> None:
    """The body of a compactor process that is killed."""
    compactor, stop = a_compactor_of(place), threading.Event()
    compactor.warehouse.create()
    begun()
    while True:
        with contextlib.suppress(UnavailableError):
            compactor.run_once(stop)
        time.sleep(0.01)


@dataclasses.dataclass
class Kills:
    """How many processes were killed after they had begun."""

    archivers: int = 0
    compactors: int = 0


def kill_rivals(place: Path, *, kills: int, per_partition: int, seed: int = 0) -> Kills:
    """Run two archivers of all partitions and two compactors; kill one at a time, at any moment after it has
    begun, and restart it, until `kills` were killed; then let the archivers finish. A separate process forks
    them, because threads of the libraries do not survive a fork."""
    arguments = map(str, (place, kills, per_partition, seed))
    command = [sys.executable, "-m", "tests.warehouse.archive_runs", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    return Kills(**json.loads(done.stdout))


class Rival(NamedTuple):
    """A process, and the pipe on which it reports that it has begun."""

    pid: int
    begun: int


def _started(n: int, place: str, records: Sequence[Record]) -> Rival:
    """Archivers are 0 and 1, compactors 2 and 3."""
    hears, tells = os.pipe()
    if pid := os.fork():
        os.close(tells)
        return Rival(pid, hears)
    code = 1
    try:
        begun = functools.partial(os.write, tells, b"!")
        archive_until_done(place, records, begun) if n < 2 else compact_for_ever(place, begun)
        code = 0
    finally:
        os._exit(code)


def _kill(rival: Rival, after_s: float = 0.0) -> bool:
    """Kill it `after_s` after it began. False: it had ended by itself."""
    has_begun = os.read(rival.begun, 1) == b"!"
    os.close(rival.begun)
    time.sleep(after_s)
    os.kill(rival.pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(rival.pid, 0)[1]) == -signal.SIGKILL and has_begun


def _kill_rivals(place: str, kills: int, per_partition: int, seed: int) -> Kills:
    rng, killed, records = random.Random(seed), Kills(), topic(rich_schema(), per_partition, DAYS)
    rivals = [_started(n, place, records) for n in range(4)]
    while killed.archivers + killed.compactors < kills:
        victim = rng.randrange(4)
        was = _kill(rivals[victim], rng.uniform(0.0, 0.6))
        killed.archivers += was and victim < 2
        killed.compactors += was and victim >= 2
        rivals[victim] = _started(victim, place, records)
        print(killed, file=sys.stderr, flush=True)
    for rival in rivals[:2]:
        assert os.waitpid(rival.pid, 0)[1] == 0
    for rival in rivals[2:]:
        _kill(rival)
    return killed


if __name__ == "__main__":
    print(json.dumps(dataclasses.asdict(_kill_rivals(sys.argv[1], *map(int, sys.argv[2:])))))
