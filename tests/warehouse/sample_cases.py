"""Example samples and corrections as the joiner writes them, and comparisons of batches."""

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
from tests.wire.decode_reference import make_decoder
from tests.wire.sample_builders import RICH, make_sample, parse_schema, record_of


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Return whether dtype, shape and all bits are equal, including those of NaNs."""
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and np.ascontiguousarray(a).tobytes() == np.ascontiguousarray(b).tobytes()
    )


def differing_fields(a: Any, b: Any, prefix: str = "") -> list[str]:
    """Return the names of the fields in which two batches differ."""
    out: list[str] = []
    for field in dataclasses.fields(a):
        x, y, name = getattr(a, field.name), getattr(b, field.name), prefix + field.name
        if isinstance(x, Jagged):
            out += differing_fields(x, y, name + ".")
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


def assert_same_batch(a: Batch, b: Batch) -> None:
    assert differing_fields(a, b) == []


def rich_schema() -> Schema:
    """Build a schema with every kind of feature and two labels."""
    return parse_schema(RICH)


def rich_records(schema: Schema, count: int, partition: int = 3) -> list[Record]:
    """Build random samples of one partition, in time order."""
    samples = [make_sample(schema, seed) for seed in range(count)]
    return [record_of(s, n)._replace(partition=partition) for n, s in enumerate(samples)]


def decode_records(reader: Schema, records: list[Record], *writers: Schema) -> Batch:
    """Decode records with the decoder for Kafka. No record may be rejected."""
    batch, rejects = make_decoder(reader, *writers).decode(records)
    assert not rejects, rejects
    return batch


def file_rows(writer: Schema, records: list[Record]) -> FileRows:
    """Convert records to the rows of a file, without shortened lists."""
    batch = decode_records(uncut_schema(writer), records)
    return FileRows(
        columns=columns_of(batch), column_types=column_types(writer), counts_R=batch.num_candidates_R
    )


def file_key(writer: Schema, partition: int = 3, table: str = "samples") -> FileKey:
    return FileKey(table=table, day=date(1970, 1, 1), partition=partition, fingerprint=writer.fingerprint)


def with_joiner_keys(records: list[Record]) -> list[Record]:
    """Give records the keys that the joiner gives them."""
    out = []
    for record in records:
        header = pb.Sample.FromString(record.value[2:]).header
        out.append(record._replace(key=key_bytes(header.user_id, header.session_id, header.request_id)))
    return out


def make_correction(
    record: Record, item: int, before: float, after: float, *, offset: int, event: int, after_ms: int = 5
) -> Record:
    """Build a correction without features, as the joiner writes it. It changes the label of one item."""
    sample = pb.Sample.FromString(record.value[2:])
    header = sample.header
    samples = pb.Sample(
        header=header, sample_id=event, close_ms=sample.close_ms, item_ids=[item], untrainable=True
    )
    samples.labels.extend([after, 0.0])
    samples.labels_before.extend([before, 0.0])
    samples.event_ids.append(event)
    samples.event_candidates.append(0)
    samples.event_actions.append(0)
    samples.event_values.append(1.0)
    samples.event_times.append(header.time_ms + after_ms)
    samples.actions.append("click")
    return Record(
        "corrections", record.partition, offset, 99, record.key, wire.encode(wire.CORRECTION, samples)
    )
