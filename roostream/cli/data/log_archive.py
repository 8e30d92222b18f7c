"""Join a log in this process and archive its samples in a warehouse, in one commit, like an archiver behind
Kafka.

The digest of the log takes the place of a topic id, so that the same log is rejected a second time.
Memory: the open requests of the joiner, and the samples of one file for each partition.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import xxhash

from roostream.cli.replay.outcome import LocalJoin, LocalTopics
from roostream.errors import ConfigError, FencedError
from roostream.replay.config import ReplayConfig
from roostream.replay.replay_log import open_log
from roostream.runtime.kafka.topics import CORRECTIONS, SAMPLES
from roostream.schema.registry import register
from roostream.schema.schema import Schema
from roostream.schema.schema_file import load_schema
from roostream.warehouse.archive import group_by_day, sample_rows
from roostream.warehouse.data_file import DataFile
from roostream.warehouse.delta_table import ProgressStep
from roostream.warehouse.parquet_file import FileKey, write_rows
from roostream.warehouse.warehouse import Warehouse
from roostream.wire import records as wire
from roostream.wire.records import Record

FILE_BYTES = 64 << 20
"""Size of the samples of a partition, as records, that are written to one file."""


@dataclasses.dataclass
class ArchivedLog:
    """Counts of an archived log."""

    requests: int = 0
    samples: int = 0
    files: int = 0
    bytes: int = 0
    late: int = 0  # engagements after the join window, which are in no sample
    skipped: int = 0  # lines that cannot be used
    first_skipped: str = ""  # the error of the first one


def archive_log(
    replay: ReplayConfig,
    paths: Sequence[str],
    place: str,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> ArchivedLog:
    """Archive the log in `paths`. `progress` is called with the number of requests read and the total (0 =
    unknown).

    On failure unreferenced files may remain in the warehouse.

    Raises:
        ConfigError: the warehouse has this log already, or the log cannot be read.
        LogError: a line cannot be used, and `replay` does not skip such lines; nothing was committed.
        UnavailableError: the warehouse cannot be written now.
    """
    schema = load_schema(replay.schema_path)
    warehouse, counts = Warehouse(place), ArchivedLog()
    warehouse.create()
    register(warehouse.store, schema)
    digest = digest_of(paths, schema)
    known = warehouse.samples.snapshot()
    topics = LocalTopics(schema)
    joiner = LocalJoin(replay, schema, topics)
    if any(known.progress(f"{SAMPLES}/{digest}/{n}") is not None for n in range(joiner.config.partitions)):
        raise _is_archived_error(place)
    files = _SampleFiles(warehouse, schema, digest, counts)
    log = open_log(replay, schema)
    for record in log.records:
        if wire.kind_of(record.value) == wire.IMPRESSION:
            counts.requests += 1
            progress(counts.requests, log.num_requests)
        files.take(joiner.process(topics.append(record)))
    files.take(joiner.end_of_input())
    files.flush()
    skipped = log.skipped()
    counts.skipped, counts.first_skipped = skipped.number, next(iter(skipped.first), "")
    steps = {f"{SAMPLES}/{digest}/{n}": ProgressStep(None, after) for n, after in files.next_offsets.items()}
    try:
        warehouse.samples.commit(files.written, progress=steps)
    except FencedError:
        raise _is_archived_error(place) from None
    return counts


def digest_of(paths: Sequence[str], schema: Schema) -> str:
    """`log-` and 16 hex digits: a digest of the schema and the bytes of the files, in order."""
    digest = xxhash.xxh3_64(f"{schema.fingerprint:016x}".encode())
    for path in paths:
        with Path(path).open("rb") as file:
            while piece := file.read(1 << 20):
                digest.update(piece)
    return f"log-{digest.hexdigest()}"


class _SampleFiles:
    """Collects samples by partition and writes them to files, which the commit names later."""

    def __init__(self, warehouse: Warehouse, schema: Schema, digest: str, counts: ArchivedLog) -> None:
        self.warehouse, self.schema, self.digest, self.counts = warehouse, schema, digest, counts
        self.written: list[DataFile] = []
        self.next_offsets: dict[int, int] = {}
        self._waiting: dict[int, list[Record]] = {}
        self._bytes: dict[int, int] = {}

    def take(self, records: Iterable[Record]) -> None:
        for record in records:
            self.counts.late += record.topic == CORRECTIONS
            if record.topic == SAMPLES:
                n = record.partition
                self._waiting.setdefault(n, []).append(record)
                self._bytes[n] = self._bytes.get(n, 0) + len(record.value or b"")
                if self._bytes[n] >= FILE_BYTES:
                    self._flush(n)

    def flush(self) -> None:
        for n in sorted(self._waiting):
            self._flush(n)

    def _flush(self, n: int) -> None:
        records = self._waiting.pop(n, [])
        self._bytes[n] = 0
        if not records:
            return
        rows, _ = sample_rows(self.schema, records)
        self.warehouse.samples.widen(rows.forms)
        for day, day_rows in group_by_day(rows).items():
            where = FileKey(
                table=SAMPLES, day=day, partition=n, fingerprint=self.schema.fingerprint, topic=self.digest
            )
            self.written.append(
                write_rows(self.warehouse.store, day_rows, where, self.warehouse.column_order())
            )
            self.counts.files += 1
            self.counts.bytes += self.written[-1].bytes
        self.counts.samples += len(rows.counts_R)
        self.next_offsets[n] = records[-1].offset + 1


def _is_archived_error(place: str) -> ConfigError:
    return ConfigError(f"{place}: expected a new log, but it was imported before; nothing was changed")
