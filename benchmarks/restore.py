"""How fast does a shard get its rows back: from its own disk, and from the checkpoint store?"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from benchmarks.commit import bucket, spaced
from benchmarks.common import samples as data
from benchmarks.common.shard import empty_shard
from benchmarks.common.shared_setup import SharedSetup
from benchmarks.common.training_stack import touch
from benchmarks.harness.benchmark import Benchmark, Row, Subject, TurnResult, WholeTurn
from param_server.client import Client
from param_server.config import ShardIdentity
from param_server.eviction import ExpiryPolicy
from param_server.key_value_store import RocksDbStore
from param_server.restore import reload
from param_server.segment_copies import READS_AT_ONCE, SegmentCopies
from param_server.segment_parts import Segment
from param_server.segments import Segments
from param_server.server import ShardRpcHandler
from param_server.table import build_tables
from roostream.runtime.checkpoint_store import PART_BYTES, CheckpointStore
from roostream.runtime.rpc.transport import InMemoryTransport

_CHUNK = 1 << 20


class CommittedRows(NamedTuple):
    """A commit of one shard, in its home and in a bucket."""

    identity: ShardIdentity
    home: Segments
    state: tuple[Segment, ...]
    store: CheckpointStore
    rows: int
    num_bytes: int  # of the copies
    folder: Path  # on the disk of the home


@contextlib.contextmanager
def _committed_rows(rows: int) -> Iterator[CommittedRows]:
    with tempfile.TemporaryDirectory() as name, bucket() as store:
        folder = Path(name)
        blobs = RocksDbStore(folder / "segments").open()
        try:
            shard = empty_shard(data.demo_schema(), name, publishing=False, blobs=blobs)
            client = Client(
                shard.identity.schema, [InMemoryTransport(ShardRpcHandler(shard).handle)], worker=0
            )
            client.set_incarnation(1)
            touch(client, rows)
            shard.freeze(1, int(time.time() * 1000))
            shard.write(1)
            shard.commit(1)
            client.close()
            identity, home = shard.identity, shard.segments
            state = home.send(shard.committed.segments, SegmentCopies(store, 0))
            del shard, client  # its rows, of which every subject makes its own
            num_bytes = sum(segment.copy.bytes for segment in state if segment.copy)
            yield CommittedRows(identity, home, state, store, rows, num_bytes, folder)
        finally:
            blobs.close()


_shared_rows = SharedSetup(_committed_rows)


def _timed(committed: CommittedRows, act: Callable[[], None]) -> WholeTurn:
    """Units: rows."""

    def turn() -> TurnResult:
        began_s = time.perf_counter()
        act()
        took_s = time.perf_counter() - began_s
        megabytes = committed.num_bytes / 1e6
        return TurnResult(committed.rows, took_s, {"MB": megabytes, "MB/s": megabytes / took_s})

    return WholeTurn(turn)


def _load(committed: CommittedRows, segments: Segments) -> None:
    tables = build_tables(committed.identity, ExpiryPolicy)
    reload(tables, segments, committed.state)
    found = sum(table.num_rows for table in tables.values())
    if found != committed.rows:
        raise RuntimeError(f"expected {committed.rows} rows after the restore, got {found}")


@contextlib.contextmanager
def from_home(rows: int) -> Iterator[WholeTurn]:
    """All rows, read from the home and verified."""
    with _shared_rows.open(rows) as committed:
        yield _timed(committed, lambda: _load(committed, committed.home))


@contextlib.contextmanager
def from_store(rows: int) -> Iterator[WholeTurn]:
    """The segments, fetched into an empty home and verified; then all rows, read from there."""
    with _shared_rows.open(rows) as committed:

        def restore() -> None:
            folder = committed.folder / "empty"
            home = RocksDbStore(folder).open()
            try:
                segments = Segments(home, committed.home.shapes, committed.home.num_buckets)
                if problems := segments.fetch(committed.state, SegmentCopies(committed.store, 0)):
                    raise RuntimeError(problems[0])
                _load(committed, segments)
            finally:
                home.close()
                shutil.rmtree(folder)

        yield _timed(committed, restore)


@contextlib.contextmanager
def from_link(rows: int) -> Iterator[WholeTurn]:
    """The limit of the link: the requests that a restore sends to the bucket. The answers are dropped."""
    with _shared_rows.open(rows) as committed:

        def read() -> None:
            with ThreadPoolExecutor(READS_AT_ONCE) as pool:
                for copy in [segment.copy for segment in committed.state if segment.copy]:
                    starts = range(0, copy.bytes, PART_BYTES)
                    sizes = [min(PART_BYTES, copy.bytes - start) for start in starts]
                    name = copy.name

                    def get(start: int, size: int, name: str = name) -> None:
                        committed.store.get_range(name, start, size)

                    deque(pool.map(get, starts, sizes), maxlen=0)

        yield _timed(committed, read)


@contextlib.contextmanager
def from_disk(rows: int) -> Iterator[WholeTurn]:
    """A file of as many bytes on the disk of the home, read once it has left the page cache."""
    with _shared_rows.open(rows) as committed:
        path = committed.folder / "same-bytes"
        with path.open("wb") as file:
            for start in range(0, committed.num_bytes, _CHUNK):
                file.write(os.urandom(min(_CHUNK, committed.num_bytes - start)))
            file.flush()
            os.fsync(file.fileno())

        def read() -> None:
            with path.open("rb", buffering=0) as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                while file.read(_CHUNK):
                    pass

        yield _timed(committed, read)


_HERE = "benchmarks.restore"
_ROWS = (1_000_000, 10_000_000)


def _row(rows: int) -> Row:
    return Row(
        name=f"one shard gets {spaced(rows)} rows back",
        unit="rows",
        skipped="" if find_spec("moto") and find_spec("obstore") else "moto or obstore is not installed",
        time="the restore",
        subjects=(
            Subject("from the store", f"{_HERE}:from_store", (rows,)),
            Subject("from the home", f"{_HERE}:from_home", (rows,), "stage"),
            Subject("the link: the same requests alone", f"{_HERE}:from_link", (rows,), "limit"),
            Subject("the disk: as many bytes read", f"{_HERE}:from_disk", (rows,), "limit"),
        ),
    )


BENCHMARK = Benchmark(
    name="restore",
    summary="How fast does a shard get its rows back, from its disk and from the checkpoint store?",
    rows=tuple(map(_row, _ROWS)),
    rounds=1,
    interpretation="""\
A shard whose home is in order reads its segments from there, verifies them and puts the rows into its
tables. A shard without its home fetches the copies of its segments first and stores them on its disk. The
store is moto's S3 server, in a process of its own on the same machine, so the ratios count, not the MB/s. The
limits are the same requests to the bucket with nothing done to the answers, and a file of as many bytes that
has left the page cache. The home itself may still be in the page cache. Rows are those of the demo's items,
with a state of their update rule. Time grows with the rows: 100 million rows take ten times as long as ten
million, as long as they fit into memory.""",
)
