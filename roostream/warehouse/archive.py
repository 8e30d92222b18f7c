"""Archiving: records of the topics `samples` and `corrections` become rows of files, each exactly once.

1 open the tables, read how far each partition has come in them, and seek there
2 read records until there are enough bytes of them, or the oldest has waited long enough
3 write files, which are not visible yet, and send unreadable records to the dead letters
4 commit to each table its files and the consumer's positions together. If another archiver has moved a
  position, the commit is rejected: forget everything and go to 1

A crash between 3 and 4 leaves files that no log names; the vacuum deletes them a week later. A file holds
rows of one close day, partition and schema, ordered by user, so that what a user's requests share lies
together (RecD). A record or schema that cannot be stored becomes dead letters and stops nothing else.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date
from typing import NamedTuple

import numpy as np
from google.protobuf.message import DecodeError

from roostream.errors import CheckpointError, FencedError, SchemaError, UnavailableError, printable
from roostream.runtime.checkpoint_store import CheckpointStore
from roostream.runtime.clock import Clock
from roostream.runtime.kafka.consumer import RecordConsumer
from roostream.runtime.kafka.topics import SAMPLES, Partition
from roostream.schema.ids import key_bytes, sample_id, signed
from roostream.schema.registry import register
from roostream.schema.schema import Registry, Schema
from roostream.warehouse.data_file import LATEST_MS, DataFile, day_of
from roostream.warehouse.delta_table import MissingFilesError, ProgressStep
from roostream.warehouse.parquet_file import MAX_VALUES, FileKey, FileRows, delete_files, write_rows
from roostream.warehouse.record_columns import (
    ENVELOPE,
    EVENTS,
    PLAIN,
    envelope_of,
    raw_column,
    rebuild_records,
)
from roostream.warehouse.warehouse import Warehouse
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.columnar import (
    CANDIDATE,
    REQUEST,
    ColumnType,
    FlatColumn,
    column_types,
    columns_of,
    label_column,
    uncut_schema,
)
from roostream.wire.decode import Decoder, Reject
from roostream.wire.records import Record

OF_SAMPLE = "of_sample"
"""Column of a correction: the id of the sample that it corrects."""
_ID = ColumnType("request", "number", "i8")


class DeadRecord(NamedTuple):
    """A record that cannot be read."""

    record: Record
    reason: str  # one of roostream.wire.records.REASONS
    error: str


def sample_types(schema: Schema) -> dict[str, ColumnType]:
    """Columns of samples of `schema`. Raises SchemaError as `roostream.wire.columnar.column_types`."""
    return {**column_types(schema), **ENVELOPE}


def correction_types(schema: Schema) -> dict[str, ColumnType]:
    """Columns of corrections of `schema`: labels before and after, and the engagements, without features."""
    plain = {name: REQUEST[name] for name in ("offset", "close_ms", "time_ms", "sample_id")} | {
        OF_SAMPLE: _ID
    }
    names = [label_column(label.name, what) for label in schema.labels for what in ("label", "label_before")]
    labels = {"item": CANDIDATE["item"], **dict.fromkeys(names, ColumnType("candidate", "float", "f4"))}
    ids = {name: PLAIN[name] for name in ("user_id", "session_id", "request_id")}
    return {**plain, **labels, **ids, **EVENTS}


def sample_rows(writer: Schema, records: Sequence[Record]) -> tuple[FileRows, list[DeadRecord]]:
    """(rows of samples that one schema wrote, in the records' order; records that cannot be read)."""
    decoder = Decoder(uncut_schema(writer), {writer.fingerprint: uncut_schema(writer)}.get)
    batch, rejects = decoder.decode(records)
    kept, dead = _kept(records, rejects, wire.SAMPLE)
    columns = columns_of(batch) | envelope_of([pb.Sample.FromString(record.value[2:]) for record in kept])
    rebuilt = rebuild_records(writer, columns, batch.num_candidates_R)
    raw = [None if same == (r.key, r.value) else r.value for r, same in zip(kept, rebuilt, strict=True)]
    columns["raw"] = raw_column(raw)
    return FileRows(columns=columns, column_types=sample_types(writer), counts_R=batch.num_candidates_R), dead


def correction_rows(writer: Schema, records: Sequence[Record]) -> tuple[FileRows, list[DeadRecord]]:
    """(rows of corrections that one schema wrote, trainable or not, in the records' order; records that
    cannot be read)."""
    decoder = Decoder(uncut_schema(writer), {writer.fingerprint: uncut_schema(writer)}.get)
    kept, dead = _kept(records, decoder.decode(records, corrections=True)[1], wire.CORRECTION)
    found = [pb.Sample.FromString(record.value[2:]) for record in kept]
    envelope = envelope_of(found)
    counts_R = np.array([len(c.item_ids) for c in found], dtype=np.int32)
    numbers = {
        "offset": [record.offset for record in kept],
        "close_ms": [c.close_ms for c in found],
        "time_ms": [c.header.time_ms for c in found],
        "sample_id": [signed(c.sample_id) for c in found],
        OF_SAMPLE: [signed(_sample_of(c)) for c in found],
        "item": [signed(item) for c in found for item in c.item_ids],
    }
    columns = {name: FlatColumn(np.array(values, dtype=np.int64)) for name, values in numbers.items()}
    t = len(writer.labels)
    labels = {"label": [c.labels for c in found], "label_before": [c.labels_before for c in found]}
    for what, given in labels.items():
        flat = [x for c, n in zip(given, counts_R.tolist(), strict=True) for x in (c or [np.nan] * (n * t))]
        label_BT = np.array(flat, dtype=np.float32).reshape(-1, t)
        for i, label in enumerate(writer.labels):
            columns[label_column(label.name, what)] = FlatColumn(np.ascontiguousarray(label_BT[:, i]))
    chosen = correction_types(writer)
    columns |= {name: column for name, column in envelope.items() if name in chosen}
    return FileRows(columns=columns, column_types=chosen, counts_R=counts_R), dead


def _kept(
    records: Sequence[Record], rejects: Iterable[Reject], kind: int
) -> tuple[list[Record], list[DeadRecord]]:
    dead = {r.index: DeadRecord(records[r.index], r.reason, r.error) for r in rejects}
    readable = [record for n, record in enumerate(records) if n not in dead]
    return [record for record in readable if wire.kind_of(record.value) == kind], [*dead.values()]


def _sample_of(correction: pb.Sample) -> int:
    """The id of the sample that a correction corrects. A correction's own id also contains its
    engagement's."""
    header = correction.header
    return sample_id(key_bytes(header.user_id, header.session_id, header.request_id), header.request_id)


def group_by_writer(
    records: Iterable[Record], registry: Registry, kind: int
) -> tuple[dict[int, list[Record]], list[DeadRecord]]:
    """Fingerprint → records of this kind, in their order; and records that cannot be stored: of another kind,
    with an impossible close time, or of a schema that is unknown, damaged, or has two features for one
    column.

    Raises:
        UnavailableError: schemas cannot be read now.
    """
    records_by_writer: dict[int, list[Record]] = {}
    dead: list[DeadRecord] = []
    unusable: dict[int, str] = {}
    for record in records:
        if (got := wire.kind_of(record.value)) != kind:
            dead.append(DeadRecord(record, "unknown_type", f"expected a record of type {kind}, got {got}"))
            continue
        try:
            found = pb.Sample.FromString(record.value[2:])
        except DecodeError as cause:
            dead.append(DeadRecord(record, "undecodable", f"expected a Sample: {cause}"))
            continue
        if not 0 <= found.close_ms <= LATEST_MS:
            error = f"expected a close time in ms before the year 10000, got {found.close_ms}"
            dead.append(DeadRecord(record, "bad_time", error))
            continue
        fingerprint = found.header.schema
        if (
            fingerprint not in records_by_writer
            and fingerprint not in unusable
            and (error := _unusable(fingerprint, registry))
        ):
            unusable[fingerprint] = error
        if fingerprint in unusable:
            dead.append(DeadRecord(record, "unknown_schema", unusable[fingerprint]))
        else:
            records_by_writer.setdefault(fingerprint, []).append(record)
    return records_by_writer, dead


def _unusable(fingerprint: int, registry: Registry) -> str:
    """Why records of a schema cannot be stored; "" if they can."""
    try:
        writer = registry(fingerprint)
        if writer is None:
            return f"unknown schema {fingerprint:016x}; register the schema that wrote the record"
        sample_types(writer)
    except (CheckpointError, SchemaError) as error:
        return f"schema {fingerprint:016x} cannot be used: {error}"
    return ""


MakeRows = Callable[[Schema, Sequence[Record]], tuple[FileRows, list[DeadRecord]]]
"""`sample_rows` or `correction_rows`."""


def rows_by_day(
    make: MakeRows, writer: Schema, records: Sequence[Record]
) -> tuple[dict[date, FileRows], list[DeadRecord]]:
    """The rows of records of one writer by the day of their close, each day's ordered by user; and records
    that cannot be stored. A record that reveals a defect is found by halving, and only it becomes dead."""
    try:
        rows, dead = make(writer, records)
        return (group_by_day(rows) if len(rows.counts_R) else {}), dead
    except UnavailableError:
        raise
    except Exception as error:  # a defect of ours, by which one record would stop the archive for ever
        if len(records) == 1:
            log.exception("a record cannot be stored because of a defect")
            text = printable(f"the archiver failed: {type(error).__name__}: {error}")[:500]
            return {}, [DeadRecord(records[0], "internal_error", text)]
    halves = [records[: len(records) // 2], records[len(records) // 2 :]]
    days: dict[date, list[FileRows]] = {}
    all_dead: list[DeadRecord] = []
    for half in halves:
        of_days, dead = rows_by_day(make, writer, half)
        all_dead += dead
        for day, rows in of_days.items():
            days.setdefault(day, []).append(rows)
    merged = {
        day: merge_rows(parts, np.arange(sum(len(p.counts_R) for p in parts))) for day, parts in days.items()
    }
    return {day: sort_by_user(rows) for day, rows in merged.items()}, all_dead


def group_by_day(rows: FileRows) -> dict[date, FileRows]:
    """Rows by the day of their close, each day's ordered by user."""
    close_ms_R = rows.columns["close_ms"].values
    days = np.array([day_of(int(ms)).toordinal() for ms in close_ms_R], dtype=np.int64)
    return {
        date.fromordinal(int(day)): sort_by_user(take_rows(rows, np.flatnonzero(days == day)))
        for day in np.unique(days)
    }


def sort_by_user(rows: FileRows) -> FileRows:
    """The rows by (user, time); unknown users by session."""
    order = np.lexsort([rows.columns[name].values for name in ("offset", "time_ms", "session_id", "user_id")])
    return take_rows(rows, order)


def take_rows(rows: FileRows, rows_M: np.ndarray) -> FileRows:
    """The rows `rows_M` (int64 [M]), in that order."""
    return merge_rows([rows], rows_M)


def merge_rows(parts: Sequence[FileRows], rows_M: np.ndarray) -> FileRows:
    """The rows `rows_M` (int64 [M]) of several parts with the same columns, counted over all parts."""
    counts_R = np.concatenate([part.counts_R for part in parts])
    counts_M = counts_R[rows_M]
    at = {"request": rows_M, "candidate": _ranges(_starts(counts_R)[rows_M], counts_M)}
    column_types = {
        name: column_type for name, column_type in parts[0].column_types.items() if name in parts[0].columns
    }
    columns = {
        name: _taken(concat_columns([part.columns[name] for part in parts]), at[column_type.of])
        for name, column_type in column_types.items()
    }
    return FileRows(columns=columns, column_types=parts[0].column_types, counts_R=counts_M)


def split_rows(rows: FileRows, max_values: int = MAX_VALUES) -> list[FileRows]:
    """The rows in pieces with at most `max_values` values in every column; a single request may have more."""
    count, most_R = len(rows.counts_R), np.ones(len(rows.counts_R), dtype=np.int64)
    for name, column in rows.columns.items():
        most_R = np.maximum(most_R, _num_values_R(column, rows.column_types[name], rows.counts_R))
    ends_R = most_R.cumsum()
    pieces, first = [], 0
    while first < count:
        before = int(ends_R[first - 1]) if first else 0
        end = int(np.searchsorted(ends_R, before + max_values, side="right"))
        end = max(end, first + 1)
        pieces.append(rows if end - first == count else take_rows(rows, np.arange(first, end)))
        first = end
    return pieces


def _num_values_R(column: FlatColumn, column_type: ColumnType, counts_R: np.ndarray) -> np.ndarray:
    """int64 [R]: values of each request in a column."""
    if column_type.of == "request":
        lengths = np.ones(len(counts_R)) if column.lengths is None else column.lengths
        return lengths.astype(np.int64)
    if column.lengths is None:
        return counts_R.astype(np.int64)
    ends_B = np.concatenate([[0], np.cumsum(column.lengths, dtype=np.int64)])
    ends_R = np.cumsum(counts_R, dtype=np.int64)
    return ends_B[ends_R] - ends_B[ends_R - counts_R]


def concat_columns(columns: Sequence[FlatColumn]) -> FlatColumn:
    """The values of several columns, one after the other."""
    if len(columns) == 1:
        return columns[0]
    values = np.concatenate([column.values for column in columns])
    if columns[0].lengths is None:
        return FlatColumn(values)
    lengths = np.concatenate([column.lengths for column in columns if column.lengths is not None])
    present = np.concatenate(
        [
            np.ones(len(c.lengths), np.bool_) if c.present is None else c.present
            for c in columns
            if c.lengths is not None
        ]
    )
    return FlatColumn(values, lengths, present)


def _taken(column: FlatColumn, at: np.ndarray) -> FlatColumn:
    if column.lengths is None:
        return FlatColumn(column.values[at])
    lengths = column.lengths[at]
    values = column.values[_ranges(_starts(column.lengths)[at], lengths)]
    return FlatColumn(values, lengths, None if column.present is None else column.present[at])


def _starts(counts: np.ndarray) -> np.ndarray:
    return np.cumsum(counts, dtype=np.int64) - counts


def _ranges(starts_M: np.ndarray, lengths_M: np.ndarray) -> np.ndarray:
    """Concatenation of arange(start, start + length)."""
    ends = np.cumsum(lengths_M, dtype=np.int64)
    return np.arange(int(ends[-1]) if len(ends) else 0, dtype=np.int64) + np.repeat(
        starts_M - (ends - lengths_M), lengths_M
    )


log = logging.getLogger("roostream.archiver")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlushPolicy:
    """When buffered records are written to files."""

    bytes: int  # of buffered records
    after_ms: int  # since the oldest record was read


MAX_PENDING_MS = 24 * 3_600_000
"""Files that wait longer for their commit are written again, long before a vacuum deletes them."""
SendDeadRecords = Callable[[Sequence[DeadRecord]], None]
"""Sends records that cannot be read; returns when all are stored. Raises UnavailableError: they are not; send
them again."""


@dataclasses.dataclass
class ArchiveCounts:
    """Counters since the start."""

    rows: int = 0
    files: int = 0
    bytes: int = 0
    dead: int = 0
    commits: int = 0
    refused: int = 0


@dataclasses.dataclass(frozen=True)
class _PendingFiles:
    """Files of one table that wait for their commit."""

    files: list[DataFile]
    steps: dict[str, ProgressStep]


def check_has_schemas(store: CheckpointStore, url: str = "the deployment's store") -> None:
    """Check that programs have registered schemas in the store. Without this check, an archiver whose `store`
    is not that of the other programs would send every record to the dead letters.

    Raises:
        UnavailableError: there is none, or the store is away.
    """
    if not store.list("schemas"):
        raise UnavailableError(
            f"expected the schemas of the samples in {url}, got none: make its folder `schemas` available, "
            "start the other programs, or give the archiver their `store`"
        )


class Archiver:
    """Archives chosen partitions. Call `open` first; after a rejected commit `turn` has opened it again. One
    thread."""

    def __init__(
        self,
        warehouse: Warehouse,
        reader: RecordConsumer,
        topic_ids: Mapping[str, str],
        current_topic_ids: Callable[[], Mapping[str, str]],
        registry: Registry,
        memory: CheckpointStore,
        rule: FlushPolicy,
        send_dead: SendDeadRecords,
        clock: Clock,
    ) -> None:
        """`topic_ids`: the broker's id of each topic before `reader` was opened; a topic that is deleted and
        created again has another one. `current_topic_ids` asks the broker, or raises UnavailableError.

        `registry`: schemas of all writers. `memory`: the deployment's store, which remembers the warehouse.
        """
        self.warehouse, self.reader, self.rule = warehouse, reader, rule
        self.topic_ids, self.current_topic_ids = topic_ids, current_topic_ids
        self.registry, self.memory, self.send_dead, self.clock = registry, memory, send_dead, clock
        self.counts = ArchiveCounts()
        self.num_buffered_bytes = 0
        self._buffered: list[Record] = []
        self._oldest_s = 0.0
        self._positions: dict[Partition, int | None] = {}
        self._pending: dict[str, _PendingFiles] = {}
        self._pending_since_ms = 0
        self._registered: set[int] = set()  # fingerprints of schemas that are stored in the warehouse
        self._warned: set[tuple[int, str]] = set()  # fingerprint and column

    def open(self) -> None:
        """Step 1.

        Raises:
            UnavailableError: the warehouse or the source is away; call again.
            CheckpointError: another warehouse is at its place.
        """
        self.warehouse.open_remembered(self.memory)
        found = {
            topic: self.warehouse.tables[topic].snapshot()
            for topic in {topic for topic, _ in self.reader.partitions}
        }
        self._positions = {p: found[p[0]].progress(self._name(p)) for p in self.reader.partitions}
        self.reader.seek({p: at for p, at in self._positions.items() if at is not None})
        self._forget()

    def turn(self, timeout_s: float, max_records: int = 1024) -> None:
        """Step 2, then 3 and 4 if they are due.

        **If it fails** (UnavailableError): nothing is lost. The buffered records wait, and no more are read
        before their commit.
        """
        if not self.is_due():
            records = self.reader.poll(max_records, timeout_s)
            if records and not self._buffered:
                self._oldest_s = self.clock.monotonic_s()
            self._buffered += records
            self.num_buffered_bytes += sum(len(record.value or b"") for record in records)
        if self.is_due():
            self.flush()

    def is_due(self) -> bool:
        """Whether enough records are buffered, or the oldest has waited long enough."""
        waited_ms = (self.clock.monotonic_s() - self._oldest_s) * 1000
        return bool(self._buffered) and (
            self.num_buffered_bytes >= self.rule.bytes or waited_ms >= self.rule.after_ms
        )

    def flush(self) -> None:
        """Steps 3 and 4 for all buffered records.

        Raises:
            UnavailableError: as `turn`.
            FencedError: a topic was deleted and created again; the program must begin again.
        """
        if not self._buffered:
            return
        self._check_topics()
        if self.clock.now_ms() - self._pending_since_ms > MAX_PENDING_MS:
            self._pending = {}
        try:
            if not self._pending:
                self._pending_since_ms = self.clock.now_ms()
                self._pending = self._files()
            for topic, made in list(self._pending.items()):
                self.warehouse.tables[topic].commit(made.files, progress=made.steps)
                self._committed(topic, made)
            self._forget()
        except MissingFilesError as error:
            self._pending = {}
            raise UnavailableError(str(error)) from None
        except FencedError as error:
            log.warning("%s; continuing from there", error)
            self.counts.refused += 1
            self.open()

    def _check_topics(self) -> None:
        """An unchanged id proves that every buffered record belongs to the topic that its offset is committed
        for."""
        for topic, id_ in self.current_topic_ids().items():
            if id_ != self.topic_ids[topic]:
                raise FencedError(
                    f"topic {topic} was created again: expected id {self.topic_ids[topic]}, got {id_}; "
                    f"{len(self._buffered)} records that may be of either were not archived; "
                    "start the archiver again to archive the new topic from its beginning"
                )

    def _files(self) -> dict[str, _PendingFiles]:
        """Step 3: topic → its files, and the new positions of its partitions."""
        by_partition: dict[Partition, list[Record]] = {}
        for record in self._buffered:
            by_partition.setdefault((record.topic, record.partition), []).append(record)
        dead: list[DeadRecord] = []
        pending: dict[str, _PendingFiles] = {}
        positions = self.reader.positions()
        try:
            for partition, records in by_partition.items():
                table = pending.setdefault(partition[0], _PendingFiles([], {}))
                self._write_files(partition, records, table.files, dead)
                table.steps[self._name(partition)] = ProgressStep(
                    self._positions[partition], positions[partition]
                )
            if dead:
                self.send_dead(dead)
                self.counts.dead += len(dead)
        except BaseException:
            for topic, made in pending.items():
                delete_files(self.warehouse.store, topic, made.files)
            raise
        return pending

    def _write_files(
        self, partition: Partition, records: list[Record], files: list[DataFile], dead: list[DeadRecord]
    ) -> None:
        """Append the new files to `files`, and unreadable records to `dead`."""
        topic, number = partition
        kind = wire.SAMPLE if topic == SAMPLES else wire.CORRECTION
        of_writer, unreadable = group_by_writer(records, self._schema, kind)
        dead += unreadable
        for fingerprint, records_of_writer in of_writer.items():
            writer = self._schema(fingerprint)
            assert writer is not None
            days, wrong = rows_by_day(
                sample_rows if topic == SAMPLES else correction_rows, writer, records_of_writer
            )
            dead += wrong
            if days:
                self._prepare(topic, writer, next(iter(days.values())))
            for day, rows in days.items():
                key = FileKey(
                    table=topic,
                    day=day,
                    partition=number,
                    fingerprint=fingerprint,
                    topic=self.topic_ids[topic],
                )
                for part in split_rows(rows):
                    files.append(write_rows(self.warehouse.store, part, key))

    def _schema(self, fingerprint: int) -> Schema | None:
        """A schema from the deployment's store, or, if its file there is missing or damaged, the copy in the
        warehouse. Raises UnavailableError: it is in neither, and the deployment's schemas are away."""
        try:
            if (found := self.registry(fingerprint)) is not None:
                return found
        except CheckpointError as error:
            log.warning("%s; the warehouse's copy is used if there is one", error)
        if (copy := self.warehouse.registry(fingerprint)) is None:
            check_has_schemas(self.memory)
        return copy

    def _prepare(self, topic: str, writer: Schema, rows: FileRows) -> None:
        """Store the schema, and declare the columns in the table's log."""
        if writer.fingerprint not in self._registered:
            register(self.warehouse.store, writer)
            self._registered.add(writer.fingerprint)
        for column in self.warehouse.tables[topic].widen(rows.column_types):
            if (writer.fingerprint, column) not in self._warned:
                self._warned.add((writer.fingerprint, column))
                log.warning(
                    "schema %r writes column %s with another type than earlier schemas: tools other than "
                    "Roostream cannot read this column; rename the feature",
                    writer.name,
                    column,
                )

    def _committed(self, topic: str, made: _PendingFiles) -> None:
        del self._pending[topic]
        self._positions |= {
            p: made.steps[self._name(p)].after for p in self._positions if self._name(p) in made.steps
        }
        self._buffered = [record for record in self._buffered if record.topic != topic]
        self.counts.commits += 1
        self.counts.files += len(made.files)
        self.counts.rows += sum(file.rows for file in made.files)
        self.counts.bytes += sum(file.bytes for file in made.files)

    def _forget(self) -> None:
        self._buffered, self._pending, self.num_buffered_bytes = [], {}, 0

    def _name(self, partition: Partition) -> str:
        return progress_name(partition, self.topic_ids[partition[0]])


def progress_name(partition: Partition, topic_id: str) -> str:
    """The name of a partition's progress in its table's log."""
    topic, number = partition
    return f"{topic}/{topic_id}/{number}"
