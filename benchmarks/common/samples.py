"""Generated samples of any schema, deterministic by seed. Ids follow a Zipf distribution."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from roostream.schema.ids import key_bytes
from roostream.schema.schema import Feature, Schema
from roostream.schema.schema_file import load_schema
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.block import encode_nro, encode_ro, main_key
from roostream.wire.records import Record

T0_MS = 1_700_000_000_000
SCHEMAS = Path(__file__).resolve().parents[2] / "roostream" / "replay" / "schemas"
DEMO = SCHEMAS / "demo.toml"
EBNERD_LISTS = (
    12,
    14,
    5,
    13,
    6,
    14,
    6,
    22,
    37,
    6,
    5,
    14,
    6,
    7,
    6,
    7,
)  # candidates of sixteen requests of that log
EBNERD_HISTORY = 50
NUM_IDS = 100_000
FIRST_USER = 1 << 20  # users and sample ids differ


def demo_schema() -> Schema:
    return load_schema(DEMO)


def ebnerd_schema() -> Schema:
    return load_schema(SCHEMAS / "ebnerd.toml")


def zipf_ids(rng: np.random.Generator, count: int) -> np.ndarray:
    """int64 [count] in 1..NUM_IDS, the smallest the most frequent."""
    return np.minimum(rng.zipf(1.2, count), NUM_IDS).astype(np.int64)


def ro_values(schema: Schema, rng: np.random.Generator, history: int = 30) -> dict[str, Any]:
    """Request-only values as `encode_ro` takes them; sequences have `history` entries."""
    return {f.name: _value(f, rng, history) for f in schema.ro}


def nro_columns(schema: Schema, rng: np.random.Generator, items_n: np.ndarray) -> dict[str, Any]:
    """Columns of the candidates `items_n`, as `encode_nro` takes them."""
    n = len(items_n)
    out: dict[str, Any] = {}
    for f in schema.nro:
        if f.kind == "float":
            out[f.name] = rng.exponential(2.0, n).astype(np.float32)
        elif f.kind == "ids":
            out[f.name] = items_n if f.name == "item" else zipf_ids(rng, n)
        else:
            out[f.name] = [_value(f, rng, 3) for _ in range(n)]
    return out


def sample(schema: Schema, number: int, *, candidates: int, history: int = 30) -> pb.Sample:
    """Sample `number`: one request with its labels."""
    rng = np.random.default_rng(number)
    items_n, time_ms = zipf_ids(rng, candidates), T0_MS + 100 * number
    part = pb.Part(nro=encode_nro(schema, nro_columns(schema, rng, items_n), candidates), num_rows=candidates)
    return pb.Sample(
        header=pb.Header(
            request_id=f"r{number}", user_id=FIRST_USER + number, time_ms=time_ms, schema=schema.fingerprint
        ),
        sample_id=number + 1,
        close_reason=pb.CLOSE_WINDOW,
        close_ms=time_ms + 20_000,
        ro=encode_ro(schema, ro_values(schema, rng, history)),
        item_ids=items_n.tolist(),
        parts=[part],
        labels=(rng.random(candidates * len(schema.labels)) < 0.1).astype(float).tolist(),
        weight=1.0,
    )


def sample_records(
    schema: Schema, count: int, *, candidates: int | Sequence[int], history: int = 30
) -> list[Record]:
    """`count` samples as the samples topic has them, in four partitions. `candidates`: of each, or of one
    after another, again and again."""
    lists = [candidates] if isinstance(candidates, int) else candidates
    values = [
        wire.encode(wire.SAMPLE, sample(schema, n, candidates=lists[n % len(lists)], history=history))
        for n in range(count)
    ]
    return [
        Record("samples", n % 4, n // 4, T0_MS + 100 * n + 20_000, key_bytes(FIRST_USER + n, 0, ""), v)
        for n, v in enumerate(values)
    ]


def _value(f: Feature, rng: np.random.Generator, length: int) -> Any:
    if f.kind == "float":
        return float(rng.exponential(2.0))
    if f.kind == "ids":
        return zipf_ids(rng, 1).tolist()
    ids = zipf_ids(rng, length).tolist()
    if f.kind == "weighted_ids":
        return {"ids": ids, "weights": rng.random(length).tolist()}
    columns = {
        c: rng.integers(1, 4, length).tolist()
        if kind == "ids"
        else [T0_MS - 60_000 * i for i in range(length)]
        for c, kind in f.columns.items()
    }
    return {main_key(f): ids, **columns}
