"""Exchange embedding rows with TorchRec: a collection's state_dict as a safetensors file, and the ids of its
row numbers.

collection   `embedding_bags.TABLE.weight` or `embeddings.TABLE.weight`, floats [N, D], for each table
ids          `TABLE`, int64 [N]: the id of row n; default: ids 0 to N - 1

An import creates the first commit of an empty home (docs/decisions/0043). Rows start with the optimizer state
of a new row. Dense weights are initial, except those in the file with the same name and shape. No topic was
read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from infra.options import StackOptions, demo, save_options
from param_server.embedding_table import Keys
from param_server.initial_rows import initial_rows
from param_server.key_value_store import RocksDbStore
from param_server.row_block import RowBlock
from param_server.segment_copies import SegmentCopies
from param_server.segments import Segments
from param_server.table import shapes_of
from roostream.cli.checkpoint import checkpoints
from roostream.cli.checkpoint.checkpoints import create_first_commit, importing
from roostream.errors import CheckpointError, SchemaError, nearest
from roostream.models.build import build_model, load_model_config
from roostream.models.config import ModelConfig
from roostream.runtime import manifest as manifests
from roostream.runtime import tensor_file
from roostream.runtime.bucket_map import BucketMap
from roostream.runtime.checkpoint_store import CheckpointStore, sync_path
from roostream.runtime.clock import SystemClock
from roostream.runtime.manifest import Manifest
from roostream.runtime.store_identity import create_store
from roostream.schema.ids import buckets_of
from roostream.schema.registry import register
from roostream.schema.schema import Schema, Table
from roostream.schema.schema_file import load_schema
from trainer.dense_part import dense_checkpoint
from trainer.dense_part.adam import DenseAdam

_WEIGHT = re.compile(r"(?:^|\.)(?:embedding_bags|embeddings)\.([^.]+)\.weight$")


class CollectionRows(NamedTuple):
    """The contents of a collection's file."""

    rows: dict[str, np.ndarray]  # table → float32 [N, D]
    others: dict[str, np.ndarray]  # other tensors by name


def weight_name(table: str) -> str:
    """The name of a table's weight in the state of TorchRec's EmbeddingBagCollection."""
    return f"embedding_bags.{table}.weight"


def read_collection(path: Path, schema: Schema) -> CollectionRows:
    """Read the rows of a collection.

    Raises:
        CheckpointError: not a safetensors file of a collection, or rows that are not finite floats.
        SchemaError: a table that is not in the schema, or rows of another width.
    """
    rows: dict[str, np.ndarray] = {}
    others: dict[str, np.ndarray] = {}
    for name, values in _tensors(path).items():
        if found := _WEIGHT.search(name):
            if found[1] in rows:
                raise CheckpointError(
                    f"{path}: expected table {found[1]!r} once, got it again as {name}; keep one"
                )
            rows[found[1]] = _checked(f"{path}: {name}", found[1], values, schema)
        else:
            others[name] = values
    if not rows:
        raise CheckpointError(
            f"{path}: expected embedding_bags.TABLE.weight of a collection's state_dict, got "
            f"{', '.join(others) or 'nothing'}"
        )
    return CollectionRows(rows, others)


def read_ids(path: Path | None) -> dict[str, np.ndarray]:
    """Read the ids by table, int64 [N], each once; {} without a file.

    Raises:
        CheckpointError: not a valid file of ids.
    """
    found = {} if path is None else _tensors(path)
    for table, id_N in found.items():
        if id_N.dtype != np.int64 or id_N.ndim != 1 or len(np.unique(id_N)) != len(id_N):
            raise CheckpointError(
                f"{path}: {table}: expected int64 [N], each id once, got {id_N.dtype} {list(id_N.shape)}"
                f"{' with repeated ids' if id_N.ndim == 1 else ''}"
            )
    return found


def write_tensors(files: Mapping[Path, Mapping[str, np.ndarray]]) -> None:
    """Write new safetensors files durably, all or none. Raises CheckpointError: one exists or cannot be
    written."""
    with contextlib.ExitStack() as on_error:
        for path, tensors in files.items():
            try:
                with path.open("xb") as file:
                    on_error.callback(path.unlink)
                    file.write(tensor_file.encode(tensors, {}))
                    file.flush()
                    os.fsync(file.fileno())
                sync_path(path.parent)
            except OSError as error:
                raise CheckpointError(
                    f"{path} cannot be written ({error.strerror}); choose a new file"
                ) from None
        on_error.pop_all()


