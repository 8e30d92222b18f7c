"""What does a sample cost in the warehouse: at the archiver, and when its day is sealed?"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.common import samples as data
from benchmarks.harness.benchmark import Benchmark, Row, Subject, TurnResult, WholeTurn, Work
from roostream.runtime.checkpoint_store import FileStore
from roostream.runtime.clock import SystemClock
from roostream.runtime.kafka.consumer import MemoryConsumer
from roostream.schema.ids import key_bytes
from roostream.warehouse.archive import Archiver, DeadRecord, FlushPolicy, sample_types
from roostream.warehouse.compact import Compactor
from roostream.warehouse.config import CompactorConfig
from roostream.warehouse.data_file import day_bounds_ms, day_of
from roostream.warehouse.parquet_file import writer_options
from roostream.warehouse.warehouse import Warehouse
from roostream.wire import records as wire
from roostream.wire.records import Record

_CANDIDATES, _NUM_USERS = 20, 5_000
_SAMPLES, _SAMPLES_OF_A_DAY, _FILES_OF_A_DAY = 4_096, 65_536, 32
_MERGE_BYTES = 8 << 20  # of the seal in passes: fewer than the row groups of all files
_TOPICS = {"samples": "topic-1", "corrections": "topic-2"}
_DAY_MS = 86_400_000


def _records(count: int, first: int = 0, days_later: int = 0) -> list[Record]:
    """Samples of one partition and one day, in the order of their closes, by users who come again."""
    schema, rng = data.demo_schema(), np.random.default_rng(0)
    users = rng.integers(_NUM_USERS, size=count).tolist()
    samples = [data.sample(schema, n, candidates=_CANDIDATES) for n in range(min(count, 1024))]
    start_ms = day_bounds_ms(day_of(data.T0_MS))[0] + days_later * _DAY_MS
    out = []
    for n, user in enumerate(users):
        sample = samples[n % len(samples)]
        sample.header.request_id, sample.header.user_id = f"r{first + n}", data.FIRST_USER + user
        sample.sample_id, sample.close_ms = first + n + 1, start_ms + n * _DAY_MS // (2 * count)
        key = key_bytes(sample.header.user_id, 0, sample.header.request_id)
        value = wire.encode(wire.SAMPLE, sample)
        out.append(Record("samples", 0, first + n, sample.close_ms, key, value))
    return out


def _archive(folder: Path, records: Sequence[Record], per_file: int) -> None:
    """Store the records in files of `per_file`."""
    schema, dead = data.demo_schema(), list[DeadRecord]()
    consumer = MemoryConsumer([("samples", 0), ("corrections", 0)], records)
    archiver = Archiver(
        Warehouse(folder),
        consumer,
        _TOPICS,
        lambda: _TOPICS,
        {schema.fingerprint: schema}.get,
        FileStore(folder / "memory"),
        FlushPolicy(bytes=1 << 30, after_ms=_DAY_MS),
        dead.extend,
        SystemClock(),
    )
    archiver.open()
    while not consumer.at_end():
        archiver.turn(0.0, max_records=per_file)
        archiver.flush()
    if dead:
        raise RuntimeError(f"expected no record that cannot be stored, got {dead[0]}")


@contextlib.contextmanager
def archived(count: int) -> Iterator[WholeTurn]:
    """Records → a committed file of a new table; units: samples."""
    records = _records(count)

    def turn() -> TurnResult:
        with tempfile.TemporaryDirectory() as folder:
            _archive(Path(folder), records, count)
        return TurnResult(count)

    yield WholeTurn(turn, warm_up=turn)


@contextlib.contextmanager
def _day(count: int, files: int) -> Iterator[Path]:
    """A warehouse with an unsealed day of `files` files, and a part of a later day."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "unsealed"
        _archive(folder, _records(count) + _records(count // 8, count, days_later=2), count // files)
        yield folder


@contextlib.contextmanager
def sealed(count: int, files: int, merge_bytes: int) -> Iterator[WholeTurn]:
    """The day's files → its sealed files, in a copy of the warehouse made of links; units: samples."""
    with _day(count, files) as unsealed:
        copies = itertools.count()

        def turn() -> TurnResult:
            folder = unsealed.parent / str(next(copies))
            shutil.copytree(unsealed, folder, copy_function=os.link)
            settings: dict[str, Any] = {
                "warehouse": str(folder),
                "seal_after_ms": 0,
                "merge_bytes": merge_bytes,
            }
            compactor = Compactor(Warehouse(folder), CompactorConfig(**settings), SystemClock())
            (seal,) = compactor.due()
            rows = sum(file.rows for file in seal.files)
            if not compactor.seal(seal) or compactor.counts.rows != rows != 0:
                raise RuntimeError(f"expected {rows} sealed samples, got {compactor.counts}")
            shutil.rmtree(folder)
            return TurnResult(rows)

        yield WholeTurn(turn)


@contextlib.contextmanager
def written(count: int) -> Iterator[Work]:
    """The limit of the archiver: Arrow writes the same table once more."""
    with tempfile.TemporaryDirectory() as name:
        _archive(Path(name), _records(count), count)
        table = pa.concat_tables(map(pq.read_table, _files(Path(name))))
        yield Work(lambda: _write(table), count)


@contextlib.contextmanager
def sorted_by_arrow(count: int, files: int) -> Iterator[WholeTurn]:
    """The limit of a seal: Arrow reads all files of the day into memory, sorts and writes them."""
    with _day(count, files) as unsealed:
        paths = [path for path in _files(unsealed) if str(day_of(data.T0_MS)) in str(path)]

        def turn() -> TurnResult:
            table = pa.concat_tables([pq.read_table(path, use_threads=False) for path in paths])
            _write(
                table.sort_by(
                    [(name, "ascending") for name in ("user_id", "session_id", "time_ms", "offset")]
                )
            )
            return TurnResult(table.num_rows)

        yield WholeTurn(turn)


def _files(warehouse: Path) -> list[Path]:
    return sorted(warehouse.glob("samples/[0-9]*/**/*.parquet"))


def _write(table: pa.Table) -> None:
    out = pa.BufferOutputStream()
    pq.write_table(table, out, row_group_size=4096, **writer_options(sample_types(data.demo_schema())))


_HERE = "benchmarks.archive"

BENCHMARK = Benchmark(
    name="archive",
    summary="What does a sample cost in the warehouse, at the archiver and when its day is sealed?",
    rows=(
        Row(
            name=f"{_SAMPLES:,} samples of {_CANDIDATES} candidates are archived",
            unit="samples",
            shows="cost",
            clock="cpu",
            subjects=(
                Subject("the archiver", f"{_HERE}:archived", (_SAMPLES,)),
                Subject("Arrow writes the same table", f"{_HERE}:written", (_SAMPLES,), "limit"),
            ),
        ),
        Row(
            name=f"a day of {_SAMPLES_OF_A_DAY:,} samples in {_FILES_OF_A_DAY} files is sealed",
            unit="samples",
            shows="cost",
            clock="cpu",
            subjects=(
                Subject("the compactor", f"{_HERE}:sealed", (_SAMPLES_OF_A_DAY, _FILES_OF_A_DAY, 128 << 20)),
                Subject(
                    "in passes",
                    f"{_HERE}:sealed",
                    (_SAMPLES_OF_A_DAY, _FILES_OF_A_DAY, _MERGE_BYTES),
                    "stage",
                ),
                Subject(
                    "Arrow sorts all in memory",
                    f"{_HERE}:sorted_by_arrow",
                    (_SAMPLES_OF_A_DAY, _FILES_OF_A_DAY),
                    "limit",
                ),
            ),
        ),
    ),
    rounds=2,
    interpretation=f"""\
Both programs without Kafka and without an object store: records in memory, the table in a folder. Samples are
those of the demo's schema, of {_NUM_USERS:,} users. The archiver decodes each record, rebuilds it from its
columns to prove that nothing is lost, sorts the samples by user, and commits a file to the Delta table. A
seal reads the day's files, keeps each sample once, and writes them ordered by user. It merges 128 MB at once;
*in passes* shows a day of many more files: pieces of {_MERGE_BYTES >> 20} MB, so that the files are merged to
longer ones first. `roostream plan` uses the figures of the archiver and of the passes.""",
)
