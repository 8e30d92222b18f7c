"""What does reading a row from a bounded cache cost?

Gathers the rows of a request from serving's row cache and from a full replica, and copies the same numbers
without a lookup.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np

from benchmarks.harness.benchmark import Benchmark, Row, Subject, Work
from param_server.embedding_table import Keys
from param_server.kernels import take_rows
from param_server.replica.replica import Replica
from param_server.replica.row_cache import CachePolicy, RowCache
from param_server.replica.shard_reads import ShardReads
from roostream.runtime.clock import SystemClock
from roostream.runtime.rpc.transport import Answer, InMemoryTransport
from roostream.schema.schema import Schema
from roostream.schema.schema_file import schema_from_dict
from roostream.wire.lookup import Lookup, StackLookup

_LOOKUPS = 64  # different ones, by turns


def schema_of(width: int) -> Schema:
    return schema_from_dict(
        {"tables": {"item": {"dim": width}}, "label": [{"name": "click", "action": "click"}]}
    )


def rows_of(schema: Schema, num_rows: int) -> tuple[str, Keys, np.ndarray]:
    """(stack, keys, rows)."""
    stack, (table,) = next(iter(schema.stacks.items()))
    id_N = np.random.default_rng(0).permutation(num_rows).astype(np.int64)
    return (
        stack,
        Keys(np.full(num_rows, table.id, np.uint32), id_N),
        np.ones((num_rows, table.dim), np.float32),
    )


def lookups_of(stack: str, keys: Keys, num_keys: int) -> list[Lookup]:
    """Each of keys that have a row, without repetition."""
    generator = np.random.default_rng(1)
    chosen = [generator.choice(len(keys), num_keys, replace=False) for _ in range(_LOOKUPS)]
    return [Lookup({stack: StackLookup(keys.table_U[at_U], keys.id_U[at_U], {})}) for at_U in chosen]


def gathers(rows: Replica | RowCache, lookups: list[Lookup], num_keys: int) -> Work:
    """All lookups, one after the other."""

    def step() -> None:
        for lookup in lookups:
            rows.gather(lookup)

    return Work(step, _LOOKUPS * num_keys)


@contextlib.contextmanager
def private(num_rows: int, width: int, num_keys: int) -> Iterator[Work]:
    schema = schema_of(width)
    stack, keys, rows_ND = rows_of(schema, num_rows)
    replica = Replica(schema, 0)
    replica.tables[stack].reserve(len(keys))
    replica.tables[stack].put(keys, rows_ND)
    yield gathers(replica, lookups_of(stack, keys, num_keys), num_keys)


@contextlib.contextmanager
def cached(num_rows: int, width: int, num_keys: int) -> Iterator[Work]:
    """All requested rows are present."""
    schema = schema_of(width)
    stack, keys, _ = rows_of(schema, num_rows)

    def shard(method: str, header: object, arrays: list[np.ndarray]) -> Answer:
        n = len(arrays[1])
        return {"incarnation": 1}, [
            np.ones((n, width), np.float32),
            np.ones(n, np.uint8),
            np.ones(n, np.uint64),
        ]

    reads = ShardReads([InMemoryTransport(shard)], 64, 1.0, SystemClock())
    cache = RowCache(schema, 0, reads, CachePolicy(max_bytes=num_rows * (4 * width + 200)))
    cache.bootstrap([])
    work = gathers(cache, lookups_of(stack, keys, num_keys), num_keys)
    work.step()
    yield work


@contextlib.contextmanager
def copied(num_rows: int, width: int, num_keys: int) -> Iterator[Work]:
    """Places are known: nothing is looked up, nothing is locked."""
    _, keys, rows_ND = rows_of(schema_of(width), num_rows)
    generator = np.random.default_rng(1)
    chosen = [generator.choice(len(keys), num_keys, replace=False) for _ in range(_LOOKUPS)]

    def step() -> None:
        for at_U in chosen:
            take_rows(rows_ND, at_U)

    yield Work(step, _LOOKUPS * num_keys)


_HERE = "benchmarks.row_gather"


def _gather(num_rows: int, width: int, num_keys: int) -> Row:
    sizes = (num_rows, width, num_keys)
    return Row(
        name=f"{num_keys} keys of {num_rows:,} rows, width {width}",
        unit="rows",
        clock="cpu",
        subjects=(
            Subject("a cache, all there", f"{_HERE}:cached", sizes),
            Subject("a full replica", f"{_HERE}:private", sizes, "peer"),
            Subject("copied, places known", f"{_HERE}:copied", sizes, "limit"),
        ),
    )


BENCHMARK = Benchmark(
    name="row-gather",
    summary="What does reading a row from a bounded cache cost?",
    rows=(_gather(10_000, 16, 300), _gather(1_000_000, 16, 300), _gather(1_000_000, 16, 3000)),
    interpretation="""\
Rows of one lookup are gathered from a cache that holds all of them, from a full replica, and by a plain
copy with known row numbers. With few keys the call costs more than the rows. With a table beyond the
processor's caches, reaching each row dominates. Nothing is written during the measurement. The results
below also have a table shared by several processes; it was slower than a private table and was withdrawn
together with its code, so it is no longer measured.""",
)
