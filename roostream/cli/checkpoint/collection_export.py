"""Rows of a commit as a TorchRec collection's state_dict (roostream/cli/checkpoint/collection_files.py)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from param_server.initial_rows import initial_rows
from roostream.cli.checkpoint import checkpoints
from roostream.cli.checkpoint.collection_files import weight_name
from roostream.errors import CheckpointError
from roostream.runtime import manifest as manifests
from roostream.runtime.checkpoint_store import CheckpointStore
from roostream.schema.schema import Schema, Table

_SPARSE = 4  # row numbers that have no row, a row that is there: more are hardly row numbers


class CollectionExport(NamedTuple):
    """Of a commit."""

    tensors: dict[str, np.ndarray]  # embedding_bags.TABLE.weight → float32 [N, D]
    ids: dict[str, np.ndarray]  # table → int64 [N], of its row numbers
    left_out: dict[str, int]  # table → rows whose ids have no row number


def collection_of(
    store: CheckpointStore, number: int, home: Path, ids: Mapping[str, np.ndarray], *, make_ids: bool = False
) -> CollectionExport:
    """The live rows of every table that has any. Row n is that of id `ids[table][n]`; of tables without, of id n, or with
    `make_ids` of the n-th smallest id there. A row number without a row holds what a new row would.

    Raises:
        CheckpointError: a part of the commit is damaged, or ids of a table aren't row numbers and `ids` has none.
        SetupError: a shard runs, or its segments aren't there.
    """
    manifest = manifests.load(store, manifests.manifest_name(number)).manifest
    schema = checkpoints.schema_of(store, manifest)
    found = _live(manifest, schema, home)
    if unknown := sorted(ids.keys() - schema.table_by_name.keys()):
        raise CheckpointError(
            f"expected ids of tables of the schema, got some of {unknown[0]!r}; leave them out"
        )
    out = CollectionExport({}, {}, {})
    for name, (id_U, rows_UD) in found.items():
        table = schema.table_by_name[name]
        id_N = ids.get(name, np.unique(id_U) if make_ids else None)
        id_N = _numbers(table, id_U) if id_N is None else id_N
        out.tensors[weight_name(name)], num_left = _numbered(table, id_U, rows_UD, id_N, manifest.seed)
        out.ids[name] = id_N
        if num_left:
            out.left_out[name] = num_left
    return out


def _live(
    manifest: manifests.Manifest, schema: Schema, home: Path
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Table → ids [U] and rows [U, D], of all shards."""
    names = {table.id: table.name for table in schema.table_by_name.values()}
    parts: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    for index in manifest.shards:
        with checkpoints.shard_segments(manifest, schema, index, home) as (segments, state):
            for block in checkpoints.live_rows(segments, state).values():
                for number in np.unique(block["table"]).tolist():
                    its_K = block["table"] == number
                    if number in names:
                        parts.setdefault(names[number], []).append((block["id"][its_K], block["row"][its_K]))
    ordered = [name for name in schema.table_by_name if name in parts]
    return {
        name: (np.concatenate([i for i, _ in parts[name]]), np.concatenate([r for _, r in parts[name]]))
        for name in ordered
    }


def _numbers(table: Table, id_U: np.ndarray) -> np.ndarray:
    least, most = int(id_U.min()), int(id_U.max())
    if least < 0 or most >= (1 + _SPARSE) * len(id_U) + 1000:
        raise CheckpointError(
            f"table {table.name!r}: expected ids that are row numbers, got {least} to {most} for {len(id_U)} rows; "
            "say which id each row number is by --ids, or let --make-ids number them"
        )
    return np.arange(most + 1)


def _numbered(
    table: Table, id_U: np.ndarray, rows_UD: np.ndarray, id_N: np.ndarray, seed: int
) -> tuple[np.ndarray, int]:
    """Rows by their numbers, [N, D], and how many rows have none."""
    order_U = np.argsort(id_U, kind="stable")
    at_N = np.searchsorted(id_U, id_N, sorter=order_U)
    place_N = order_U[np.minimum(at_N, len(id_U) - 1)]
    there_N = id_U[place_N] == id_N
    out_ND = initial_rows(seed, np.full(len(id_N), table.id, np.uint32), id_N, table.dim, table.init_scale)
    out_ND[there_N] = rows_UD[place_N[there_N]]
    return out_ND, len(id_U) - int(there_N.sum())