def _tensors(path: Path) -> dict[str, np.ndarray]:
    try:
        return tensor_file.decode(path.read_bytes())[0]
    except OSError as error:
        raise CheckpointError(
            f"{path}: expected a safetensors file, got {error.strerror}; check the path"
        ) from None
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}; save it in float32 by safetensors.torch.save_file") from None


def _checked(what: str, name: str, values: np.ndarray, schema: Schema) -> np.ndarray:
    table = schema.table_by_name.get(name)
    if table is None:
        raise SchemaError(
            f"{what}: expected a table of the schema, got {name!r}{nearest(name, schema.table_by_name)}"
        )
    if values.ndim != 2 or values.shape[1] != table.dim:
        raise SchemaError(
            f"{what}: expected [N, {table.dim}], as [tables.{name}] has dim = {table.dim}, got "
            f"{list(values.shape)}; change one"
        )
    return finite(what, values)


def finite(what: str, values: np.ndarray) -> np.ndarray:
    """Convert to float32. Raises CheckpointError: not floats, or not finite in float32."""
    with np.errstate(over="ignore"):  # an overflow gives infinity, which is checked below
        found = np.ascontiguousarray(values, dtype=np.float32)
    if values.dtype.kind != "f" or not np.isfinite(found).all():
        raise CheckpointError(
            f"{what}: expected finite floats, got {values.dtype} or non-finite values; save them dequantized"
        )
    return found


_MAX_GAPS = 4  # more missing row numbers per row mean that ids are not row numbers


class CollectionExport(NamedTuple):
    """The tables of a commit as a TorchRec collection."""

    tensors: dict[str, np.ndarray]  # embedding_bags.TABLE.weight → float32 [N, D]
    ids: dict[str, np.ndarray]  # table → int64 [N], the ids of its row numbers
    left_out: dict[str, int]  # table → number of rows whose ids have no row number


