"""How fast do samples at rest become batches?

Reads a file of samples into batches, with features as columns and as a map.
"""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Iterator, Mapping
from datetime import date
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.common import rows_at_rest
from benchmarks.common.dataset_paths import EBNERD, MIND, absent
from benchmarks.harness.benchmark import Benchmark, Row, Subject, SubjectResult, Work
from roostream.runtime.checkpoint_store import FileStore
from roostream.warehouse.column_popularity import interleave_by_hit_rate
from roostream.warehouse.data_file import DataFile
from roostream.warehouse.file_reader import ByteRange, SampleFile, merged
from roostream.wire.columnar import project_schema
from roostream.wire.decode import Decoder

_POLL = 512


@contextlib.contextmanager
def read(
    name: str, history: int, rows: str, order: str, share: float = 1.0, users: int = 1 << 30
) -> Iterator[Work]:
    """File → batch, row group by row group, of this share of the features; units are impressions."""
    log = rows_at_rest.log(name, history, users)
    schema = log.schema
    reader = schema if share == 1.0 else project_schema(schema, rows_at_rest.sampled(schema, share))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "samples" / "x.parquet"
        path.parent.mkdir()
        path.write_bytes(rows_at_rest.file_of(log, (name, history, users), rows, order))
        count = log.batch.num_requests if rows == "requests" else log.batch.num_candidates
        opened = SampleFile(FileStore(folder), "samples", _file(path, count, schema.fingerprint))

        def step() -> None:
            opened.source.num_requests = opened.source.num_bytes = 0
            for group in range(len(opened.rows_of_groups)):
                opened.read(schema, reader, [group])

        def figures() -> dict[str, float]:
            return {
                "reads a row group": opened.source.num_requests / len(opened.rows_of_groups),
                "bytes read an impression": opened.source.num_bytes / log.batch.num_candidates,
            }

        yield Work(step, log.batch.num_candidates, figures)


def _file(path: Path, rows: int, fingerprint: int) -> DataFile:
    """The log entry of a file."""
    return DataFile(
        path=path.name,
        bytes=path.stat().st_size,
        rows=rows,
        candidates=0,
        day=date(1970, 1, 1),
        partition=0,
        fingerprint=fingerprint,
        first_offset=0,
        last_offset=0,
        first_close_ms=0,
        last_close_ms=0,
    )


@contextlib.contextmanager
def decoded(name: str, history: int, users: int = 1 << 30) -> Iterator[Work]:
    """The wire's decoder on the same samples, in polls; units are impressions."""
    log = rows_at_rest.log(name, history, users)
    decoder = Decoder(log.schema, {log.schema.fingerprint: log.schema}.get)

    def step() -> None:
        for at in range(0, len(log.records), _POLL):
            decoder.decode(log.records[at : at + _POLL])

    yield Work(step, log.batch.num_candidates)


_WIDE, _WANTED, _COVERAGE, _ROWS = 1000, 100, 0.45, 4096


