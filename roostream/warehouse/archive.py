"""Records to rows and files: what an archiver makes of what it read, without Kafka and without a table.

A record is decoded with the schema that wrote it, whole, by the decoder that trainers use; a file's rows are of one day of close,
one partition and one writer, and lie by user, since what a user's requests share then lies together (RecD's clustering).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import date
from typing import NamedTuple

import numpy as np
from google.protobuf.message import DecodeError

from roostream.schema.ids import key_bytes, sample_id, signed
from roostream.schema.schema import Registry, Schema
from roostream.warehouse.data_file import day_of
from roostream.warehouse.file_writer import FileRows
from roostream.warehouse.rebuild import rebuilt
from roostream.warehouse.record_columns import ENVELOPE, EVENTS, PLAIN, envelope_of, raw_column
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.columnar import (
    CANDIDATE,
    REQUEST,
    FlatColumn,
    Form,
    columns_of,
    forms,
    label_column,
    whole,
)
from roostream.wire.decode import Decoder, Reject
from roostream.wire.records import Record

SAMPLES, CORRECTIONS = "samples", "corrections"
"""The tables: each of the topic of its name."""
OF_SAMPLE = "of_sample"
"""Column of a correction: the id of the sample that it corrects."""
_ID = Form("request", "number", "i8")


class Dead(NamedTuple):
    """A record that makes no row."""

    record: Record
    reason: str  # one of roostream.wire.records.REASONS
    error: str


def sample_forms(schema: Schema) -> dict[str, Form]:
    """Columns of samples of `schema`. Raises SchemaError as `roostream.wire.columnar.forms`."""
    return {**forms(schema), **ENVELOPE}


def correction_forms(schema: Schema) -> dict[str, Form]:
    """Columns of corrections of `schema`: labels before and after, and the engagement, without features."""
    plain = {name: REQUEST[name] for name in ("offset", "close_ms", "time_ms", "sample_id")} | {
        OF_SAMPLE: _ID
    }
    names = [label_column(label.name, what) for label in schema.labels for what in ("label", "label_before")]
    labels = {"item": CANDIDATE["item"], **dict.fromkeys(names, Form("candidate", "float", "f4"))}
    who = {name: PLAIN[name] for name in ("user_id", "session_id", "request_id")}
    return {**plain, **labels, **who, **EVENTS}


def sample_rows(writer: Schema, records: Sequence[Record]) -> tuple[FileRows, list[Dead]]:
    """FileRows of one writer's samples, in the records' order, and what can't be read."""
    decoder = Decoder(whole(writer), {writer.fingerprint: whole(writer)}.get)
    batch, rejects = decoder.decode(records)
    kept, dead = _kept(records, rejects, wire.SAMPLE)
    columns = columns_of(batch) | envelope_of([pb.Sample.FromString(record.value[2:]) for record in kept])
    made = rebuilt(writer, columns, batch.num_candidates_R)
    raw = [None if same == (r.key, r.value) else r.value for r, same in zip(kept, made, strict=True)]
    columns["raw"] = raw_column(raw)
    return FileRows(columns=columns, forms=sample_forms(writer), counts_R=batch.num_candidates_R), dead


def correction_rows(writer: Schema, records: Sequence[Record]) -> tuple[FileRows, list[Dead]]:
    """FileRows of one writer's corrections, trainable or not, in the records' order, and what can't be read."""
    decoder = Decoder(whole(writer), {writer.fingerprint: whole(writer)}.get)
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
    for what, given in (
        ("label", [c.labels for c in found]),
        ("label_before", [c.labels_before for c in found]),
    ):
        flat = [x for c, n in zip(given, counts_R.tolist(), strict=True) for x in (c or [np.nan] * (n * t))]
        label_BT = np.array(flat, dtype=np.float32).reshape(-1, t)
        for i, label in enumerate(writer.labels):
            columns[label_column(label.name, what)] = FlatColumn(np.ascontiguousarray(label_BT[:, i]))
    chosen = correction_forms(writer)
    columns |= {name: column for name, column in envelope.items() if name in chosen}
    return FileRows(columns=columns, forms=chosen, counts_R=counts_R), dead


def _kept(records: Sequence[Record], rejects: Iterable[Reject], kind: int) -> tuple[list[Record], list[Dead]]:
    dead = {r.index: Dead(records[r.index], r.reason, r.error) for r in rejects}
    return [
        record for n, record in enumerate(records) if n not in dead and wire.kind_of(record.value) == kind
    ], [*dead.values()]


def _sample_of(correction: pb.Sample) -> int:
    """The id of the sample that it corrects: its own contains its engagement's."""
    header = correction.header
    return sample_id(key_bytes(header.user_id, header.session_id, header.request_id), header.request_id)


def by_writer(
    records: Iterable[Record], registry: Registry, kind: int
) -> tuple[dict[int, list[Record]], list[Dead]]:
    """Fingerprint → records of this kind, in their order, and those that name no schema that is known.

    Raises:
        UnavailableError: schemas can't be read now.
    """
    of: dict[int, list[Record]] = {}
    dead: list[Dead] = []
    for record in records:
        if wire.kind_of(record.value) != kind:
            dead.append(
                Dead(
                    record,
                    "unknown_type",
                    f"expected a record of type {kind}, got {wire.kind_of(record.value)}",
                )
            )
            continue
        try:
            fingerprint = pb.Sample.FromString(record.value[2:]).header.schema
        except DecodeError as error:
            dead.append(Dead(record, "undecodable", f"expected a Sample: {error}"))
            continue
        if registry(fingerprint) is None:
            dead.append(
                Dead(
                    record,
                    "unknown_schema",
                    f"unknown schema {fingerprint:016x}; register the schema that wrote it",
                )
            )
        else:
            of.setdefault(fingerprint, []).append(record)
    return of, dead


def by_day(rows: FileRows) -> dict[date, FileRows]:
    """FileRows by the day of their close, each day's by user."""
    close_ms_R = rows.columns["close_ms"].values
    days = np.array([day_of(int(ms)).toordinal() for ms in close_ms_R], dtype=np.int64)
    return {
        date.fromordinal(int(day)): by_user(take(rows, np.flatnonzero(days == day)))
        for day in np.unique(days)
    }


def by_user(rows: FileRows) -> FileRows:
    """The same rows by (user, time), strangers by session: what a user's requests share lies together."""
    order = np.lexsort([rows.columns[name].values for name in ("offset", "time_ms", "session_id", "user_id")])
    return take(rows, order)


def take(rows: FileRows, rows_M: np.ndarray) -> FileRows:
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
