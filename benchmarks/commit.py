"""For how long does a commit hold up training, and where does its time go?

Commits with different numbers of rows: of a running stack, of one shard alone, and the time that the disk
needs for the same bytes.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common import samples as data
from benchmarks.common.peer_process import peer_address
from benchmarks.common.s3_server import BUCKET, server_environment
from benchmarks.common.shard import empty_shard
from benchmarks.common.shared_setup import SharedSetup
from benchmarks.common.training_stack import Trainer, touch, training_stack
from benchmarks.harness.benchmark import Benchmark, Row, Subject, TurnResult, WholeTurn
from benchmarks.recovery import RATE, WARM
from param_server.client import Client
from param_server.key_value_store import KeyValueStore, RocksDbStore
from param_server.segment_copies import SegmentCopies
from param_server.segment_parts import Segment
from param_server.segments import Segments
from param_server.server import Shard, ShardRpcHandler
from roostream.runtime.checkpoint_store import CheckpointStore, open_store
from roostream.runtime.manifest import Manifest
from roostream.runtime.rpc.transport import InMemoryTransport

_NEVER_MS = 3_600_000  # no commits but the requested ones
_BETWEEN_S = 1.0
_CHUNK = 1 << 20

_stack_setup = SharedSetup(training_stack)


class Committed(NamedTuple):
    """One commit."""

    took_s: float  # from the cut to its manifest
    paused_ms: float  # of the training loop, from its cut until it goes on
    phases_ms: dict[str, float]
    bytes: int  # of the shards' new segments, the dense part and the worker's part
    rows: int


def commit(trainer: Trainer, rows: int, *, everything: bool) -> Committed:
    """Commit after a second of training, with `everything` after a change of all `rows`."""
    if everything:
        trainer.hold(rows)
    time.sleep(_BETWEEN_S)
    before, paused_s = trainer.newest(), _paused_s(trainer)
    manifest, status = trainer.commit(), trainer.call("status")
    num_bytes, num_rows = written(before, manifest)
    paused_ms = 1e3 * (_paused_s(trainer) - paused_s)
    return Committed(status["commit_ms"] / 1e3, paused_ms, dict(status["phases_ms"]), num_bytes, num_rows)


def _paused_s(trainer: Trainer) -> float:
    name = "roostream_worker_stage_seconds_total"
    return trainer.metrics("worker").value(name, stage="commit", thread="loop") or 0.0


def written(before: Manifest, after: Manifest) -> tuple[int, int]:
    """Bytes and rows that only the later commit has."""

    def segments(manifest: Manifest) -> dict[tuple[int, str], dict[str, Any]]:
        return {
            (index, part["name"]): part
            for index, shard in manifest.shards.items()
            for part in shard["segments"]
        }

    new = [part for key, part in segments(after).items() if key not in segments(before)]
    files = after.dense.bytes + sum(worker.file.bytes for worker in after.workers.values())
    return sum(part["bytes"] for part in new) + files, sum(part["rows"] for part in new)


def stack() -> contextlib.AbstractContextManager[Trainer]:
    """The stack of a run, shared by its rows."""
    return _stack_setup.open(RATE, 0, WARM, _NEVER_MS)


@contextlib.contextmanager
def commits(rows: int, count: int, everything: bool) -> Iterator[WholeTurn]:
    """Units: commits. Time: from the cut to the manifest."""
    with stack() as trainer:

        def turn() -> TurnResult:
            done = [commit(trainer, rows, everything=everything) for _ in range(count)]
            figures = {
                "rows": statistics.median(one.rows for one in done),
                "MB": statistics.median(one.bytes for one in done) / 1e6,
                "training paused, ms": statistics.median(one.paused_ms for one in done),
                "longest pause, ms": max(one.paused_ms for one in done),
            }
            for phase in done[0].phases_ms:
                figures[f"{phase}, ms"] = statistics.median(one.phases_ms[phase] for one in done)
            return TurnResult(count, sum(one.took_s for one in done), figures)

        yield WholeTurn(turn, warm_up=turn)


@contextlib.contextmanager
def synced(rows: int) -> Iterator[WholeTurn]:
    """The bytes of a commit of all rows, written to one file beside the stack's and synced."""
    with stack() as trainer:
        num_bytes = commit(trainer, rows, everything=True).bytes
        yield write_synced(trainer.stack.home.tmp / "same-bytes", num_bytes)


def write_synced(path: Path, num_bytes: int) -> WholeTurn:
    """Write a file of `num_bytes` bytes and sync it."""

    def turn() -> TurnResult:
        chunk = os.urandom(_CHUNK)
        with path.open("wb") as file:
            for start in range(0, num_bytes, _CHUNK):
                file.write(chunk[: num_bytes - start])
            file.flush()
            os.fsync(file.fileno())
        path.unlink()
        return TurnResult()

    return WholeTurn(turn, warm_up=turn)


