"""Rows of a TorchRec collection become the first commit of an empty home (docs/decisions/0046).

Rows begin with the optimizer state of a new row. Dense weights are the model's initial ones, but for those that the file has
under the same name and shape (a whole DLRM's state_dict). Nothing was read of any topic.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from infra.options import StackOptions, demo, save_options
from param_server.embedding_table import Keys
from param_server.key_value_store import RocksDbStore
from param_server.row_block import RowBlock
from param_server.segments import Segments
from param_server.table import shapes_of
from roostream.cli.checkpoint.checkpoint_import import expect_empty
from roostream.cli.checkpoint.collection_files import CollectionRows, finite
from roostream.errors import CheckpointError, SetupError
from roostream.models.build import build_model, load_model_config
from roostream.models.config import ModelConfig
from roostream.runtime import manifest as manifests
from roostream.runtime import tensor_file
from roostream.runtime.bucket_map import BucketMap
from roostream.runtime.checkpoint_store import CheckpointStore
from roostream.runtime.clock import SystemClock
from roostream.runtime.manifest import Manifest
from roostream.schema.ids import buckets_of
from roostream.schema.registry import register
from roostream.schema.schema import Schema
from roostream.schema.schema_file import load_schema
from trainer.dense_part import dense_file
from trainer.dense_part.adam import DenseAdam

_SEQ, _INCARNATION = 1, 1


class Begun(NamedTuple):
    """What came over."""

    num_rows: int
    num_tables: int
    dense_taken: int  # weights of the model that the file had
    dense_all: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Beginning:
    """Of which deployment the commit is."""

    schema: Schema
    options: StackOptions  # shards, buckets, partitions, seed
    model: ModelConfig
    time_ms: int  # of now: what `expire_after_ms` of the rows counts from


def beginning(schema: Path | None, model: Path | None, num_shards: int) -> Beginning:
    """Settings that a stack has of `up`, with this schema (the demo's), model (our ranker) and shards.

    Raises:
        ConfigError: schema or model can't be used.
    """
    base = demo()
    overrides = {program: dict(table) for program, table in base.overrides.items()}
    if model is not None:
        for program in ("worker", "serving"):
            overrides.setdefault(program, {})["model"] = str(model.resolve())
    options = dataclasses.replace(
        base, schema=(schema or base.schema).resolve(), num_shards=num_shards, overrides=overrides
    )
    return Beginning(
        schema=load_schema(options.schema),
        options=options,
        model=load_model_config(str(model or "")),
        time_ms=SystemClock().now_ms(),
    )


def begin(
    collection: CollectionRows,
    ids: Mapping[str, np.ndarray],
    store: CheckpointStore,
    home: Path,
    of: Beginning,
) -> Begun:
    """Make the rows the only commit of `store`, and of `home` what its shards hold; `up` goes on there with the same settings.

    Raises:
        CheckpointError: `ids` has another number of ids than a table has rows, or one twice, or a weight of the model isn't
            finite. Nothing was changed.
        SetupError: the store has commits, or the home has segments. Nothing was changed.

    **If it fails** otherwise: there is no commit yet; empty the home, and call again.
    """
    indices = range(of.options.num_shards)
    blocks = _blocks(collection.rows, ids, of)
    tensors, taken = _dense(collection.others, of)
    expect_empty(store, home, indices)
    register(store, of.schema)
    shards = {index: _write_shard(blocks, index, home, of) for index in indices}
    save_options(home, of.options)
    store.put(f"{manifests.INCARNATIONS}/{_INCARNATION:08d}", b"{}")
    manifest = _manifest(store, tensors, shards, of)
    if not store.create(manifest.name, manifest.encode()):
        raise SetupError(
            f"expected a store without commits, got {manifest.name} meanwhile; stop the trainer that runs there"
        )
    num_rows, weights = (
        sum(map(len, collection.rows.values())),
        sum(name.startswith("model.") for name in tensors),
    )
    return Begun(num_rows, len(collection.rows), taken, weights)


def _blocks(
    rows: Mapping[str, np.ndarray], ids: Mapping[str, np.ndarray], of: Beginning
) -> dict[str, RowBlock]:
    """Stack → all of its rows."""
    if unknown := ids.keys() - rows.keys():
        raise CheckpointError(
            f"expected ids of tables that the collection has, got some of {sorted(unknown)[0]!r}; leave them out"
        )
    out = {}
    for stack, tables in of.schema.stacks.items():
        there = [table for table in tables if table.name in rows]
        if not there:
            continue
        id_of = {table.name: ids.get(table.name, np.arange(len(rows[table.name]))) for table in there}
        for table in there:
            if len(id_of[table.name]) != len(rows[table.name]):
                raise CheckpointError(
                    f"table {table.name!r}: expected {len(rows[table.name])} ids, one a row, got {len(id_of[table.name])}"
                )
        states = [
            np.full((len(rows[t.name]), t.rule.state_width(t.dim)), t.rule.first_state, np.float32)
            for t in there
        ]
        out[stack] = _block(
            Keys(
                np.concatenate([np.full(len(rows[t.name]), t.id, np.uint32) for t in there]),
                np.concatenate([id_of[t.name] for t in there]),
            ),
            np.concatenate([rows[t.name] for t in there]),
            np.concatenate(states),
            of.time_ms,
        )
    return out


def _block(keys: Keys, rows_LD: np.ndarray, state_LA: np.ndarray, time_ms: int) -> RowBlock:
    return RowBlock(
        keys=keys,
        unpublished_K=np.zeros(len(keys), np.uint8),
        stamp_ms_L=np.full(len(keys), time_ms, np.int64),
        rows_LD=rows_LD,
        state_LA=state_LA,
    )


def _write_shard(blocks: Mapping[str, RowBlock], index: int, home: Path, of: Beginning) -> dict[str, object]:
    """The rows of the shard's buckets as a segment; what the manifest says of it."""
    owners = BucketMap.modulo(of.options.buckets, of.options.num_shards)
    mine = {
        stack: block.take(
            owners.owner_B[buckets_of(block.keys.id_U, block.keys.table_U, len(owners.owner_B))] == index
        )
        for stack, block in blocks.items()
    }
    place = home / f"shard-{index}" / "segments"
    place.parent.mkdir(parents=True, exist_ok=True)
    blobs = RocksDbStore(place).open()
    try:
        segments = Segments(blobs, shapes_of(of.schema), of.options.buckets, buckets=owners.buckets_of(index))
        written = segments.write(f"{_SEQ}-{_INCARNATION}", mine, ())
    finally:
        blobs.close()
    return {"segments": [segment._asdict() for segment in written], "rows_end": {}}


def _dense(others: Mapping[str, np.ndarray], of: Beginning) -> tuple[dict[str, np.ndarray], int]:
    """Weights and optimizer state of a model at its beginning, with what `others` has of it; how many weights those were."""
    model = build_model(of.schema, of.model, of.options.seed)
    tensors = dense_file.take(model, DenseAdam(model.named_parameters(), learning_rate=1e-3))
    taken = 0
    for name, values in others.items():
        its = [t for t in tensors if t.startswith("model.") and f".{t}".endswith(f".{name}")]
        if len(its) == 1 and tensors[its[0]].shape == values.shape and values.dtype.kind == "f":
            tensors[its[0]] = finite(name, values)
            taken += 1
    return tensors, taken


def _manifest(
    store: CheckpointStore,
    tensors: Mapping[str, np.ndarray],
    shards: dict[int, dict[str, object]],
    of: Beginning,
) -> Manifest:
    schema, options, model = f"{of.schema.fingerprint:016x}", of.options, dataclasses.asdict(of.model)
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
        time_ms=of.time_ms,
    )
