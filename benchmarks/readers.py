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
from collections.abc import Callable, Iterator
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import psutil
import xxhash

from benchmarks.common import samples as data
from benchmarks.harness.benchmark import Benchmark, Row, Subject, Work
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
_SILENT_S = 60.0  # without a row: something is broken


def make_table(place: Path, files: int, rows: int) -> None:
    """Sealed files of so many requests each, of four partitions, as many days as that takes; all rows differ
    in id and time."""
    schema, warehouse = data.demo_schema(), Warehouse(place)
    warehouse.create()
    register(warehouse.store, schema)
    made, dead = sample_rows(schema, [_record(n) for n in range(rows)])
    assert not dead
    warehouse.samples.widen(made.forms)
    written = [_file(warehouse, made, number, schema.fingerprint) for number in range(files)]
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
    columns = {
        **rows.columns,
        **{name: FlatColumn(rows.columns[name].values + more) for name, more in added.items()},
    }
    at = FileKey(
        table="samples",
        day=date.fromordinal(day_of(data.T0_MS).toordinal()) + timedelta(days=day),
        partition=partition,
        fingerprint=fingerprint,
        sealed=True,
    )
    return write_rows(warehouse.store, dataclasses.replace(rows, columns=columns), at)


class Session:
    """A table's session, opened again and again; `read_by`: programs that read for it, None = this process
    does."""

    def __init__(self, place: Path) -> None:
        self.schema, self.clock, self.incarnation = data.demo_schema(), SystemClock(), 0
        told = SampleTable(str(place)).newest(SessionSpec(table=str(place), version=0), {})
        assert told is not None
        self.told: TableInput = told
        self.read_by: RemoteSessionOpener | None = None

    @property
    def rows(self) -> int:
        return sum(self.told.rows.values())

    def trained(self) -> tuple[int, TableInput | None]:
        """See `Trained`."""
        return self.incarnation, self.told if self.incarnation else None

    @contextlib.contextmanager
    def opened(self) -> Iterator[SessionSource]:
        """From its begin, of another incarnation."""
        self.incarnation += 1
        partitions = all_partitions((SAMPLES,), _PARTITIONS)
        batches = open_session(
            self.told, self.schema, partitions, 0, self.clock, None, self.read_by or local_rows
        )
        batches.seek({})
        try:
            yield batches
        finally:
            batches.close()


