"""Requests of any schema, random and equal for equal seeds: what serving gets, and the samples that training gets of them.

Letters: n candidates.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from roostream.schema.schema import Feature, Schema
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.block import encode_nro, encode_ro, main_key
from roostream.wire.lookup import Lookup
from roostream.wire.records import Record

TIME_MS = 1_700_000_000_000
_MAX_ENTRIES, _NUM_IDS, _OLDEST_MS = 9, 40, 10**9


class ExampleRequest(NamedTuple):
    ro: bytes
    nro: bytes
    item_n: np.ndarray  # int64


def example_request(schema: Schema, num_candidates: int, seed: int) -> ExampleRequest:
    """Some floats and lists are missing, some lists are empty."""
    random, n = np.random.default_rng(seed), num_candidates
    ro = {f.name: _value(f, random) for f in schema.ro}
    nro = {f.name: [_value(f, random) for _ in range(n)] for f in schema.nro}
    return ExampleRequest(encode_ro(schema, ro), encode_nro(schema, nro, n), random.integers(0, _NUM_IDS, n))


def example_sample(schema: Schema, request: ExampleRequest, at: int) -> Record:
    """Of the request, as record `at`; every third candidate engaged."""
    n, tasks = len(request.item_n), len(schema.labels)
    sample = pb.Sample(
        header=pb.Header(request_id=f"r{at}", user_id=7, time_ms=TIME_MS, schema=schema.fingerprint),
        sample_id=at + 1,
        close_ms=TIME_MS + 1000,
        ro=request.ro,
        item_ids=request.item_n.tolist(),
        parts=[pb.Part(nro=request.nro, num_rows=n)],
        labels=[float((i + at) % 3 == 0) for i in range(n) for _ in range(tasks)],
        weight=1.0,
    )
    return Record("samples", 0, at, TIME_MS + 1000, b"", wire.encode(wire.SAMPLE, sample))


def example_rows(schema: Schema, lookup: Lookup) -> dict[str, np.ndarray]:
    """Stack → float32 [U, D], a function of table and id alone."""
    out = {}
    for stack, part in lookup.stacks.items():
        dim = schema.stacks[stack][0].dim
        phase_UD = (part.id_U.astype(np.float64) * 0.7 + part.table_U % 97)[:, None] * np.arange(1, dim + 1)
        out[stack] = (0.5 * np.sin(phase_UD)).astype(np.float32)
    return out


def _value(f: Feature, random: np.random.Generator) -> object:
    missing = random.random() < 0.1
    if not f.is_list:
        return float("nan") if missing else float(np.float32(random.exponential(2.0)))
    if missing:
        return None
    length = int(random.integers(0, _MAX_ENTRIES + 1))
    ids = random.integers(0, _NUM_IDS, length).tolist()
    if f.kind == "ids":
        return ids
    if f.kind == "weighted_ids":
        return {"ids": ids, "weights": random.exponential(1.0, length).tolist()}
    ids_of = {c: random.integers(0, 3, length).tolist() for c in f.id_columns}
    times_of = {
        c: (TIME_MS - np.sort(random.integers(0, _OLDEST_MS, length))).tolist() for c in f.time_columns
    }
    return {main_key(f): ids, **ids_of, **times_of}
