"""What do reader programs deliver, and does training wait when they are slow?

Reads a warehouse session in this process and through `reader` programs, for a trainer that only counts or
sleeps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
import time
from collections.abc import Iterator
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import psutil
import xxhash

from benchmarks.common import samples as data
from benchmarks.harness.benchmark import Benchmark, Role, Row, Subject, TurnResult, WholeTurn
from benchmarks.harness.fixture_cache import cached_bytes, cached_folder
from infra.home import Home
from infra.process_pool import ProcessPool
from roostream.cli.train.offline_readers import OfflineReaders, reader_programs
from roostream.runtime.clock import SystemClock
from roostream.runtime.kafka.topics import SAMPLES, all_partitions
from roostream.runtime.work_unit import TableInput
from roostream.schema.registry import register
from roostream.warehouse.archive import sample_rows
from roostream.warehouse.data_file import day_of
from roostream.warehouse.delta_table import ProgressStep
from roostream.warehouse.parquet_file import FileKey, FileRows, write_rows
from roostream.warehouse.readers.config import ReaderCountConfig, ReadersConfig
from roostream.warehouse.readers.remote_rows import RemoteSessionOpener
from roostream.warehouse.sessions.sample_table import SampleTable
from roostream.warehouse.sessions.session import SessionSpec
from roostream.warehouse.warehouse import Warehouse
from roostream.wire import records as wire
from roostream.wire.batch import Batch
from roostream.wire.columnar import FlatColumn
from roostream.wire.records import Record
from trainer.control.reader_master import ReaderMaster
from trainer.sessions.session_source import SessionSource, local_rows, open_session

_PARTITIONS, _CANDIDATES, _KINDS = 4, 20, 256
_DAY_MS = 86_400_000
_BATCH, _POLL_S = 512, 0.5
_SILENT_S = 60.0


def make_table(folder: Path, files: int, rows: int) -> None:
    """Write sealed files of `rows` requests each for four partitions. All rows differ in id and time."""
    schema, warehouse = data.demo_schema(), Warehouse(folder)
    warehouse.create()
    register(warehouse.store, schema)
    first, dead = sample_rows(schema, [_record(n) for n in range(rows)])
    assert not dead
    warehouse.samples.widen(first.column_types)
    written = [_file(warehouse, first, number, schema.fingerprint) for number in range(files)]
    ends = {number: rows * len(range(number, files, _PARTITIONS)) for number in range(_PARTITIONS)}
    progress = {f"samples/benchmark/{number}": ProgressStep(None, end) for number, end in ends.items()}
    warehouse.samples.commit(written, progress=progress)


def _record(n: int) -> Record:
    schema = data.demo_schema()
    sample = data.sample(schema, n % _KINDS, candidates=_CANDIDATES)
    sample.sample_id, sample.close_ms = n + 1, data.T0_MS + n
    sample.header.request_id, sample.header.time_ms = f"r{n}", sample.close_ms - 20_000
    return Record("samples", 0, n, sample.close_ms, b"", wire.encode(wire.SAMPLE, sample))


def _file(warehouse: Warehouse, rows: FileRows, number: int, fingerprint: int) -> Any:
    day, partition = divmod(number, _PARTITIONS)
    count = len(rows.counts_R)
    added = {
        "offset": day * count,
        "sample_id": number * count,
        "close_ms": day * _DAY_MS,
        "time_ms": day * _DAY_MS,
    }
    shifted = {name: FlatColumn(rows.columns[name].values + more) for name, more in added.items()}
    columns = {**rows.columns, **shifted}
    key = FileKey(
        table="samples",
        day=date.fromordinal(day_of(data.T0_MS).toordinal()) + timedelta(days=day),
        partition=partition,
        fingerprint=fingerprint,
        sealed=True,
    )
    return write_rows(warehouse.store, dataclasses.replace(rows, columns=columns), key)


class Session:
    """A table's session, opened repeatedly. `read_by`: opens it through reader programs; None = in this
    process."""

    def __init__(self, folder: Path) -> None:
        self.schema, self.clock, self.incarnation = data.demo_schema(), SystemClock(), 0
        version = SampleTable(str(folder)).newest(SessionSpec(table=str(folder), version=0), {})
        assert version is not None
        self.version: TableInput = version
        self.read_by: RemoteSessionOpener | None = None

    @property
    def rows(self) -> int:
        return sum(self.version.rows.values())

    def trained(self) -> tuple[int, TableInput | None]:
        """See `Trained`."""
        return self.incarnation, self.version if self.incarnation else None

    @contextlib.contextmanager
    def opened(self) -> Iterator[SessionSource]:
        """The session from its start, in a new incarnation."""
        self.incarnation += 1
        partitions = all_partitions((SAMPLES,), _PARTITIONS)
        batches = open_session(
            self.version, self.schema, partitions, 0, self.clock, None, self.read_by or local_rows
        )
        batches.seek({})
        try:
            yield batches
        finally:
            batches.close()


@contextlib.contextmanager
def fleet_of(
    session: Session, min_readers: int, max_readers: int, **settings: Any
) -> Iterator[OfflineReaders]:
    """Reader programs with these settings, which read for the session."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        home = Home(Path(folder))
        home.make()
        count, pool = (
            ReaderCountConfig(min_readers=min_readers, max_readers=max_readers),
            reader_programs(home, settings),
        )
        readers = OfflineReaders(
            ReaderMaster(session.trained, session.schema, session.clock, count), count, pool
        ).open()
        try:
            session.read_by = readers.session_opener(
                ReadersConfig(by="programs"), lambda: session.incarnation
            )
            yield readers
        finally:
            readers.close()


