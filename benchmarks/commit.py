"""For how long does a commit hold up training, and where does its time go?

Commits with different numbers of rows: of a running stack, of one shard alone, and the time that the disk
needs for the same bytes.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common import samples as data
from benchmarks.common.shard import empty_shard
from benchmarks.common.shared_setup import SharedSetup
from benchmarks.common.training_stack import Trainer, touch, training_stack
from benchmarks.harness.benchmark import Benchmark, Row, Subject, Work
from benchmarks.recovery import RATE, WARM
from param_server.client import Client
from param_server.key_value_store import KeyValueStore, RocksDbStore
from param_server.server import Shard, ShardRpcHandler
from roostream.runtime.manifest import Manifest
from roostream.runtime.rpc.transport import InMemoryTransport

_ONLY_OURS_MS = 3_600_000  # no commit but those that are asked for
_BETWEEN_S = 1.0
_CHUNK = 1 << 20

_holding = SharedSetup(training_stack)


class Committed(NamedTuple):
    """One commit."""

    took_s: float  # from the cut to its manifest
    paused_ms: float  # of the loop: from its cut until it was told to go on
    phases_ms: dict[str, float]
    bytes: int  # that it wrote: segments of the shards, dense part, the worker's own
    rows: int


class Commits:
    """A turn: so many commits, of all rows that are held, or of what training has changed in a second."""

    def __init__(self, trainer: Trainer, rows: int, count: int, *, everything: bool) -> None:
        self.trainer, self.rows, self.count, self.everything = trainer, rows, count, everything
        self._commits: list[Committed] = []

    def step(self) -> None:
        self._commits = [self._commit() for _ in range(self.count)]

    def _commit(self) -> Committed:
        trainer = self.trainer
        if self.everything:
            trainer.hold(self.rows)
        time.sleep(_BETWEEN_S)
        before, paused_s = trainer.newest(), self._paused_s()
        manifest, status = trainer.commit(), trainer.ask("status")
        bytes_, rows = written(before, manifest)
        paused_ms = 1e3 * (self._paused_s() - paused_s)
        return Committed(status["commit_ms"] / 1e3, paused_ms, dict(status["phases_ms"]), bytes_, rows)

    def _paused_s(self) -> float:
        seen = self.trainer.seen("worker").value(
            "roostream_worker_stage_seconds_total", stage="commit", thread="loop"
        )
        return seen or 0.0

    @property
    def bytes(self) -> int:
        """Of the last commit."""
        return self._commits[-1].bytes

    def units(self) -> float:
        return float(len(self._commits))

    def took_s(self) -> float:
        return sum(one.took_s for one in self._commits)

    def figures(self) -> dict[str, float]:
        each = self._commits
        phases = {
            f"{name}, ms": statistics.median(one.phases_ms[name] for one in each)
            for name in each[0].phases_ms
        }
        return {
            "rows": statistics.median(one.rows for one in each),
            "MB": statistics.median(one.bytes for one in each) / 1e6,
            "training paused, ms": statistics.median(one.paused_ms for one in each),
            "longest pause, ms": max(one.paused_ms for one in each),
            **phases,
        }


def written(before: Manifest, after: Manifest) -> tuple[int, int]:
    """Bytes and rows that are of the later one alone."""

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
    """What all rows of a run use."""
    return _holding.open(RATE, 0, WARM, _ONLY_OURS_MS)


@contextlib.contextmanager
def commits(rows: int, count: int, everything: bool) -> Iterator[Work]:
    """Units: commits. Time: from the cut to the manifest."""
    with stack() as trainer:
        it = Commits(trainer, rows, count, everything=everything)
        yield Work(it.step, it.units, it.figures, it.took_s)


@contextlib.contextmanager
def synced(rows: int) -> Iterator[Work]:
    """The bytes of a commit of all rows, written to one file beside the stack's and synced."""
    with stack() as trainer:
        its = Commits(trainer, rows, 1, everything=True)
        its.step()
        path = trainer.stack.home.tmp / "same-bytes"
        yield Work(lambda: write_synced(path, its.bytes), lambda: 1.0)


def write_synced(path: Path, num_bytes: int) -> None:
    chunk = os.urandom(_CHUNK)
    with path.open("wb") as file:
        for at in range(0, num_bytes, _CHUNK):
            file.write(chunk[: num_bytes - at])
        file.flush()
        os.fsync(file.fileno())
    path.unlink()


class TimedBlobs:
    """`KeyValueStore` that say what writing took, with and without waiting for the disk."""

    def __init__(self, blobs: KeyValueStore) -> None:
        self._blobs = blobs
        self.get, self.keys, self.close = blobs.get, blobs.keys, blobs.close
        self.write_s = self.sync_s = 0.0

    def write(
        self, puts: Iterable[tuple[bytes, bytes]], deletes: Iterable[bytes] = (), *, sync: bool = False
    ) -> None:
        began_s = time.perf_counter()
        self._blobs.write(puts, deletes, sync=sync)
        took_s = time.perf_counter() - began_s
        self.write_s, self.sync_s = self.write_s + took_s * (not sync), self.sync_s + took_s * sync


