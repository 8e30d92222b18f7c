"""Join a log in this process and archive its samples and corrections in a warehouse, like an archiver behind
Kafka.

The digest of the log takes the place of a topic id, so that the same log is rejected a second time. Samples
are one commit. Corrections are committed before: if the import ends between the two, it can be repeated.
Memory: the open requests of the joiner, and the records of one file for each topic and partition.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import xxhash

from roostream.cli.replay.outcome import LocalJoin, LocalTopics
from roostream.errors import ConfigError, FencedError, printable
from roostream.replay.config import ReplayConfig
from roostream.replay.log_lines import LogError
from roostream.replay.replay_log import open_log
from roostream.runtime.checkpoint_store import FileStore
from roostream.runtime.kafka.topics import CORRECTIONS, DEAD_LETTERS, SAMPLES, Partition
from roostream.schema.registry import register
from roostream.schema.schema import Schema
from roostream.schema.schema_file import load_schema
from roostream.warehouse.archive import correction_rows, rows_by_day, sample_rows, split_rows
from roostream.warehouse.data_file import DataFile
from roostream.warehouse.delta_table import ProgressStep
from roostream.warehouse.parquet_file import FileKey, write_rows
from roostream.warehouse.warehouse import Warehouse
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.columnar import ColumnType
from roostream.wire.records import Record

FILE_BYTES = 64 << 20
"""Size of the samples of a partition, as records, that are written to one file."""
_MAX_MESSAGES = 10


@dataclasses.dataclass
class ArchivedLog:
    """Counts of an archived log."""

    requests: int = 0
    samples: int = 0
    files: int = 0
    bytes: int = 0
    late: int = 0  # engagements after the join window, which became corrections
    skipped: int = 0  # lines that cannot be used
    first_skipped: tuple[str, ...] = ()  # the errors of the first ones
    warnings: list[str] = dataclasses.field(default_factory=list)  # about rows that were left out
    archived_before: int = 0  # samples that the warehouse had
    dead: int = 0  # events that cannot be joined, and samples that cannot be stored
    first_dead: tuple[str, ...] = ()


def archive_log(
    replay: ReplayConfig,
    paths: Sequence[str],
    place: str,
    *,
    skip_bad: bool = False,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> ArchivedLog:
    """Archive the log in `paths`. Lines that cannot be used are skipped if `replay` says so. Events that
    cannot be joined are counted with `skip_bad`, and end the import otherwise. `progress` is called with
    the number of requests read and the total (0 = unknown).

    On failure unreferenced files may remain in the warehouse; tables are made only before the commit.

    Raises:
        ConfigError: the warehouse has this log already, or its corrections with other settings, or the log
            cannot be read.
        LogError: a line cannot be used or joined, and such lines are not skipped; nothing was committed.
        UnavailableError: the warehouse cannot be written now.
    """
    schema = load_schema(replay.schema_path)
    warehouse, counts, topics = Warehouse(place), ArchivedLog(), LocalTopics(schema)
    digest, joiner = digest_of(paths, schema), LocalJoin(replay, schema, topics)
    if warehouse.samples.exists():
        known = warehouse.samples.snapshot()
        names = [f"{SAMPLES}/{digest}/{n}" for n in range(joiner.config.partitions)]
        if any(known.progress(name) is not None for name in names):
            raise _is_archived_error(place)
        counts.archived_before = sum(file.rows for file in known.files)
    log = open_log(replay, schema)
    files = _LogFiles(warehouse, schema, digest, counts, log.profile.origins.find)
    for record in log.records:
        if wire.kind_of(record.value) == wire.IMPRESSION:
            counts.requests += 1
            progress(counts.requests, log.num_requests)
        files.take(joiner.process(topics.append(record)))
    files.take(joiner.end_of_input())
    files.check_dead(skip_bad)  # before the last files, and so of most logs before any, are written
    files.flush()
    files.check_dead(skip_bad)
    skipped = log.skipped()
    counts.skipped, counts.first_skipped = skipped.number, skipped.first
    counts.warnings = skipped.warnings()
    counts.dead, counts.first_dead = files.num_dead, tuple(files.first_dead)
    files.create_tables()  # only now, because a failure must not leave empty ones behind
    commit = files.commit_of(CORRECTIONS)
    try:
        warehouse.corrections.commit(*commit)
    except FencedError:  # an import that ended before the samples' commit did this part
        known = warehouse.corrections.snapshot()
        if any(known.progress(name) != step.after for name, step in commit[2].items()):
            raise ConfigError(
                f"{place}: an import of this log with another --window ended before its samples were added, "
                "and nothing was changed; repeat it with the --window that it had"
            ) from None
    try:
        warehouse.samples.commit(*files.commit_of(SAMPLES))
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


class _LogFiles:
    """Collects records by topic and partition and writes them to files, which commits name later."""

    def __init__(
        self,
        warehouse: Warehouse,
        schema: Schema,
        digest: str,
        counts: ArchivedLog,
        find: Callable[[pb.DeadLetter], str],
    ) -> None:
        """`find` returns the position of a dead letter's event in the log."""
        self.warehouse, self.schema, self.digest, self.counts = warehouse, schema, digest, counts
        self.num_dead = 0
        self.first_dead: list[str] = []
        self._find = find
        self._written: dict[str, list[DataFile]] = {SAMPLES: [], CORRECTIONS: []}
        self._column_types: dict[str, dict[str, ColumnType]] = {SAMPLES: {}, CORRECTIONS: {}}
        self._next_offsets: dict[Partition, int] = {}
        self._waiting: dict[Partition, list[Record]] = {}
        self._bytes: Counter[Partition] = Counter()

    def take(self, records: Iterable[Record]) -> None:
        for record in records:
            self.counts.late += record.topic == CORRECTIONS
            if record.topic == DEAD_LETTERS:
                self._dead_letter(record)
            if record.topic in self._written:
                partition = record.topic, record.partition
                self._waiting.setdefault(partition, []).append(record)
                self._bytes[partition] += len(record.value)
                if self._bytes[partition] >= FILE_BYTES:
                    self._flush(partition)

    def check_dead(self, skip_bad: bool) -> None:
        """Raises LogError: some events cannot be joined or stored, and they are not skipped."""
        if self.num_dead and not skip_bad:
            raise LogError(
                f"{self.num_dead} events cannot be joined, and nothing was imported: "
                f"{'; '.join(self.first_dead)}; correct the log, or use --skip-bad to leave such events out"
            )

    def create_tables(self) -> None:
        """Create the tables and the columns of the files, and register the schema."""
        self.warehouse.create()
        register(self.warehouse.store, self.schema)
        for topic, column_types in self._column_types.items():
            self.warehouse.tables[topic].widen(column_types)

    def flush(self) -> None:
        for partition in sorted(self._waiting):
            self._flush(partition)

    def commit_of(self, topic: str) -> tuple[list[DataFile], list[DataFile], dict[str, ProgressStep]]:
        """The arguments of a table's commit."""
        steps = {
            f"{topic}/{self.digest}/{number}": ProgressStep(None, after)
            for (name, number), after in self._next_offsets.items()
            if name == topic
        }
        return self._written[topic], [], steps

    def _flush(self, partition: Partition) -> None:
        (topic, number), records = partition, self._waiting.pop(partition, [])
        self._bytes[partition] = 0
        if not records:
            return
        if isinstance(self.warehouse.store, FileStore):
            self.warehouse.store.make_root()
        days, dead = rows_by_day(sample_rows if topic == SAMPLES else correction_rows, self.schema, records)
        for one in dead:
            self._dead(f"{topic} of the log: {one.reason}: {one.error}")
        for day, rows in days.items():
            self._column_types[topic] |= rows.column_types
            key = FileKey(
                table=topic,
                day=day,
                partition=number,
                fingerprint=self.schema.fingerprint,
                topic=self.digest,
            )
            for part in split_rows(rows):
                file = write_rows(self.warehouse.store, part, key, self.warehouse.column_order())
                self._written[topic].append(file)
                self.counts.files += 1
                self.counts.bytes += file.bytes
            self.counts.samples += len(rows.counts_R) if topic == SAMPLES else 0
        self._next_offsets[partition] = records[-1].offset + 1

    def _dead_letter(self, record: Record) -> None:
        letter = wire.decode(record.value)[1]
        assert isinstance(letter, pb.DeadLetter)
        self._dead(f"{self._find(letter)}: {letter.reason}: {letter.error}")

    def _dead(self, message: str) -> None:
        self.num_dead += 1
        if len(self.first_dead) < _MAX_MESSAGES:
            self.first_dead.append(printable(message))


def _is_archived_error(place: str) -> ConfigError:
    return ConfigError(f"{place}: expected a new log, but it was imported before; nothing was changed")