class TimedStore:
    """A `KeyValueStore` that times writes, with and without a sync."""

    def __init__(self, blobs: KeyValueStore) -> None:
        self._blobs = blobs
        self.get, self.keys, self.close = blobs.get, blobs.keys, blobs.close
        self.check_space = blobs.check_space
        self.write_s = self.sync_s = 0.0

    def write(
        self, puts: Iterable[tuple[bytes, bytes]], deletes: Iterable[bytes] = (), *, sync: bool = False
    ) -> None:
        began_s = time.perf_counter()
        self._blobs.write(puts, deletes, sync=sync)
        took_s = time.perf_counter() - began_s
        self.write_s, self.sync_s = self.write_s + took_s * (not sync), self.sync_s + took_s * sync


class ShardCommits:
    """One shard's part of a commit with all rows changed: freeze, write, commit."""

    def __init__(self, shard: Shard, blobs: TimedStore, rows: int) -> None:
        self.shard, self.blobs, self.rows = shard, blobs, rows
        schema = shard.identity.schema
        self._client = Client(schema, [InMemoryTransport(ShardRpcHandler(shard).handle)], worker=0)
        self._client.set_incarnation(1)
        self._seq = 0
        self.bytes = 0

    def turn(self) -> TurnResult:
        touch(self._client, self.rows)
        self._seq += 1
        self.blobs.write_s = self.blobs.sync_s = 0.0
        began_s = time.perf_counter()
        self.shard.freeze(self._seq, int(time.time() * 1000))
        frozen_s = time.perf_counter()
        segments = self.shard.write(self._seq)["segments"]
        written_s = time.perf_counter()
        write_s, sync_s = self.blobs.write_s, self.blobs.sync_s
        self.shard.commit(self._seq)
        ended_s = time.perf_counter()
        self.bytes = int(segments[-1]["bytes"])
        figures = {
            "MB": self.bytes / 1e6,
            "copy, pushes wait, ms": 1e3 * (frozen_s - began_s),
            "encode, ms": 1e3 * (written_s - frozen_s - write_s - sync_s),
            "write, ms": 1e3 * write_s,
            "sync and flush, ms": 1e3 * sync_s,
            "check and forget, ms": 1e3 * (ended_s - written_s),
        }
        return TurnResult(1, ended_s - began_s, figures)


@contextlib.contextmanager
def of_a_shard(rows: int) -> Iterator[WholeTurn]:
    """Units: commits, in this process, onto a disk."""
    with _shared_shard.open(rows) as commits:
        yield WholeTurn(commits.turn, warm_up=commits.turn)


@contextlib.contextmanager
def synced_of_a_shard(rows: int) -> Iterator[WholeTurn]:
    """The bytes of such a commit, written to one file and synced."""
    with _shared_shard.open(rows) as commits, tempfile.TemporaryDirectory() as folder:
        if not commits.bytes:
            commits.turn()
        yield write_synced(Path(folder) / "same-bytes", commits.bytes)


@contextlib.contextmanager
def _shard_commits(rows: int) -> Iterator[ShardCommits]:
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as opened:
        blobs = RocksDbStore(Path(folder) / "segments").open()
        opened.callback(blobs.close)
        timed = TimedStore(blobs)
        shard = empty_shard(data.demo_schema(), folder, publishing=False, blobs=timed)
        yield ShardCommits(shard, timed, rows)


_shared_shard = SharedSetup(_shard_commits)


class CopiedSegment(NamedTuple):
    """A committed segment of a shard, and a bucket on a server of its own."""

    segments: Segments
    segment: Segment
    store: CheckpointStore
    copies: SegmentCopies
    object: bytes  # the copy


@contextlib.contextmanager
def bucket() -> Iterator[CheckpointStore]:
    """A store in a bucket of moto's S3 server, which runs in its own process."""
    with peer_address("benchmarks.common.s3_server") as url, server_environment(url):
        yield open_store(f"s3://{BUCKET}/commit")


@contextlib.contextmanager
def _copied_segment(rows: int) -> Iterator[CopiedSegment]:
    with _shard_commits(rows) as commits, bucket() as store:
        commits.turn()
        segments = commits.shard.segments
        copies = SegmentCopies(store, 0)
        (segment,) = segments.send(commits.shard.committed.segments[-1:], copies)
        assert segment.copy is not None
        yield CopiedSegment(segments, segment, store, copies, store.get(segment.copy.name))


_shared_copy = SharedSetup(_copied_segment)


