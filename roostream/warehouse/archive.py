"""Archiving: records of the topics `samples` and `corrections` become rows of files, each exactly once.

1 open the tables, read how far each partition has come in them, and seek there
2 read records until there are enough bytes of them, or the oldest has waited long enough
3 write files, which are not visible yet, and send unreadable records to the dead letters
4 commit to each table its files and the consumer's positions together. If another archiver has moved a
  position, the commit is rejected: forget everything and go to 1

A crash between 3 and 4 leaves files that no log names; the vacuum deletes them. A file holds rows of one
close day, partition and schema, ordered by user, so that what a user's requests share lies together (RecD).
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date
from functools import partial
from typing import NamedTuple

import numpy as np
from google.protobuf.message import DecodeError

from roostream.errors import FencedError
from roostream.runtime.clock import Clock
from roostream.runtime.kafka.consumer import RecordConsumer
from roostream.runtime.kafka.topics import SAMPLES, Partition
from roostream.schema.ids import key_bytes, sample_id, signed
from roostream.schema.registry import register
from roostream.schema.schema import Registry, Schema
from roostream.warehouse.data_file import DataFile, day_of
from roostream.warehouse.delta_table import ProgressStep
from roostream.warehouse.parquet_file import FileKey, FileRows, write_rows
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


def sample_forms(schema: Schema) -> dict[str, ColumnType]:
    """Columns of samples of `schema`. Raises SchemaError as `roostream.wire.columnar.column_types`."""
    return {**column_types(schema), **ENVELOPE}


def correction_forms(schema: Schema) -> dict[str, ColumnType]:
    """Columns of corrections of `schema`: labels before and after, and the engagements, without features."""
    plain = {name: REQUEST[name] for name in ("offset", "close_ms", "time_ms", "sample_id")} | {
        OF_SAMPLE: _ID
    }
    names = [label_column(label.name, what) for label in schema.labels for what in ("label", "label_before")]
    labels = {"item": CANDIDATE["item"], **dict.fromkeys(names, ColumnType("candidate", "float", "f4"))}
    who = {name: PLAIN[name] for name in ("user_id", "session_id", "request_id")}
    return {**plain, **labels, **who, **EVENTS}


def sample_rows(writer: Schema, records: Sequence[Record]) -> tuple[FileRows, list[DeadRecord]]:
    """(rows of samples that one schema wrote, in the records' order; records that cannot be read)."""
    decoder = Decoder(uncut_schema(writer), {writer.fingerprint: uncut_schema(writer)}.get)
    batch, rejects = decoder.decode(records)
    kept, dead = _kept(records, rejects, wire.SAMPLE)
    columns = columns_of(batch) | envelope_of([pb.Sample.FromString(record.value[2:]) for record in kept])
    rebuilt = rebuild_records(writer, columns, batch.num_candidates_R)
    raw = [None if same == (r.key, r.value) else r.value for r, same in zip(kept, rebuilt, strict=True)]
    columns["raw"] = raw_column(raw)
    return FileRows(columns=columns, forms=sample_forms(writer), counts_R=batch.num_candidates_R), dead


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
    chosen = correction_forms(writer)
    columns |= {name: column for name, column in envelope.items() if name in chosen}
    return FileRows(columns=columns, forms=chosen, counts_R=counts_R), dead


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
    """Fingerprint → records of this kind, in their order; and records of unknown schemas or other kinds.

    Raises:
        UnavailableError: schemas cannot be read now.
    """
    of: dict[int, list[Record]] = {}
    dead: list[DeadRecord] = []
    for record in records:
        if (got := wire.kind_of(record.value)) != kind:
            dead.append(DeadRecord(record, "unknown_type", f"expected a record of type {kind}, got {got}"))
            continue
        try:
            fingerprint = pb.Sample.FromString(record.value[2:]).header.schema
        except DecodeError as cause:
            dead.append(DeadRecord(record, "undecodable", f"expected a Sample: {cause}"))
            continue
        if registry(fingerprint) is None:
            error = f"unknown schema {fingerprint:016x}; register the schema that wrote the record"
            dead.append(DeadRecord(record, "unknown_schema", error))
        else:
            of.setdefault(fingerprint, []).append(record)
    return of, dead


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
    counts_M = rows.counts_R[rows_M]
    at_B = _ranges(_starts(rows.counts_R)[rows_M], counts_M)
    at = {"request": rows_M, "candidate": at_B}
    columns = {
        name: _taken(column, at[rows.forms[name].of])
        for name, column in rows.columns.items()
        if name in rows.forms
    }
    return FileRows(columns=columns, forms=rows.forms, counts_R=counts_M)


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


class Archiver:
    """Archives chosen partitions. Call `open` first; after a rejected commit `turn` has opened it again. One
    thread."""

    def __init__(
        self,
        warehouse: Warehouse,
        reader: RecordConsumer,
        topic_ids: Mapping[str, str],
        registry: Registry,
        rule: FlushPolicy,
        send_dead: SendDeadRecords,
        clock: Clock,
    ) -> None:
        """`topic_ids`: the broker's id of each topic; a topic that is deleted and created again has another
        one.

        `registry`: schemas of all writers.
        """
        self.warehouse, self.reader, self.topic_ids, self.rule = warehouse, reader, topic_ids, rule
        self.registry, self.send_dead, self.clock = registry, send_dead, clock
        self.counts = ArchiveCounts()
        self.num_buffered_bytes = 0
        self._buffered: list[Record] = []
        self._oldest_s = 0.0
        self._positions: dict[Partition, int | None] = {}
        self._pending: dict[str, _PendingFiles] = {}
        self._registered: set[int] = set()  # fingerprints of schemas that are stored in the warehouse

    def open(self) -> None:
        """Step 1.

        Raises:
            UnavailableError: the warehouse or the source is away; call again.
        """
        self.warehouse.create()
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
        """Steps 3 and 4 for all buffered records. Raises as `turn`."""
        try:
            if not self._pending:
                self._pending = self._files()
            for topic, made in list(self._pending.items()):
                self.warehouse.tables[topic].commit(made.files, progress=made.steps)
                self._committed(topic, made)
            self._forget()
        except FencedError as error:
            log.warning("%s; continuing from there", error)
            self.counts.refused += 1
            self.open()

    def _files(self) -> dict[str, _PendingFiles]:
        """Step 3: topic → its files, and the new positions of its partitions."""
        of: dict[Partition, list[Record]] = {}
        for record in self._buffered:
            of.setdefault((record.topic, record.partition), []).append(record)
        dead: list[DeadRecord] = []
        pending: dict[str, _PendingFiles] = {}
        positions = self.reader.positions()
        for partition, records in of.items():
            table = pending.setdefault(partition[0], _PendingFiles([], {}))
            table.files.extend(self._files_of(partition, records, dead))
            table.steps[self._name(partition)] = ProgressStep(
                self._positions[partition], positions[partition]
            )
        if dead:
            self.send_dead(dead)
            self.counts.dead += len(dead)
        return pending

    def _files_of(
        self, partition: Partition, records: list[Record], dead: list[DeadRecord]
    ) -> list[DataFile]:
        topic, number = partition
        out: list[DataFile] = []
        kind = wire.SAMPLE if topic == SAMPLES else wire.CORRECTION
        of_writer, unreadable = group_by_writer(records, self.registry, kind)
        dead += unreadable
        for fingerprint, of in of_writer.items():
            writer = self.registry(fingerprint)
            assert writer is not None
            rows, wrong = sample_rows(writer, of) if topic == SAMPLES else correction_rows(writer, of)
            dead += wrong
            if not len(rows.counts_R):
                continue
            if fingerprint not in self._registered:
                register(self.warehouse.store, writer)
                self._registered.add(fingerprint)
            self.warehouse.tables[topic].widen(rows.forms)
            key = partial(FileKey, table=topic, partition=number, fingerprint=fingerprint)
            for day, part in group_by_day(rows).items():
                file_key = key(day=day, topic=self.topic_ids[topic])
                out.append(write_rows(self.warehouse.store, part, file_key))
        return out

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
