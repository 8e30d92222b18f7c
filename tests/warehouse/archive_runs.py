"""Archivers over a topic in memory, in this process or in ones that are killed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from roo.columnar import REQUEST, Form
from roo.schema import Schema
from roo.wire import Record
from runtime.clock import Clock, FakeClock, SystemClock
from runtime.kafka.record_reader import MemoryReader
from tests.warehouse.sample_cases import keyed, rich_records, rich_schema
from warehouse.archive import Dead
from warehouse.archiver import Archiver, FlushRule
from warehouse.place import Warehouse

PARTITIONS = 2
TOPIC_IDS = {"samples": "topic-1", "corrections": "topic-2"}
RULE = FlushRule(bytes=1 << 14, after_ms=200)


class Morgue:
    """Dead letters, kept."""

    def __init__(self) -> None:
        self.letters: list[Dead] = []

    def send(self, dead: Sequence[Dead]) -> None:
        self.letters += dead


def topic(schema: Schema, per_partition: int) -> list[Record]:
    """Samples with distinct ids, alternately in each partition."""
    return [
        record._replace(offset=n)
        for p in range(PARTITIONS)
        for n, record in enumerate(keyed(rich_records(schema, per_partition, partition=p)))
    ]


def an_archiver(
    place: str | Path,
    records: Sequence[Record],
    numbers: Sequence[int] = range(PARTITIONS),
    clock: Clock | None = None,
    topics: Mapping[str, str] = TOPIC_IDS,
) -> tuple[Archiver, MemoryReader, Morgue]:
    schema, morgue = rich_schema(), Morgue()
    partitions = [(name, n) for name in TOPIC_IDS for n in numbers]
    reader = MemoryReader(partitions, [r for r in records if (r.topic, r.partition) in partitions])
    made = Archiver(Warehouse(place), reader, topics, {schema.fingerprint: schema}.get, RULE, morgue, clock or FakeClock())
    return made, reader, morgue


def places(place: str | Path, table: str = "samples") -> Counter[tuple[int, int]]:
    """(partition, offset) of every row of a table → how often it is there."""
    warehouse, found = Warehouse(place), Counter[tuple[int, int]]()
    forms: dict[str, Form] = {"offset": REQUEST["offset"]}
    for file in warehouse.tables[table].snapshot().files:
        columns, _ = warehouse.open_file(table, file).columns(forms)
        found.update((file.partition, offset) for offset in columns["offset"].values.tolist())
    return found


def archive_until_done(place: str, per_partition: int) -> None:
    """What a killed process does: begin where the table says, go on until everything is there."""
    archiver, reader, _ = an_archiver(place, topic(rich_schema(), per_partition), clock=SystemClock())
    archiver.open()
    while True:
        archiver.turn(0.0, max_records=13)
        if reader.at_end() and not archiver.num_waiting_bytes:
            return
        time.sleep(0.002)


def kill_rivals(place: Path, *, kills: int, per_partition: int, seed: int = 0) -> int:
    """Two rivals of all partitions at any time, one of which is killed again and again, until `kills` of them were; then one goes
    on to the end. How many were killed."""
    rng, killed = random.Random(seed), 0

    def start() -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tests.warehouse.archive_runs", str(place), str(per_partition)]
        return subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL)

    rivals = [start(), start()]
    try:
        while killed < kills:
            time.sleep(rng.uniform(0.3, 1.8))
            victim = rng.randrange(2)
            if rivals[victim].poll() is None:
                rivals[victim].send_signal(signal.SIGKILL)
            rivals[victim].wait()
            killed += 1
            rivals[victim] = start()
        for rival in rivals:
            rival.wait(timeout=300)
    finally:
        for rival in rivals:
            rival.kill()
            rival.wait()
    return killed


if __name__ == "__main__":
    archive_until_done(sys.argv[1], int(sys.argv[2]))