def _timed(act: Callable[[], object], num_bytes: int) -> WholeTurn:
    def turn() -> TurnResult:
        act()
        return TurnResult(num_bytes / 1e6)

    return WholeTurn(turn, warm_up=turn)


@contextlib.contextmanager
def sent(rows: int) -> Iterator[WholeTurn]:
    """Units: MB of a segment that the shard reads, verifies and copies to the bucket."""
    with _shared_copy.open(rows) as copied:
        parts = copied.segments.parts

        def send() -> None:
            copied.copies.send(parts, copied.segment, lambda: None)

        yield _timed(send, len(copied.object))


@contextlib.contextmanager
def fetched(rows: int) -> Iterator[WholeTurn]:
    """Units: MB of a segment that an empty home fetches, verifies and stores, synced."""
    with _shared_copy.open(rows) as copied, tempfile.TemporaryDirectory() as folder:
        home = RocksDbStore(Path(folder) / "segments").open()
        try:
            there = Segments(home, copied.segments.shapes, copied.segments.num_buckets)

            def fetch() -> None:
                if problems := there.fetch([copied.segment], copied.copies):
                    raise RuntimeError(problems[0])

            yield _timed(fetch, len(copied.object))
        finally:
            home.close()


@contextlib.contextmanager
def same_bytes(rows: int, how: str) -> Iterator[WholeTurn]:
    """Units: MB of the same object, that obstore alone puts into the bucket, or gets."""
    with _shared_copy.open(rows) as copied:
        import obstore

        client = obstore.store.S3Store(BUCKET, prefix="plain", client_options={"allow_http": True})
        obstore.put(client, "object", copied.object)

        def act() -> None:
            if how == "put":
                obstore.put(client, "object", copied.object)
            else:
                obstore.get(client, "object").bytes()

        yield _timed(act, len(copied.object))


_HERE = "benchmarks.commit"
_ROWS = (10_000, 100_000, 1_000_000)
_COPIED_ROWS = (100_000, 1_000_000)


def spaced(rows: int) -> str:
    return f"{rows:,}".replace(",", " ")


def _stack(rows: int) -> Row:
    return Row(
        name=f"a commit of a running stack that holds {spaced(rows)} rows",
        unit="commits",
        shows="cost",
        subjects=(
            Subject("every row changed", f"{_HERE}:commits", (rows, 1, True)),
            Subject("a second of training", f"{_HERE}:commits", (rows, 3, False), "stage"),
            Subject("the same bytes written and synced", f"{_HERE}:synced", (rows,), "limit"),
        ),
    )


def _shard_row(rows: int) -> Row:
    return Row(
        name=f"one shard's part, {spaced(rows)} rows changed",
        unit="commits",
        shows="cost",
        subjects=(
            Subject("the shard", f"{_HERE}:of_a_shard", (rows,)),
            Subject("the same bytes written and synced", f"{_HERE}:synced_of_a_shard", (rows,), "limit"),
        ),
    )


def _copy_row(rows: int, what: str, subject: str, how: str) -> Row:
    return Row(
        name=f"a segment of {spaced(rows)} rows is {what}",
        unit="MB",
        skipped="" if find_spec("moto") and find_spec("obstore") else "moto or obstore is not installed",
        subjects=(
            Subject("the shard", f"{_HERE}:{subject}", (rows,)),
            Subject(f"obstore's {how} of the same bytes", f"{_HERE}:same_bytes", (rows, how), "limit"),
        ),
    )


BENCHMARK = Benchmark(
    name="commit",
    summary="For how long does a commit hold up training, and where does its time go?",
    rows=(
        *map(_shard_row, _ROWS),
        *(_copy_row(rows, "copied to a bucket", "sent", "put") for rows in _COPIED_ROWS),
        *(_copy_row(rows, "fetched into an empty home", "fetched", "get") for rows in _COPIED_ROWS),
        *map(_stack, _ROWS),
    ),
    rounds=1,
    run_setup=f"{_HERE}:stack",
    interpretation="""\
Training pauses during "cut" (finish the batch, wait for pushes, flush predictions) and "freeze" (shards
copy changed rows). "Write" and "link" run beside training. The target is a pause of at most 50 ms, 0.5 % of
the time at a commit every 10 s. A commit writes what has changed: a second of training is the usual case,
every row the worst one. The rows of one shard alone split its part in one process without calls. The stack
has a broker, two shards, a controller and one worker on the same cores, with 500 requests/s of 20
candidates of the demo schema; the limit is one file of as many bytes, written and synced.

A copy of a segment goes to moto's S3 server in a process of its own on the same machine, and comes back from
it: the server and its Python bound both sides, so the ratio counts, not the MB/s.""",
)
