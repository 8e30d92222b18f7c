"""Samples as the joiner makes them, decoded, and what a file of them is held against."""

from __future__ import annotations

import dataclasses
from datetime import date
from typing import Any

import numpy as np

from roostream.schema.ids import key_bytes
from roostream.schema.schema import Schema
from roostream.warehouse.parquet_file import FileKey, FileRows
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.batch import Batch
from roostream.wire.columnar import column_types, columns_of, uncut_schema
from roostream.wire.jagged import Jagged
from roostream.wire.records import Record
from tests.wire.decode_reference import decoder
from tests.wire.sample_builders import RICH, make_sample, parse_schema, record_of


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal in type, shape and every bit, those of NaNs too."""
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and np.ascontiguousarray(a).tobytes() == np.ascontiguousarray(b).tobytes()
    )


def different(a: Any, b: Any, place: str = "") -> list[str]:
    """Where two batches differ, by field."""
    out: list[str] = []
    for field in dataclasses.fields(a):
        x, y, name = getattr(a, field.name), getattr(b, field.name), place + field.name
        if isinstance(x, Jagged):
            out += different(x, y, name + ".")
        elif isinstance(x, dict):
            out += [
                f"{name}[{key}]"
                for key in x.keys() | y.keys()
                if key not in x or key not in y or not same_bits(x[key], y[key])
            ]
        elif isinstance(x, np.ndarray):
            out += [] if isinstance(y, np.ndarray) and same_bits(x, y) else [name]
        elif x != y:
            out.append(name)
    return out


def same_batch(a: Batch, b: Batch) -> None:
    assert different(a, b) == []


def rich_schema() -> Schema:
    """Every kind of feature, two labels."""
    return parse_schema(RICH)


def rich_records(schema: Schema, count: int, partition: int = 3) -> list[Record]:
    """Samples of one partition, each a little later than the one before."""
    made = [make_sample(schema, seed) for seed in range(count)]
    return [record_of(s, n)._replace(partition=partition) for n, s in enumerate(made)]


def decoded(reader: Schema, records: list[Record], *writers: Schema) -> Batch:
    """What the wire's decoder makes of them; none may be refused."""
    batch, rejects = decoder(reader, *writers).decode(records)
    assert not rejects, rejects
    return batch


def rows_of(writer: Schema, records: list[Record]) -> FileRows:
    """Their columns, whole."""
    batch = decoded(uncut_schema(writer), records)
    return FileRows(
        columns=columns_of(batch), column_types=column_types(writer), counts_R=batch.num_candidates_R
    )


def place_of(writer: Schema, partition: int = 3, table: str = "samples") -> FileKey:
    return FileKey(table=table, day=date(1970, 1, 1), partition=partition, fingerprint=writer.fingerprint)


def keyed(records: list[Record]) -> list[Record]:
    """As the joiner keys them."""
    out = []
    for record in records:
        header = pb.Sample.FromString(record.value[2:]).header
        out.append(record._replace(key=key_bytes(header.user_id, header.session_id, header.request_id)))
    return out


def a_correction(
    record: Record, item: int, before: float, after: float, *, offset: int, event: int
) -> Record:
    """A correction without features, as the joiner writes it: the labels of one item change."""
    sample = pb.Sample.FromString(record.value[2:])
    header = sample.header
    made = pb.Sample(
        header=header, sample_id=event, close_ms=sample.close_ms, item_ids=[item], untrainable=True
    )
    made.labels.extend([after, 0.0])
    made.labels_before.extend([before, 0.0])
    made.event_ids.append(event)
    made.event_candidates.append(0)
    made.event_actions.append(0)
    made.event_values.append(1.0)
    made.event_times.append(header.time_ms + 5)
    made.actions.append("click")
    return Record("corrections", record.partition, offset, 99, record.key, wire.encode(wire.CORRECTION, made))