def batches_of(source: SessionSource, rows: int) -> Iterator[Batch]:
    """Read all rows. Raises RuntimeError after a minute without a batch."""
    num_read, heard_s = 0, time.monotonic()
    while num_read < rows:
        chunk = source.poll(_BATCH, _POLL_S)
        if chunk is None:
            if time.monotonic() - heard_s > _SILENT_S:
                raise RuntimeError(f"{num_read} of {rows} rows, and nothing more for {_SILENT_S:.0f} s")
            continue
        num_read, heard_s = num_read + chunk.batch.num_requests, time.monotonic()
        yield chunk.batch


def digest_of(session: Session) -> bytes:
    """A digest of all arrays of all batches, in order."""
    digest = xxhash.xxh3_128()
    with session.opened() as source:
        for batch in batches_of(source, session.rows):
            for array in _arrays(batch):
                digest.update(array.tobytes())
    return digest.digest()


def _arrays(batch: Batch) -> Iterator[Any]:
    yield from (value for value in vars(batch).values() if hasattr(value, "tobytes"))
    for lists in (batch.ro_lists, batch.nro_lists):
        yield from (lists.lengths_KN, lists.values, lists.present_KN, *lists.columns.values())


def cpu_of(readers: OfflineReaders | None) -> float:
    """CPU seconds of the running readers."""
    if readers is None:
        return 0.0
    assert isinstance(readers.pool, ProcessPool)
    total = 0.0
    for pid in readers.pool.pids():
        with contextlib.suppress(psutil.NoSuchProcess):
            times = psutil.Process(pid).cpu_times()
            total += times.user + times.system
    return total


@contextlib.contextmanager
def read(num_readers: int, files: int, rows: int) -> Iterator[WholeTurn]:
    """Units: requests of the second half of a pass, because readers adapt their prefetch in the first half.
    `num_readers`: programs; 0 = this process. The warm-up compares every bit with what this process reads."""
    with _table(files, rows) as table, contextlib.ExitStack() as opened:
        session = Session(table)
        expected = cached_bytes(f"digest-{files}x{rows}", lambda: digest_of(session))
        readers = opened.enter_context(fleet_of(session, num_readers, num_readers)) if num_readers else None

        def compare() -> None:
            if digest_of(session) != expected:
                raise RuntimeError("reader programs returned other batches than this process reads")

        def turn() -> TurnResult:
            num_read, began_s, cpu_s, half = 0, 0.0, 0.0, 0
            with session.opened() as source:
                for batch in batches_of(source, session.rows):
                    num_read += batch.num_requests
                    if not half and num_read >= session.rows / 2:
                        half, began_s, cpu_s = num_read, time.perf_counter(), cpu_of(readers)
            units, seconds = session.rows - half, time.perf_counter() - began_s
            cpu_us = (cpu_of(readers) - cpu_s) * 1e6 / units
            figures = {"bits as read in this process %": 100.0, "CPU of readers, us a request": cpu_us}
            return TurnResult(units, seconds, figures)

        yield WholeTurn(turn, warm_up=compare)