def collection_of(
    store: CheckpointStore, number: int, home: Path, ids: Mapping[str, np.ndarray], *, make_ids: bool = False
) -> CollectionExport:
    """The live rows of every non-empty table.

    Row n has the id `ids[table][n]`. A table that is not in `ids` uses the id n, or with `make_ids` the n-th
    smallest id. A row number without a row gets the initial values of a new row.

    Raises:
        CheckpointError: the commit is damaged, or the ids of a table are not row numbers and not in `ids`.
        SetupError: a shard whose rows are only in its home is running, or its segments are missing.
    """
    manifest = manifests.load(store, manifests.manifest_name(number)).manifest
    schema = checkpoints.schema_of(store, manifest)
    found = _live(store, manifest, schema, home)
    if unknown := sorted(ids.keys() - schema.table_by_name.keys()):
        raise CheckpointError(f"expected ids of tables of the schema, got ids of {unknown[0]!r}; remove them")
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
    store: CheckpointStore, manifest: manifests.Manifest, schema: Schema, home: Path
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Read the live rows of all shards. Returns, for each table, ids [U] and rows [U, D]."""
    names = {table.id: table.name for table in schema.table_by_name.values()}
    parts: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    for index in manifest.shards:
        with checkpoints.rows_of(store, manifest, schema, index, home) as (segments, state):
            for block in checkpoints.live_rows(segments, state).values():
                for number in np.unique(block["table"]).tolist():
                    in_table_K = block["table"] == number
                    if number in names:
                        parts.setdefault(names[number], []).append(
                            (block["id"][in_table_K], block["row"][in_table_K])
                        )
    ordered = [name for name in schema.table_by_name if name in parts]
    return {
        name: (np.concatenate([i for i, _ in parts[name]]), np.concatenate([r for _, r in parts[name]]))
        for name in ordered
    }


def _numbers(table: Table, id_U: np.ndarray) -> np.ndarray:
    smallest, largest = int(id_U.min()), int(id_U.max())
    if smallest < 0 or largest >= (1 + _MAX_GAPS) * len(id_U) + 1000:
        raise CheckpointError(
            f"table {table.name!r}: expected ids that are row numbers, got {smallest} to {largest} for "
            f"{len(id_U)} rows; give the ids of the row numbers by --ids, or number them with --make-ids"
        )
    return np.arange(largest + 1)


def _numbered(
    table: Table, id_U: np.ndarray, rows_UD: np.ndarray, id_N: np.ndarray, seed: int
) -> tuple[np.ndarray, int]:
    """Rows by row number, [N, D], and how many rows have no row number."""
    order_U = np.argsort(id_U, kind="stable")
    at_N = np.searchsorted(id_U, id_N, sorter=order_U)
    place_N = order_U[np.minimum(at_N, len(id_U) - 1)]
    there_N = id_U[place_N] == id_N
    out_ND = initial_rows(seed, np.full(len(id_N), table.id, np.uint32), id_N, table.dim, table.init_scale)
    out_ND[there_N] = rows_UD[place_N[there_N]]
    return out_ND, len(id_U) - int(there_N.sum())


_SEQ, _INCARNATION = 1, 1


class CollectionImport(NamedTuple):
    """What was imported."""

    num_rows: int
    num_tables: int
    dense_taken: int  # number of dense weights found in the file
    dense_all: int  # number of dense weights of the model


@dataclasses.dataclass(frozen=True, kw_only=True)
class NewDeployment:
    """The deployment whose first commit is created."""

    schema: Schema
    options: StackOptions  # shards, buckets, partitions, seed
    model: ModelConfig
    time_ms: int  # now; `expire_after_ms` of the rows counts from here


def new_deployment(schema: Path | None, model: Path | None, num_shards: int) -> NewDeployment:
    """Settings as of `up`, with this schema (default: the demo's), model (default: the ranker) and number of
    shards.

    Raises:
        ConfigError: the schema or the model cannot be used.
    """
    base = demo()
    overrides = {program: dict(table) for program, table in base.overrides.items()}
    if model is not None:
        for program in ("worker", "serving"):
            overrides.setdefault(program, {})["model"] = str(model.resolve())
    options = dataclasses.replace(
        base, schema=(schema or base.schema).resolve(), num_shards=num_shards, overrides=overrides
    )
    return NewDeployment(
        schema=load_schema(options.schema),
        options=options,
        model=load_model_config(str(model or "")),
        time_ms=SystemClock().now_ms(),
    )


def import_collection(
    collection: CollectionRows,
    ids: Mapping[str, np.ndarray],
    store: CheckpointStore,
    home: Path,
    new: NewDeployment,
    *,
    with_copies: bool = False,
) -> CollectionImport:
    """Make the rows the only commit of `store`, with segments in `home`; `up` continues there with the same
    settings. `with_copies`: `store` gets copies of the segments, which shards with other homes fetch.

    After any other error than those below there is no commit; call again.

    Raises:
        CheckpointError: `ids` does not match the rows, or a dense weight is not finite. Nothing was changed.
        SetupError: the store has commits, or the home has segments. Nothing was changed.
    """
    indices = range(new.options.num_shards)
    blocks = _blocks(collection.rows, ids, new)
    tensors, taken = _dense(collection.others, new)
    with importing(store, home, indices):
        store_id = create_store(store)
        register(store, new.schema)
        shards = {}
        for index in indices:
            copies = SegmentCopies(store, index) if with_copies else None
            shards[index] = _write_shard(blocks, index, home, new, store_id, copies)
        save_options(home, new.options)
        store.put(f"{manifests.INCARNATIONS}/{_INCARNATION:08d}", b"{}")
        manifest = _manifest(store, tensors, shards, new)
        create_first_commit(store, manifest)
    num_rows = sum(map(len, collection.rows.values()))
    weights = sum(name.startswith("model.") for name in tensors)
    return CollectionImport(num_rows, len(collection.rows), taken, weights)


def _blocks(
    rows: Mapping[str, np.ndarray], ids: Mapping[str, np.ndarray], new: NewDeployment
) -> dict[str, RowBlock]:
    """Stack → block with all of its rows."""
    if unknown := ids.keys() - rows.keys():
        raise CheckpointError(
            f"expected ids of tables in the collection, got ids of {sorted(unknown)[0]!r}; remove them"
        )
    out = {}
    for stack, tables in new.schema.stacks.items():
        there = [table for table in tables if table.name in rows]
        if not there:
            continue
        id_of = {table.name: ids.get(table.name, np.arange(len(rows[table.name]))) for table in there}
        for table in there:
            if len(id_of[table.name]) != len(rows[table.name]):
                raise CheckpointError(
                    f"table {table.name!r}: expected {len(rows[table.name])} ids, one per row, got "
                    f"{len(id_of[table.name])}"
                )
        keys = Keys(
            np.concatenate([np.full(len(rows[t.name]), t.id, np.uint32) for t in there]),
            np.concatenate([id_of[t.name] for t in there]),
        )
        states = [
            np.full((len(rows[t.name]), t.rule.state_width(t.dim)), t.rule.first_state, np.float32)
            for t in there
        ]
        out[stack] = RowBlock(
            keys=keys,
            unpublished_K=np.zeros(len(keys), np.uint8),
            stamp_ms_L=np.full(len(keys), new.time_ms, np.int64),
            rows_LD=np.concatenate([rows[t.name] for t in there]),
            state_LA=np.concatenate(states),
        )
    return out


def _write_shard(
    blocks: Mapping[str, RowBlock],
    index: int,
    home: Path,
    new: NewDeployment,
    store_id: str,
    copies: SegmentCopies | None,
) -> dict[str, object]:
    """Write the rows of a shard's buckets as a segment; returns the shard's entry in the manifest."""
    owners = BucketMap.modulo(new.options.buckets, new.options.num_shards)
    own_blocks = {
        stack: block.take(
            owners.owner_B[buckets_of(block.keys.id_U, block.keys.table_U, len(owners.owner_B))] == index
        )
        for stack, block in blocks.items()
    }
    place = home / f"shard-{index}" / "segments"
    place.parent.mkdir(parents=True, exist_ok=True)
    blobs = RocksDbStore(place).open()
    try:
        segments = Segments(
            blobs,
            shapes_of(new.schema),
            new.options.buckets,
            buckets=owners.buckets_of(index),
            store_id=store_id,
        )
        written = segments.write(f"{_SEQ}-{_INCARNATION}", own_blocks, ())
        if copies is not None:
            written = segments.send(written, copies)
    finally:
        blobs.close()
    return {"segments": [segment.plain() for segment in written], "rows_end": {}}


def _dense(others: Mapping[str, np.ndarray], new: NewDeployment) -> tuple[dict[str, np.ndarray], int]:
    """Initial weights and optimizer state, with the weights in `others`; and how many were found there."""
    model = build_model(new.schema, new.model, new.options.seed)
    tensors = dense_checkpoint.snapshot(model, DenseAdam(model.named_parameters(), learning_rate=1e-3))
    taken = 0
    for name, values in others.items():
        names = [t for t in tensors if t.startswith("model.") and f".{t}".endswith(f".{name}")]
        if len(names) == 1 and tensors[names[0]].shape == values.shape and values.dtype.kind == "f":
            tensors[names[0]] = finite(name, values)
            taken += 1
    return tensors, taken


def _manifest(
    store: CheckpointStore,
    tensors: Mapping[str, np.ndarray],
    shards: dict[int, dict[str, object]],
    new: NewDeployment,
) -> Manifest:
    schema, options, model = f"{new.schema.fingerprint:016x}", new.options, dataclasses.asdict(new.model)
    about = {"schema": schema, "seq": str(_SEQ), "incarnation": str(_INCARNATION), "step": "0"}
    data = tensor_file.encode(tensors, {"model": json.dumps(model, sort_keys=True), **about})
    return Manifest(
        seq=_SEQ,
        incarnation=_INCARNATION,
        previous={"seq": 0, "checksum": ""},
        step=0,
        watermark_ms=0,
        schema=schema,
        seed=options.seed,
        num_shards=options.num_shards,
        num_buckets=options.buckets,
        num_partitions=options.partitions,
        kafka={},
        rows_end={},
        shards=shards,
        dense=manifests.store_file(store, manifests.dense_name(_SEQ, _INCARNATION), data),
        model=model,
        workers={},
        time_ms=new.time_ms,
    )
