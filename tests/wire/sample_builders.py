"""A schema with every kind of feature, and random valid samples of it."""

from __future__ import annotations

import tomllib
from typing import Any

import numpy as np

from roostream.schema.schema import Schema
from roostream.schema.schema_file import schema_from_dict
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.block import encode_nro, encode_ro
from roostream.wire.records import Record

RICH = """
[limits]
max_candidates = 40
max_list = 30
[tables.item]
dim = 8
[tables.tag]
dim = 4
[tables.action]
dim = 4
[[ro]]
name = "hour"
default = -1.0
[[ro]]
name = "history"
kind = "sequence"
table = "item"
max_len = 3
columns = { action = "ids", kind = "ids", time = "time_ms" }
column_tables = { action = "action" }
[[ro]]
name = "gap"
[[ro]]
name = "tags"
kind = "weighted_ids"
table = "tag"
[[nro]]
name = "item"
kind = "ids"
table = "item"
[[nro]]
name = "age"
default = 7.0
[[nro]]
name = "topics"
kind = "weighted_ids"
table = "tag"
max_len = 2
[[nro]]
name = "seen"
kind = "sequence"
table = "item"
columns = { time = "time_ms" }
[[label]]
name = "click"
action = "click"
[[label]]
name = "dwell"
action = "read"
fold = "max"
"""


def parse_schema(text: str) -> Schema:
    return schema_from_dict(tomllib.loads(text))


def ids(rng: np.random.Generator, n: int) -> list[int]:
    return [int(v) for v in rng.integers(0, 1 << 64, n, dtype=np.uint64)]


def ro_values(rng: np.random.Generator) -> dict[str, Any]:
    h, t = int(rng.integers(0, 6)), int(rng.integers(0, 4))
    history = {"item": ids(rng, h), "action": ids(rng, h), "kind": ids(rng, h), "time": list(range(h))}
    values: dict[str, Any] = {"hour": float(rng.random()), "gap": None, "history": history}
    values["tags"] = {"ids": ids(rng, t), "weights": rng.random(t).tolist()}
    return {k: v for k, v in values.items() if rng.random() < 0.8}


def nro_columns(rng: np.random.Generator, n: int) -> dict[str, Any]:
    def maybe(value: Any) -> Any:
        return value if rng.random() < 0.8 else None

    def topics() -> dict[str, Any]:
        t = int(rng.integers(0, 5))
        return {"ids": ids(rng, t), "weights": rng.random(t).tolist()}

    def seen() -> dict[str, Any]:
        t = int(rng.integers(0, 3))
        return {"item": ids(rng, t), "time": list(range(t))}

    return {
        "item": [maybe(ids(rng, int(rng.integers(1, 3)))) for _ in range(n)],
        "age": [maybe(float(rng.random())) for _ in range(n)],
        "topics": [maybe(topics()) for _ in range(n)],
        "seen": [maybe(seen()) for _ in range(n)],
    }


def make_sample(schema: Schema, seed: int) -> pb.Sample:
    """Build a random valid sample with up to two parts. It uses some rows of the first part. Optional columns
    may be absent."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(0, 6))
    used = sorted(rng.choice(6, size=n, replace=False).tolist())
    parts = [pb.Part(nro=encode_nro(schema, nro_columns(rng, 6), 6), num_rows=6, rows=used)] if n else []
    m = int(rng.integers(0, 3))
    parts += [pb.Part(nro=encode_nro(schema, nro_columns(rng, m), m), num_rows=m)]
    total, t, e = n + m, len(schema.labels), int(rng.integers(0, 3)) if n + m else 0
    sample = pb.Sample(
        header=pb.Header(
            request_id=f"r{seed}", user_id=3, time_ms=1000 + seed, schema=schema.fingerprint, surface="home"
        ),
        sample_id=ids(rng, 1)[0],
        close_reason=pb.CLOSE_WINDOW,
        close_ms=2000 + seed,
        item_ids=ids(rng, total),
        parts=parts,
        labels=rng.integers(0, 2, total * t).tolist(),
        scores=rng.random(total * t).tolist() if rng.random() < 0.5 else [],
        positions=range(total) if rng.random() < 0.7 else [],
        propensities=rng.random(total).tolist() if rng.random() < 0.5 else [],
        weight=float(rng.integers(0, 3)),
        event_ids=ids(rng, e),
        event_candidates=[0] * e,
        event_actions=[0] * e,
        event_values=[1.5] * e,
        event_times=[1500 + i for i in range(e)],
        actions=["click"] if e else [],
        num_duplicates=int(rng.integers(0, 3)),
    )
    if rng.random() < 0.8:
        sample.ro = encode_ro(schema, ro_values(rng))
    return sample


def record_of(sample: pb.Sample, offset: int = 0, kind: int = wire.SAMPLE) -> Record:
    return Record("samples", offset % 4, offset, sample.close_ms, b"", wire.encode(kind, sample))
