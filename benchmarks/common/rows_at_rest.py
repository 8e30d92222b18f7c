"""Samples of a log as records of a Parquet file: requests or impressions, in a chosen order."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.common.public_logs import samples_of
from benchmarks.harness.fixture_cache import cached_bytes
from roostream.schema.schema import Schema
from roostream.warehouse import parquet_file
from roostream.warehouse.parquet_file import FOOTER_KEY, FORMAT
from roostream.wire.batch import Batch
from roostream.wire.columnar import column_types, columns_of, uncut_schema
from roostream.wire.decode import Decoder
from roostream.wire.records import Record

_HOUR_MS, _DAY_MS = 3_600_000, 86_400_000
_ALL = 1 << 30
COUNTERS = ("clicks", "views", "expected", "ctr")


class Log(NamedTuple):
    """All of it as one batch, and as the records that it came from."""

    schema: Schema
    records: list[Record]
    batch: Batch


@functools.cache
def log(name: str, history: int, users: int = _ALL) -> Log:
    """`name`: EB-NeRD or MIND; MIND's histories are what its lines have."""
    schema, records = samples_of(name, users, history)
    batch, rejects = Decoder(uncut_schema(schema), {schema.fingerprint: schema}.get).decode(records)
    assert not rejects, rejects[0]
    return Log(schema, records, batch)


def without_counters(its: Log) -> Log:
    """Of a candidate's floats those that count are left out: noise that hides what rows share."""
    kept = tuple(f for f in its.schema.nro if not f.name.startswith(COUNTERS))
    schema = dataclasses.replace(its.schema, nro=kept, transforms=())
    batch, _ = Decoder(uncut_schema(schema), {its.schema.fingerprint: its.schema}.get).decode(its.records)
    return Log(schema, its.records, batch)


def ordered(its: Log, rows: str, order: str) -> Iterator[Batch]:
    """Row group by row group. `rows`: requests or impressions. `order`: time, user, day: by user within the
    day, or mixed: shuffled within each hour, as dense traffic interleaves what users do."""
    batch = its.batch
    user_R = batch.ro_lists.values_of("user")
    time_R = batch.time_ms_R
    keys_R = {"time": [time_R], "day": [time_R, user_R, batch.close_ms_R // _DAY_MS]}.get(
        order, [time_R, user_R]
    )
    if rows == "requests":
        at_R = np.lexsort(keys_R)
        for piece in _pieces(at_R, parquet_file.ROWS_OF_GROUP):
            yield batch.take_requests(piece)
        return
    index_B = batch.request_index_B
    place_B = np.arange(len(index_B))
    keys = [key[index_B] for key in keys_R]
    if order == "mixed":
        keys = [np.random.default_rng(0).random(len(index_B)), time_R[index_B] // _HOUR_MS]
    for at_B in _pieces(np.lexsort([place_B, *keys]), parquet_file.ROWS_OF_GROUP * 11):
        yield batch.take(index_B[at_B], at_B, np.arange(len(at_B)), np.ones(len(at_B), dtype=np.int32))


def _pieces(at: np.ndarray, size: int) -> list[np.ndarray]:
    return [at[n : n + size] for n in range(0, len(at), size)]


def written(pieces: Iterator[Batch], schema: Schema, encoding: str = "ours") -> bytes:
    """The file: a row group a piece. `encoding`: ours, or what pyarrow takes by itself (dictionaries for
    all)."""
    chosen = column_types(schema)
    names = parquet_file.ordered(chosen)
    options: dict[str, Any] = parquet_file.writer_options(chosen)
    if encoding == "pyarrow":
        options = {"compression": "zstd", "compression_level": 3}
    out, said = pa.BufferOutputStream(), {FOOTER_KEY: b'{"format": %d}' % FORMAT}
    with pq.ParquetWriter(
        out, parquet_file.arrow_schema(chosen, names).with_metadata(said), **options
    ) as writer:
        for piece in pieces:
            table = parquet_file.to_arrow(columns_of(piece), chosen, names, piece.num_candidates_R)
            writer.write_table(table.replace_schema_metadata(said), row_group_size=len(table))
    return out.getvalue().to_pybytes()


def file_of(its: Log, key: tuple[str, int, int], rows: str, order: str) -> bytes:
    """`written`, in our encodings; `key`: what `log` was asked."""
    name = "-".join(map(str, (*key, rows, order)))
    return cached_bytes(name, lambda: written(ordered(its, rows, order), its.schema))


def sampled(schema: Schema, share: float) -> frozenset[str]:
    """So many of the features, the same for the same share; at a tenth without lists of requests, which are
    most of the bytes."""
    features = [
        f.name for f in (*schema.ro, *schema.nro) if share > 0.15 or not (f.is_list and f in schema.ro)
    ]
    count = max(round(share * len((*schema.ro, *schema.nro))), 1)
    chosen = np.random.default_rng(1).choice(len(features), size=min(count, len(features)), replace=False)
    found = {features[n] for n in chosen}
    return frozenset(found | {"history"} if share > 0.15 else found)