def _table(files: int, rows: int) -> contextlib.AbstractContextManager[Path]:
    return cached_folder(f"table-{files}x{rows}", lambda folder: make_table(folder, files, rows))


@contextlib.contextmanager
def starved(
    max_readers: int, share: float, pace: float, seconds: tuple[float, float], files: int, rows: int
) -> Iterator[WholeTurn]:
    """Units: requests trained, at most `pace` a second, by waiting. A reader delivers `share` of that by a
    declared delay. `max_readers`: 0 = this process reads without a delay. `seconds`: before the measurement,
    and of it."""
    with _table(files, rows) as table, contextlib.ExitStack() as opened:
        session, readers = Session(table), None
        if max_readers:
            limit = round(share * pace)
            readers = opened.enter_context(fleet_of(session, 1, max_readers, max_requests_s=limit))

        def stalled_s() -> float:
            return session.read_by.report()["stalled_s"] if session.read_by else 0.0

        def turn() -> TurnResult:
            began_s, num_read, warm = time.perf_counter(), 0, (0, 0.0, 0.0)
            with session.opened() as source:
                for batch in batches_of(source, session.rows):
                    now_s = time.perf_counter() - began_s
                    if not warm[1] and now_s >= seconds[0]:
                        warm = num_read, now_s, stalled_s()
                    elif now_s >= sum(seconds):
                        break
                    num_read += batch.num_requests
                    time.sleep(batch.num_requests / pace)
                end_stalled_s = stalled_s()
            took_s = now_s - warm[1]
            figures = {
                "training waited, %": 100.0 * (end_stalled_s - warm[2]) / took_s,
                "waited until then, s": warm[2],
                "readers": float(len(readers.pool.members())) if readers else 0.0,
            }
            return TurnResult(num_read - warm[0], took_s, figures)

        yield WholeTurn(turn)


_HERE = "benchmarks.readers"
_LARGE, _SMALL = (24, 16_384), (48, 2_048)  # files, and requests in each
_PACE, _SHARE, _SECONDS = 2_000.0, 0.44, (20.0, 20.0)
_CORES = os.cpu_count() or 1


def _programs(count: int) -> Subject:
    return Subject(f"{count} reader program{'s' if count > 1 else ''}", f"{_HERE}:read", (count, *_LARGE))


_ALONE = Subject("the worker reads for itself", f"{_HERE}:read", (0, *_LARGE), "peer")


def _starved(name: str, max_readers: int, role: Role) -> Subject:
    return Subject(name, f"{_HERE}:starved", (max_readers, _SHARE, _PACE, _SECONDS, *_SMALL), role)


BENCHMARK = Benchmark(
    name="readers",
    summary="What do readers as programs give, and does training wait where they are slow?",
    rows=(
        Row(
            name="a session of 393,216 requests of 20 candidates, to a trainer that only counts",
            unit="requests",
            subjects=(_programs(2), _programs(1), _ALONE),
            time="of the second half",
        ),
        Row(
            name="the same by more readers",
            unit="requests",
            subjects=(_programs(4), _programs(8), _ALONE),
            time="of the second half",
            skipped=""
            if _CORES >= 10
            else f"expected 10 cores, for 8 readers and who is read for; this machine has {_CORES}",
        ),
        Row(
            name="readers that each bear 44 % of what training takes",
            unit="requests",
            subjects=(
                _starved("as many as the rule wishes for, up to 6", 6, "ours"),
                _starved("one reader", 1, "peer"),
                _starved("the worker reads for itself, not slowed", 0, "limit"),
            ),
            time="of 20 s behind the first 20",
        ),
    ),
    rounds=1,
    interpretation="""\
Sealed files of the demo's schema; every bit of every batch is compared with what one process reads. The
first trainer only counts, so the first rows measure delivery: a worker that reads for itself does so in its
source's thread, while readers use cores of their own and their batches are received, copied and ordered.
The last row's trainer takes 2,000 requests a second by waiting, and each reader delivers 880 by a declared
delay (`max_requests_s`), so one reader keeps training waiting for 56 % of the time. The processes are
started and ended by the rule of decision 0073; "waited until then" contains their start.""",
)