@contextlib.contextmanager
def flattened(how: str, features: int = _WIDE, rows: int = _ROWS) -> Iterator[Work]:
    """Read a tenth of many floats, present in 45 % of the rows, into a matrix: from a column each, or from
    one map column."""
    rng = np.random.default_rng(0)
    values = rng.normal(size=(rows, features)).astype(np.float32)
    present = rng.random((rows, features)) < _COVERAGE
    wanted = np.sort(rng.choice(features, max(features * _WANTED // _WIDE, 1), replace=False))
    table = _columns(values, present) if how == "columns" else _map(values, present)
    out = pa.BufferOutputStream()
    split = {
        "column_encoding": dict.fromkeys(table.column_names, "BYTE_STREAM_SPLIT"),
        "use_dictionary": False,
    }
    pq.write_table(table, out, compression="zstd", compression_level=3, **(split if how == "columns" else {}))
    data = out.getvalue()
    read = _of_columns if how == "columns" else _of_map
    expected = np.where(present, values, np.float32(np.nan))[:, wanted]
    assert np.array_equal(read(data, wanted, features), expected, equal_nan=True)
    yield Work(lambda: read(data, wanted, features), rows, lambda: {"bytes a row": len(data) / rows})


def _columns(values: np.ndarray, present: np.ndarray) -> pa.Table:
    absent_value = np.float32(np.nan)
    return pa.table(
        {f"f{n}": np.where(present[:, n], values[:, n], absent_value) for n in range(values.shape[1])}
    )


def _map(values: np.ndarray, present: np.ndarray) -> pa.Table:
    offsets = np.concatenate([[0], np.cumsum(present.sum(axis=1))]).astype(np.int32)
    keys = np.nonzero(present)[1].astype(np.int32)
    return pa.table(
        {"features": pa.MapArray.from_arrays(pa.array(offsets), pa.array(keys), pa.array(values[present]))}
    )


def _of_columns(data: pa.Buffer, wanted: np.ndarray, features: int) -> np.ndarray:
    table = pq.read_table(pa.BufferReader(data), columns=[f"f{n}" for n in wanted], use_threads=False)
    return np.stack([column.to_numpy() for column in table.columns], axis=1)


def _of_map(data: pa.Buffer, wanted: np.ndarray, features: int) -> np.ndarray:
    column = pq.read_table(pa.BufferReader(data), use_threads=False)["features"].combine_chunks()
    array = column.chunk(0) if isinstance(column, pa.ChunkedArray) else column
    column_of = np.full(features, -1)
    column_of[wanted] = np.arange(len(wanted))
    to = column_of[array.keys.to_numpy()]
    row = np.repeat(np.arange(len(array)), np.diff(array.offsets.to_numpy()))
    out = np.full((len(array), len(wanted)), np.nan, dtype=np.float32)
    out[row[to >= 0], to[to >= 0]] = array.items.to_numpy()[to >= 0]
    return out


_FLOAT_BYTES, _LIST_BYTES, _FLOATS, _JOBS = 2 << 10, 35 << 10, 700, 40


@functools.cache
def _odds(exponent: float) -> np.ndarray:
    """The probability that a job reads each of a thousand features: a power of its rank, a tenth on
    average."""
    weights, low, high = np.arange(1, _WIDE + 1) ** -exponent, 0.0, 1e7
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if np.minimum(weights * middle, 0.98).mean() < 0.1 else (low, middle)
    return np.random.default_rng(99).permutation(np.minimum(weights * low, 0.98))


@functools.cache
def _jobs(count: int, seed: int, exponent: float) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [np.flatnonzero(rng.random(_WIDE) < _odds(exponent)) for _ in range(count)]


@contextlib.contextmanager
def planned(order: str, over_read: float, exponent: float) -> Iterator[Work]:
    """Plan the byte ranges of a row group for unseen jobs, with columns in the compactor's order, by hit rate
    alone, or in random order; units are jobs."""
    sizes = np.where(np.random.default_rng(3).permutation(_WIDE) < _FLOATS, _FLOAT_BYTES, _LIST_BYTES)
    rates = np.bincount(np.concatenate(_jobs(_JOBS, 1, exponent)), minlength=_WIDE)
    positions = {
        "hash": np.random.default_rng(5).permutation(_WIDE),
        "hit rate": np.argsort(-rates, kind="stable"),
        "ours": np.array(interleave_by_hit_rate(sizes.tolist(), rates.tolist())),
    }[order]
    starts = np.zeros(_WIDE, dtype=np.int64)
    starts[positions] = np.cumsum(sizes[positions]) - sizes[positions]
    needed = [
        [ByteRange(int(starts[f]), int(starts[f] + sizes[f])) for f in job]
        for job in _jobs(_JOBS, 2, exponent)
    ]
    plans = [merged(ranges, over_read) for ranges in needed]
    needed_bytes = sum(end - start for ranges in needed for start, end in ranges)
    read_bytes = sum(end - start for plan in plans for start, end in plan)
    figures = {
        "reads a row group": sum(map(len, plans)) / len(plans),
        "bytes read of those needed": read_bytes / needed_bytes,
    }
    yield Work(lambda: [merged(ranges, over_read) for ranges in needed], len(needed), lambda: figures)


_HERE = "benchmarks.warehouse_read"


def _rows(name: str, history: int, where: str, skipped: str) -> Row:
    return Row(
        name=f"{name}, {where}: a batch of all features",
        unit="impressions",
        clock="cpu",
        subjects=(
            Subject("requests, by user", f"{_HERE}:read", (name, history, "requests", "user")),
            Subject("requests, in time order", f"{_HERE}:read", (name, history, "requests", "time"), "peer"),
            Subject("impressions, by user", f"{_HERE}:read", (name, history, "impressions", "user"), "peer"),
            Subject(
                "impressions, mixed within the hour",
                f"{_HERE}:read",
                (name, history, "impressions", "mixed"),
                "peer",
            ),
        ),
        skipped=skipped,
    )


def _wire(name: str, history: int, where: str, skipped: str) -> Row:
    return Row(
        name=f"{name}, {where}: a batch from the file or from the wire",
        unit="impressions",
        clock="cpu",
        subjects=(
            Subject("from the file", f"{_HERE}:read", (name, history, "requests", "user")),
            Subject("from the wire", f"{_HERE}:decoded", (name, history), "peer"),
        ),
        skipped=skipped,
    )


def _projected(name: str, history: int, where: str, skipped: str) -> Row:
    of = (name, history, "requests", "user")
    return Row(
        name=f"{name}, {where}: some of the features",
        unit="impressions",
        clock="cpu",
        subjects=(
            Subject("a tenth", f"{_HERE}:read", (*of, 0.1)),
            Subject("30 %, the history among them", f"{_HERE}:read", (*of, 0.3), "peer"),
            Subject("all", f"{_HERE}:read", (*of, 1.0), "peer"),
        ),
        skipped=skipped,
    )


def _reads_saved(results: Mapping[str, SubjectResult]) -> dict[str, float]:
    reads = {name: one.figures["reads a row group"] for name, one in results.items()}
    ours = reads["wide apart, by hit rate, merged at 8 %"]
    return {
        "reads, in no order and merged / ours": reads["in no order, merged at 8 %"] / ours,
        "reads, in no order and apart / ours": reads["in no order, apart"] / ours,
    }


def _planned(law: str, exponent: float) -> Row:
    ways = (
        ("wide apart, by hit rate, merged at 8 %", "ours", 0.08),
        ("by hit rate, merged at 8 %", "hit rate", 0.08),
        ("by hit rate, apart", "hit rate", 0.0),
        ("in no order, merged at 8 %", "hash", 0.08),
        ("in no order, apart", "hash", 0.0),
    )
    return Row(
        name=f"a tenth of 1,000 columns, as jobs ask: {law}",
        unit="jobs",
        clock="cpu",
        subjects=tuple(
            Subject(way, f"{_HERE}:planned", (order, over_read, exponent), "peer" if n else "ours")
            for n, (way, order, over_read) in enumerate(ways)
        ),
        derives=_reads_saved,
    )


_LOGS = (
    ("EB-NeRD", 50, "histories of up to 50", absent(EBNERD)),
    ("EB-NeRD", 500, "histories of up to 500", absent(EBNERD)),
    ("MIND", 50, "its first 2,000 requests", absent(MIND)),
)

BENCHMARK = Benchmark(
    name="warehouse-read",
    summary="How fast do samples at rest become batches; what do order, projection and merged reads save?",
    rows=(
        *(make(*of) for make in (_rows, _wire, _projected) for of in _LOGS),
        Row(
            name="100 of 1,000 floats, present in 45 % of the rows",
            unit="rows",
            clock="cpu",
            subjects=(
                Subject("a column each", f"{_HERE}:flattened", ("columns",)),
                Subject("one map column", f"{_HERE}:flattened", ("map",), "peer"),
            ),
        ),
        _planned("39 % of the features serve 80 % of what is read", 1.0),
        _planned("18 % of the features serve 80 % of what is read", 1.5),
    ),
    interpretation="""\
From a file in the page cache to the batch that is trained, with checksums, one thread, row group by row
group; the wire's decoder does the same for the samples' records. The figures beside the speed are the reads
of a row group, merged to at most 8 % more bytes than needed, and the bytes read an impression. A tenth of
the features omits the history, which has most of the bytes. The last three rows use generated data: floats
as columns against one map column (DPP's feature flattening; equal matrices are checked), and the reads of a
job in a row group of 700 floats of 2 KB and 300 lists of 35 KB. There the columns are in the order learned
from 40 other jobs or in random order, the speed is that of planning, and the figures are the result.""",
    rounds=3,
)