class ShardCommits:
    """One shard's part of a commit, all of its rows changed: freeze, write, commit. A turn is one of them."""

    def __init__(self, shard: Shard, blobs: TimedBlobs, rows: int) -> None:
        self.shard, self.blobs, self.rows = shard, blobs, rows
        self._client = Client(
            shard.identity.schema, [InMemoryTransport(ShardRpcHandler(shard).handle)], worker=0
        )
        self._client.set_incarnation(1)
        self._seq = 0
        self.bytes = 0
        self._at_s: list[float] = []
        self._write_s = self._sync_s = 0.0

    def step(self) -> None:
        touch(self._client, self.rows)
        self._seq += 1
        self.blobs.write_s = self.blobs.sync_s = 0.0
        self._at_s = [time.perf_counter()]
        self.shard.freeze(self._seq, int(time.time() * 1000))
        self._at_s.append(time.perf_counter())
        segments = self.shard.write(self._seq)["segments"]
        self._at_s.append(time.perf_counter())
        self._write_s, self._sync_s = self.blobs.write_s, self.blobs.sync_s
        self.shard.commit(self._seq)
        self._at_s.append(time.perf_counter())
        self.bytes = int(segments[-1]["bytes"])

    def took_s(self) -> float:
        return self._at_s[-1] - self._at_s[0]

    def figures(self) -> dict[str, float]:
        freeze_ms, write_ms, forget_ms = (
            1e3 * (end_s - begin_s) for begin_s, end_s in itertools.pairwise(self._at_s)
        )
        stored_ms = 1e3 * (self._write_s + self._sync_s)
        return {
            "MB": self.bytes / 1e6,
            "copy, pushes wait, ms": freeze_ms,
            "encode, ms": write_ms - stored_ms,
            "write, ms": 1e3 * self._write_s,
            "sync and flush, ms": 1e3 * self._sync_s,
            "check and forget, ms": forget_ms,
        }


@contextlib.contextmanager
def of_a_shard(rows: int) -> Iterator[Work]:
    """Units: commits, in this process, onto a disk."""
    with _shared_shard.open(rows) as its:
        yield Work(its.step, lambda: 1.0, its.figures, its.took_s)


@contextlib.contextmanager
def synced_of_a_shard(rows: int) -> Iterator[Work]:
    """The bytes of such a commit, written to one file and synced."""
    with _shared_shard.open(rows) as its, tempfile.TemporaryDirectory() as folder:
        if not its.bytes:
            its.step()
        yield Work(lambda: write_synced(Path(folder) / "same-bytes", its.bytes), lambda: 1.0)


@contextlib.contextmanager
def _committing(rows: int) -> Iterator[ShardCommits]:
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as opened:
        blobs = RocksDbStore(Path(folder) / "segments").open()
        opened.callback(blobs.close)
        timed = TimedBlobs(blobs)
        yield ShardCommits(
            empty_shard(data.demo_schema(), folder, publishing=False, blobs=timed), timed, rows
        )


_shared_shard = SharedSetup(_committing)

_HERE = "benchmarks.commit"
_ROWS = (10_000, 100_000, 1_000_000)


def _spelt(rows: int) -> str:
    return f"{rows:,}".replace(",", " ")


def _stack(rows: int) -> Row:
    return Row(
        name=f"a commit of a running stack that holds {_spelt(rows)} rows",
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
        name=f"one shard's part, {_spelt(rows)} rows changed",
        unit="commits",
        shows="cost",
        subjects=(
            Subject("the shard", f"{_HERE}:of_a_shard", (rows,)),
            Subject("the same bytes written and synced", f"{_HERE}:synced_of_a_shard", (rows,), "limit"),
        ),
    )


BENCHMARK = Benchmark(
    name="commit",
    summary="For how long does a commit hold up training, and where does its time go?",
    rows=(*map(_shard_row, _ROWS), *map(_stack, _ROWS)),
    rounds=1,
    run_setup=f"{_HERE}:stack",
    interpretation="""\
Training stands still from the worker's cut until it is told to go on: "cut" (the batch in hand, pushes acknowledged, predictions
flushed) and "freeze" (shards copy what has changed). What follows runs beside training: "write" (shards encode and sync their
rows, the worker its own part and the dense one), "link" (the manifest). The target is a pause of 50 ms at most, which at a commit
every 10 s would be 0.5 % of the time; a commit writes what has changed, so a second of training is the usual one and every row
the worst. The pause is counted by the worker's loop itself, the phases by the controller, whose members answer by heartbeats.

A shard alone has its parts in one process without calls: the copy under the lock for which pushes wait, encoding with
checksums, handing to the store, waiting for the disk, and reading a part back and forgetting old ones.

Broker, two shards, controller, one worker as a stack starts them, on the same cores; 500 requests/s of 20 candidates, demo
schema (rows of 16 with a state), no row expires; the rows held grow from table to table. The limit is one file of as many bytes,
written and synced in the same run.""",
)
