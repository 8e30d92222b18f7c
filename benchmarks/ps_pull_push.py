"""How many rows a second can be read and updated?

Pulls and pushes rows with our client and shard, and gathers them with numpy and torch in one process. 26
tables, one stack.

Letters: U keys of a batch (unique), D width.
"""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections.abc import Iterator
from functools import cache

import numpy as np

from benchmarks.common.link_keys import link_key_folder
from benchmarks.common.shard import local_client, remote_client, shard_processes
from benchmarks.harness.benchmark import Benchmark, Row, Subject, Work
from param_server.client import Client
from roostream.schema.schema import Schema
from roostream.schema.schema_file import schema_from_dict
from roostream.wire.lookup import Lookup, StackLookup

NUM_TABLES, ROWS_A_TABLE, DIM = 26, 40_000, 16
_BATCHES = 8


_SCHEMA = {
    "tables": {f"t{n}": {"dim": DIM} for n in range(NUM_TABLES)},
    "label": [{"name": "click", "action": "click"}],
}


@cache
def schema() -> Schema:
    return schema_from_dict(_SCHEMA)


def _lookup(ids: np.ndarray) -> Lookup:
    """These ids in every table."""
    ((stack, tables),) = schema().stacks.items()
    table_U = np.repeat(np.array([t.id for t in tables], np.uint32), len(ids))
    return Lookup({stack: StackLookup(table_U, np.tile(ids, len(tables)), {})})


def batches(ids_a_table: int) -> list[Lookup]:
    rng = np.random.default_rng(0)
    return [
        _lookup(rng.choice(ROWS_A_TABLE, ids_a_table, replace=False).astype(np.int64))
        for _ in range(_BATCHES)
    ]


def _gradients(lookup: Lookup) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {
        stack: rng.normal(0, 1e-3, (len(s.id_U), DIM)).astype(np.float32)
        for stack, s in lookup.stacks.items()
    }


def _fill(client: Client) -> Client:
    for ids in np.split(np.arange(ROWS_A_TABLE, dtype=np.int64), 16):
        lookup = _lookup(ids)
        client.push(lookup, _gradients(lookup), step=1, time_ms=1)
    return client


@contextlib.contextmanager
def _client(where: str) -> Iterator[Client]:
    """`here`: a shard in this process; `there`: in its own, over loopback; `secured`: there, with
    certificates and a token."""
    if where == "here":
        with tempfile.TemporaryDirectory() as folder:
            yield _fill(local_client(schema(), folder, publishing=False))
        return
    with (
        link_key_folder(where == "secured") as keys,
        shard_processes(_SCHEMA, 1, keys) as (shard,),
        remote_client(schema(), [shard.address], key_folder=keys) as client,
    ):
        yield _fill(client)


@contextlib.contextmanager
def pull(where: str, ids_a_table: int) -> Iterator[Work]:
    lookups = itertools.cycle(batches(ids_a_table))  # different ones, so that no rows stay in the cache
    with _client(where) as client:
        yield Work(lambda: client.pull(next(lookups)), NUM_TABLES * ids_a_table)


@contextlib.contextmanager
def push(where: str, ids_a_table: int) -> Iterator[Work]:
    """Gradients are applied when the call returns."""
    pushes = itertools.cycle([(lookup, _gradients(lookup)) for lookup in batches(ids_a_table)])
    with _client(where) as client:
        yield Work(lambda: client.push(*next(pushes), step=1, time_ms=1), NUM_TABLES * ids_a_table)


def _row_numbers(ids_a_table: int) -> list[np.ndarray]:
    """The same keys as row numbers, which need no index."""
    table_U = np.repeat(np.arange(NUM_TABLES), ids_a_table)
    return [next(iter(b.stacks.values())).id_U + table_U * ROWS_A_TABLE for b in batches(ids_a_table)]


@contextlib.contextmanager
def gather_numpy(ids_a_table: int) -> Iterator[Work]:
    """The limit of a pull: fancy indexing where keys are row numbers."""
    rows_ND = np.random.default_rng(0).random((NUM_TABLES * ROWS_A_TABLE, DIM), np.float32)
    numbers = itertools.cycle(_row_numbers(ids_a_table))
    yield Work(lambda: rows_ND[next(numbers)], NUM_TABLES * ids_a_table)


@contextlib.contextmanager
def adagrad_torch(ids_a_table: int) -> Iterator[Work]:
    """torch's sparse Adagrad on one table of all rows, gradients ready as a sparse tensor; keys are row
    numbers."""
    import torch

    torch.set_num_threads(1)
    torch.sparse.check_sparse_tensor_invariants.disable()  # type: ignore[no-untyped-call]
    weight = torch.nn.Parameter(torch.rand(NUM_TABLES * ROWS_A_TABLE, DIM))
    optimizer = torch.optim.Adagrad([weight], lr=0.05)
    values_UD = torch.rand(NUM_TABLES * ids_a_table, DIM) * 1e-3
    gradients = itertools.cycle(
        torch.sparse_coo_tensor(torch.from_numpy(n)[None], values_UD, weight.shape, check_invariants=False)
        for n in _row_numbers(ids_a_table)
    )

    def step() -> None:
        weight.grad = next(gradients)
        optimizer.step()

    yield Work(step, NUM_TABLES * ids_a_table)


_HERE = "benchmarks.ps_pull_push"


def _rows(ids_a_table: int) -> tuple[Row, ...]:
    thousands = f"{26 * ids_a_table / 1000:g} k ids of 26 tables"
    pull, push = (
        Subject("shard in this process", f"{_HERE}:{what}", ("here", ids_a_table))
        for what in ("pull", "push")
    )
    numpy = Subject("numpy indexing, keys are row numbers", f"{_HERE}:gather_numpy", (ids_a_table,), "limit")
    torch = Subject(
        "torch sparse Adagrad, keys are row numbers", f"{_HERE}:adagrad_torch", (ids_a_table,), "peer"
    )
    return (
        Row(name=f"pull {thousands}", unit="rows", clock="cpu", subjects=(pull, numpy)),
        Row(name=f"push and update {thousands}", unit="rows", clock="cpu", subjects=(push, torch)),
        *(_over_loopback(what, thousands, ids_a_table) for what in ("pull", "push")),
    )


def _over_loopback(what: str, thousands: str, ids_a_table: int) -> Row:
    return Row(
        name=f"{what} {thousands}, over loopback",
        unit="rows",
        subjects=(
            Subject("shard over loopback", f"{_HERE}:{what}", ("there", ids_a_table)),
            Subject("the same, certificates and a token", f"{_HERE}:{what}", ("secured", ids_a_table)),
            Subject("the same in this process", f"{_HERE}:{what}", ("here", ids_a_table), "limit"),
        ),
    )


BENCHMARK = Benchmark(
    name="ps-pull-push",
    summary="How many rows a second can be read and updated?",
    rows=(*_rows(400), *_rows(4000)),
    interpretation="""\
The shard has 1.04 M rows of width 16 in 26 tables of one stack, with Adagrad. It finds each key in its
index, while numpy and torch get row numbers; a push also checks gradients and marks rows for the next
commit before it answers. Reading reaches two thirds of plain indexing and more, and updating is three times
as fast as torch's sparse Adagrad. Over loopback a large pull or push is bound by copying, and with
`[link]`'s certificates and a token (docs/operations/security.md) by encryption.""",
)
