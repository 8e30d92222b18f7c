"""How long does training pause while rows move from workers to shards?

Moves rows from workers to shards with a commit, and writes the same bytes without it.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import xxhash

from benchmarks.common import samples as data
from benchmarks.harness.benchmark import Benchmark, Row, Subject, TurnResult, WholeTurn, Work
from param_server.embedding_table import Keys
from param_server.key_value_store import RocksDbStore
from param_server.row_block import RowBlock, newest_of
from param_server.segments import Segments
from param_server.table import shapes_of
from roostream.cli.checkpoint.move_buckets import CommittedShards, move
from roostream.runtime import manifest as manifests
from roostream.runtime.bucket_map import BucketMap
from roostream.runtime.checkpoint_store import FileStore
from roostream.runtime.manifest import Manifest, StoredFile
from roostream.schema.ids import buckets_of
from roostream.schema.registry import register
from roostream.schema.schema import Schema

_BUCKETS = 64


@contextlib.contextmanager
def move_rows(num_rows: int, workers: int, shards: int) -> Iterator[WholeTurn]:
    """Move rows back and forth between two groups of owners. Figures: the pause of the last
    move, the share of moved buckets, and whether any row differs."""
    schema = data.demo_schema()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as opened:
        store, blobs = FileStore(Path(folder) / "store"), {}
        register(store, schema)
        for index in range(max(workers, shards)):
            blobs[index] = RocksDbStore(Path(folder) / f"owner-{index}").open()
            opened.callback(blobs[index].close)
        _commit(store, schema, num_rows, workers, blobs)
        maps = [BucketMap.modulo(_BUCKETS, shards), BucketMap.modulo(_BUCKETS, workers)]
        before = _digest(store, schema, blobs)

        def turn() -> TurnResult:
            began_s = time.monotonic()
            move(store, maps[0], blobs, 0)
            pause_s = time.monotonic() - began_s
            maps.reverse()
            figures = {
                "pause, s": pause_s,
                "buckets moved": float((maps[0].owner_B != maps[1].owner_B).mean()),
                "rows differ": float(_digest(store, schema, blobs) != before),
            }
            return TurnResult(num_rows, pause_s, figures)

        yield WholeTurn(turn, warm_up=turn)


@contextlib.contextmanager
def write_file(num_rows: int, width: int) -> Iterator[Work]:
    """The bytes of these rows and their state, written to one file and synced."""
    payload = np.random.default_rng(0).bytes(num_rows * (8 * width + 21))
    with tempfile.TemporaryDirectory() as folder:

        def step() -> None:
            with (Path(folder) / "file").open("wb") as file:
                file.write(payload)
                file.flush()
                os.fsync(file.fileno())

        yield Work(step, float(num_rows))


def _commit(
    store: FileStore, schema: Schema, num_rows: int, owners: int, blobs: Mapping[int, RocksDbStore]
) -> None:
    """Write commit 1 with `num_rows` rows of the first stack at `owners` owners."""
    stack, (table, *_) = next(iter(schema.stacks.items()))
    width, state_width = shapes_of(schema)[stack]
    random, ids = np.random.default_rng(0), np.arange(num_rows, dtype=np.int64)
    block = RowBlock(
        keys=Keys(np.full(num_rows, table.id, np.uint32), ids),
        unpublished_K=np.zeros(num_rows, np.uint8),
        stamp_ms_L=ids,
        rows_LD=random.standard_normal((num_rows, width), np.float32),
        state_LA=random.random((num_rows, state_width), np.float32),
    )
    bucket_map = BucketMap.modulo(_BUCKETS, owners)
    owner_N = bucket_map.owner_B[buckets_of(ids, table.id, _BUCKETS)]
    shards = {}
    for index in range(owners):
        segments = Segments(blobs[index], shapes_of(schema), _BUCKETS, buckets=bucket_map.buckets_of(index))
        shards[index] = {
            "segments": [s.plain() for s in segments.write("1-1", {stack: block.take(owner_N == index)}, ())]
        }
    manifest = Manifest(
        seq=1,
        incarnation=1,
        previous={"seq": 0, "checksum": ""},
        step=1,
        watermark_ms=0,
        schema=f"{schema.fingerprint:016x}",
        seed=0,
        num_shards=owners,
        num_buckets=_BUCKETS,
        num_partitions=4,
        kafka={},
        rows_end={},
        shards=shards,
        dense=StoredFile(name="dense/none", bytes=0, checksum=""),
        model={},
        workers={},
    )
    store.create(manifest.name, manifest.encode())


def _digest(store: FileStore, schema: Schema, blobs: Mapping[int, RocksDbStore]) -> int:
    """An order-independent digest of all rows with their state."""
    newest = manifests.newest(store)
    assert newest is not None
    shards, digest = CommittedShards(newest.manifest, schema, blobs), 0
    for index in newest.manifest.shards:
        for part in shards.segments(index, newest.manifest.owners.buckets_of(index)).read(
            shards.state(index)
        ):
            block = newest_of(part.blocks, _BUCKETS)
            order = np.argsort(block.keys.id_U, kind="stable")
            arrays = (block.keys.id_U, block.stamp_ms_L, block.rows_LD, block.state_LA)
            content = b"".join(np.ascontiguousarray(a[order]).tobytes() for a in arrays)
            digest ^= xxhash.xxh3_64_intdigest(content)
    return digest


_HERE = "benchmarks.placement_switch"


def _row(rows: int, workers: int, shards: int) -> Row:
    return Row(
        name=f"{rows} rows of width 16, {workers} owners and {shards} in turns",
        unit="rows",
        subjects=(
            Subject("a commit by another map", f"{_HERE}:move_rows", (rows, workers, shards)),
            Subject("as many bytes in a file, synced", f"{_HERE}:write_file", (rows, 16), "limit"),
        ),
    )


BENCHMARK = Benchmark(
    name="placement-switch",
    summary="How long does training pause while rows move from workers to shards?",
    rows=(_row(1_000_000, 2, 3), _row(1_000_000, 2, 4), _row(1_000_000, 1, 2)),
    slice_s=0.0,
    rounds=3,
    interpretation="""\
The pause is what `placement apply` takes without starting a process: read the moved rows, check them, write
and sync them at the new owner, and create the manifest. Rows that stay are not touched, so the time follows
the share of buckets that move. `rows differ` must be 0: keys, rows, state and stamps are digested before
and after. The restore that follows is measured by `recovery`.""",
)
