"""Example schemas for tests of models, and random batches for any schema."""

from __future__ import annotations

from typing import Any

import numpy as np

from roostream.models.inputs import Inputs, build_inputs
from roostream.schema.schema import Schema
from roostream.schema.schema_file import schema_from_dict
from roostream.wire.batch import TEXT, Batch
from roostream.wire.jagged import Jagged
from roostream.wire.lookup import Lookup, build_lookup

NOW_MS = 1_700_000_000_000
LABELS = [{"name": "click", "action": "click"}, {"name": "long_read", "action": "read", "threshold": 30.0}]
TABLES = {"item": {"dim": 4}, "action": {"dim": 2}, "user": {"dim": 6, "rule": "rowwise_adagrad"}}
HISTORY = {
    "name": "history",
    "kind": "sequence",
    "table": "item",
    "columns": {"action": "ids", "time": "time_ms"},
    "column_tables": {"action": "action"},
}
ITEM = {"name": "item", "kind": "ids", "table": "item"}
RANKS = [{"output": f"ctr_{op}", "input": "ctr", "op": op} for op in ("rank", "share")]

CASES: dict[str, dict[str, Any]] = {
    "everything": {
        "tables": TABLES,
        "ro": [
            {"name": "user", "kind": "ids", "table": "user"},
            HISTORY,
            {"name": "topics", "kind": "weighted_ids", "table": "user"},
            {"name": "gap_s", "default": 1e6},
            {"name": "hour"},
        ],
        "nro": [ITEM, {"name": "tags", "kind": "ids", "table": "action"}, {"name": "ctr"}, {"name": "age_s"}],
        "transform": RANKS,
    },
    "plain history": {
        "tables": {"item": {"dim": 4}},
        "ro": [{"name": "history", "kind": "sequence", "table": "item", "columns": {"action": "ids"}}],
        "nro": [ITEM],
    },
    "history without candidate ids": {"tables": TABLES, "ro": [HISTORY], "nro": [{"name": "ctr"}]},
    "candidate sequence": {
        "tables": TABLES,
        "nro": [{"name": "viewers", "kind": "sequence", "table": "user", "columns": {"time": "time_ms"}}],
    },
    "floats only": {"ro": [{"name": "hour"}], "nro": [{"name": "ctr"}], "transform": RANKS},
    "request only": {
        "tables": TABLES,
        "ro": [{"name": "hour"}, {"name": "user", "kind": "ids", "table": "user"}],
    },
    "candidate only": {"tables": TABLES, "nro": [ITEM, {"name": "ctr"}]},
    "one float": {"nro": [{"name": "ctr"}]},
}


def make_schema(case: str, labels: int = 2) -> Schema:
    """Build the schema of an entry of `CASES`, with the first `labels` labels."""
    return schema_from_dict({**CASES[case], "label": LABELS[:labels]})


def make_batch(schema: Schema, counts: list[int], seed: int = 0, *, longest: int = 7) -> Batch:
    """Build a random batch with one request of n candidates for each n in `counts`.

    Some floats and lists are missing. `longest` limits the lists of the request.
    """
    rng = np.random.default_rng(seed)
    r, b, t = len(counts), sum(counts), len(schema.labels)
    ro_float, ro_present = _floats(schema, "ro", r, rng)
    nro_float, nro_present = _floats(schema, "nro", b, rng)
    ids_R = np.arange(r, dtype=np.int64)
    return Batch(
        schema=schema,
        ro_float_RF=ro_float,
        ro_present_RF=ro_present,
        nro_float_BF=nro_float,
        nro_present_BF=nro_present,
        ro_lists=_lists(schema, "ro", r, rng, longest),
        nro_lists=_lists(schema, "nro", b, rng, 3),
        num_candidates_R=np.array(counts, dtype=np.int32),
        request_index_B=np.repeat(ids_R, counts),
        item_B=rng.integers(0, 40, b),
        label_BT=(rng.random((b, t)) < 0.3).astype(np.float32),
        label_before_BT=np.full((b, t), np.nan, dtype=np.float32),
        weight_BT=rng.choice(np.array([0.0, 1.0, 2.5], dtype=np.float32), (b, t), p=[0.1, 0.8, 0.1]),
        position_B=np.zeros(b, dtype=np.int32),
        propensity_B=np.ones(b, dtype=np.float32),
        served_score_BT=np.full((b, t), np.nan, dtype=np.float32),
        time_ms_R=NOW_MS + 1000 * ids_R,
        close_ms_R=NOW_MS + 1000 * ids_R,
        oldest_engagement_ms_R=0 * ids_R,
        sample_id_R=ids_R,
        surface_R=np.array([b"front", b"mail", b""], dtype=TEXT)[ids_R % 3],
        correction_R=np.zeros(r, dtype=np.bool_),
        partition_R=np.zeros(r, dtype=np.int32),
        offset_R=ids_R,
    )


def make_rows(schema: Schema, lookup: Lookup, scale: float = 0.5) -> dict[str, np.ndarray]:
    """Build embedding rows that depend on (table, id) only, so a request gets the same rows in any batch."""
    out = {}
    for stack, part in lookup.stacks.items():
        dim = schema.stacks[stack][0].dim
        phase = (part.id_U.astype(np.float64) * 0.7 + part.table_U % 97)[:, None] * np.arange(1, dim + 1)
        out[stack] = (scale * np.sin(phase)).astype(np.float32)
    return out


def inputs_of(batch: Batch, *, train: bool = False) -> Inputs:
    lookup = build_lookup(batch)
    return build_inputs(batch, lookup, make_rows(batch.schema, lookup), train=train)


def _floats(schema: Schema, side: str, n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    features = schema.floats(side)  # type: ignore[arg-type]
    present = rng.random((n, len(features))) < 0.9
    default = np.array([f.default for f in features], dtype=np.float32)
    return np.where(present, rng.exponential(2.0, present.shape), default).astype(np.float32), present


def _lists(schema: Schema, side: str, n: int, rng: np.random.Generator, longest: int) -> Jagged:
    features = schema.lists(side)  # type: ignore[arg-type]
    present = rng.random((len(features), n)) < 0.8
    lengths = np.where(present, rng.integers(0, longest + 1, present.shape), 0).astype(np.int32)
    columns = {}
    for f, length in zip(features, lengths.sum(axis=1), strict=True):
        for c in f.id_columns:
            columns[f"{f.name}.{c}"] = rng.integers(0, 3, length)
        for c in f.time_columns:
            columns[f"{f.name}.{c}"] = NOW_MS - rng.integers(0, 10**9, length)
    total = int(lengths.sum())
    weighted = any(f.kind == "weighted_ids" for f in features)
    return Jagged(
        keys=tuple(f.name for f in features),
        lengths_KN=lengths,
        values=rng.integers(0, 40, total),
        present_KN=present,
        weights=rng.random(total).astype(np.float32) if weighted else None,
        columns=columns,
    )