@contextlib.contextmanager
def fleet_of(session: Session, least: int, most: int, **settings: Any) -> Iterator[OfflineReaders]:
    """From `least` to `most` readers with these settings, which read for the session."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        home = Home(Path(folder))
        home.make()
        count, pool = ReaderCountConfig(min_readers=least, max_readers=most), reader_programs(home, settings)
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
    """All of them. RuntimeError: none came for a minute."""
    given, heard_s = 0, time.monotonic()
    while given < rows:
        chunk = source.poll(_BATCH, _POLL_S)
        if chunk is None:
            if time.monotonic() - heard_s > _SILENT_S:
                raise RuntimeError(f"{given} of {rows} rows, and nothing more for {_SILENT_S:.0f} s")
            continue
        given, heard_s = given + chunk.batch.num_requests, time.monotonic()
        yield chunk.batch


def digest_of(session: Session) -> bytes:
    """Of every array of every batch, in order."""
    found = xxhash.xxh3_128()
    with session.opened() as source:
        for batch in batches_of(source, session.rows):
            for array in _arrays(batch):
                found.update(array.tobytes())
    return found.digest()


def _arrays(batch: Batch) -> Iterator[Any]:
    yield from (value for value in vars(batch).values() if hasattr(value, "tobytes"))
    for lists in (batch.ro_lists, batch.nro_lists):
        yield from (lists.lengths_KN, lists.values, lists.present_KN, *lists.columns.values())


class Passes:
    """A step reads all; what is timed is the second half: until then it is found out how much to have under
    way. The first step compares every bit with what this process reads."""

    def __init__(self, session: Session, readers: OfflineReaders | None, expected: bytes) -> None:
        self.session, self.readers, self.expected = session, readers, expected
        self._is_first = True
        self.units = self.seconds = 1.0
        self.cpu_s = 0.0

    def step(self) -> None:
        if self._is_first:
            self._is_first = False
            if digest_of(self.session) != self.expected:
                raise RuntimeError("readers gave other batches than this process reads")
            return
        rows, given = self.session.rows, 0
        began_s = cpu_s = half = 0.0
        with self.session.opened() as source:
            for batch in batches_of(source, rows):
                given += batch.num_requests
                if not half and given >= rows / 2:
                    half, began_s, cpu_s = given, time.perf_counter(), cpu_of(self.readers)
        self.units, self.seconds = rows - half, time.perf_counter() - began_s
        self.cpu_s = cpu_of(self.readers) - cpu_s

    def figures(self) -> dict[str, float]:
        return {
            "bits as read in this process %": 100.0,
            "CPU of readers, us a request": self.cpu_s * 1e6 / self.units,
        }

    def work(self) -> Work:
        return Work(self.step, lambda: self.units, self.figures, lambda: self.seconds)


def cpu_of(readers: OfflineReaders | None) -> float:
    """Seconds, of those that run now."""
    if readers is None:
        return 0.0
    assert isinstance(readers.pool, ProcessPool)
    found = 0.0
    for pid in readers.pool.pids():
        with contextlib.suppress(psutil.NoSuchProcess):
            times = psutil.Process(pid).cpu_times()
            found += times.user + times.system
    return found


@contextlib.contextmanager
def read(readers: int, files: int, rows: int) -> Iterator[Work]:
    """Units: requests. `readers`: programs; 0 = this process."""
    with _table(files, rows) as place, contextlib.ExitStack() as opened:
        session = Session(place)
        expected = cached_bytes(f"digest-{files}x{rows}", lambda: digest_of(session))
        fleet = opened.enter_context(fleet_of(session, readers, readers)) if readers else None
        yield Passes(session, fleet, expected).work()


def _table(files: int, rows: int) -> contextlib.AbstractContextManager[Path]:
    return cached_folder(f"table-{files}x{rows}", lambda place: make_table(place, files, rows))


class Paced:
    """Trains so many requests a second by waiting, and notes how much of its time it had nothing to train."""

    def __init__(
        self, session: Session, pace: float, warm_s: float, seconds: float, readers: Callable[[], float]
    ) -> None:
        self.session, self.pace, self.warm_s, self.seconds, self.readers = (
            session,
            pace,
            warm_s,
            seconds,
            readers,
        )
        self._is_first = True
        self.units = self.took_s = 1.0
        self._figures: dict[str, float] = {}

    def step(self) -> None:
        if self._is_first:
            self._is_first = False
            return
        began_s, all_s, warm = time.perf_counter(), self.warm_s + self.seconds, (0, 0.0, 0.0)
        given = 0
        with self.session.opened() as source:
            batches = batches_of(source, self.session.rows)
            while (now_s := time.perf_counter() - began_s) < all_s and (
                batch := next(batches, None)
            ) is not None:
                if not warm[1] and now_s >= self.warm_s:
                    warm = given, now_s, self._stalled_s()
                given += batch.num_requests
                time.sleep(batch.num_requests / self.pace)
            stalled_s = self._stalled_s()
        self.units, self.took_s = given - warm[0], now_s - warm[1]
        self._figures = {
            "training waited, %": 100.0 * (stalled_s - warm[2]) / self.took_s,
            "waited until then, s": warm[2],
            "readers": self.readers(),
        }

    def _stalled_s(self) -> float:
        return self.session.read_by.report()["stalled_s"] if self.session.read_by else 0.0

    def work(self) -> Work:
        return Work(self.step, lambda: self.units, lambda: self._figures, lambda: self.took_s)


@contextlib.contextmanager
def starved(
    most: int, share: float, pace: float, seconds: tuple[float, float], files: int, rows: int
) -> Iterator[Work]:
    """Units: requests trained, `pace` a second at most; a reader bears `share` of that by a declared delay,
    and there may be `most` of them; 0: this process reads, and isn't slowed. `seconds`: before what is
    measured, and of it."""
    with _table(files, rows) as place, contextlib.ExitStack() as opened:
        session, count = Session(place), lambda: 0.0
        if most:
            readers = opened.enter_context(fleet_of(session, 1, most, max_requests_s=round(share * pace)))
            count = lambda: float(len(readers.pool.members()))
        yield Paced(session, pace, *seconds, count).work()


_HERE = "benchmarks.readers"
_LARGE, _SMALL = (24, 16_384), (48, 2_048)  # files, and requests in each
_PACE, _SHARE, _SECONDS = 2_000.0, 0.44, (20.0, 20.0)
_CORES = os.cpu_count() or 1


def _programs(count: int) -> Subject:
    return Subject(f"{count} reader program{'s' if count > 1 else ''}", f"{_HERE}:read", (count, *_LARGE))


_ALONE = Subject("the worker reads for itself", f"{_HERE}:read", (0, *_LARGE), "peer")


def _starved(name: str, most: int, role: str) -> Subject:
    return Subject(name, f"{_HERE}:starved", (most, _SHARE, _PACE, _SECONDS, *_SMALL), role)  # type: ignore[arg-type]


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
The demo's schema; sealed files, every bit of every batch compared with what one process reads, in order. The first row's
trainer does nothing, so it is about how fast rows come. A worker that reads for itself does so in the thread of its source,
with nothing beside it; readers take cores of their own, and what they give is received, copied and put in order: on two cores
two readers and who is read for are three. The third row's trainer takes 2,000 requests a second by waiting, and each reader
gives 880 by a declared delay (`max_requests_s`): one keeps training waiting for 56 % of its time. Real processes, started
and ended by the rule of docs/decisions/0073; `waited until then` contains their start.""",
)
