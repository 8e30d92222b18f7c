"""A reference implementation of sample decoding with protobuf and `decode_block` only. The decoder's kernels
must equal it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from roostream.errors import WireError
from roostream.schema.ids import signed
from roostream.schema.schema import Schema
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.batch import Batch
from roostream.wire.block import check_block, decode_block, encode_nro, encode_ro, main_key
from roostream.wire.decode import Decoder
from roostream.wire.jagged import Jagged
from roostream.wire.records import Record

Samples = Callable[[int], list[pb.Sample]]
ToRecord = Callable[..., Record]


def make_decoder(schema: Schema, *others: Schema) -> Decoder:
    known = {s.fingerprint: s for s in (schema, *others)}
    return Decoder(schema, known.get)


def check_reference(schema: Schema, value: bytes) -> pb.Sample:
    """Parse and check a sample as the decoder must. Raise WireError with a reason if it is invalid."""
    limits = schema.limits
    if len(value) < 2:
        raise WireError("undecodable", "")
    if value[0] != wire.SAMPLE or value[1] != wire.VERSION:
        raise WireError("unknown_type", "")
    if len(value) > limits.max_sample_bytes:
        raise WireError("oversized", "")
    sample = wire.decode(value)[1]
    assert isinstance(sample, pb.Sample)
    for block in (sample.ro, *(p.nro for p in sample.parts)):
        if not block:
            continue
        try:
            pb.Block.FromString(block)
        except Exception:
            raise WireError("undecodable", "") from None
    if sample.header.schema != schema.fingerprint:
        raise WireError("unknown_schema", "")
    check_columns(schema, sample)
    check_block(schema, "ro", sample.ro, 1, limits)
    for part in sample.parts:
        check_block(schema, "nro", part.nro, part.num_rows, limits)
    return sample


def check_columns(schema: Schema, s: pb.Sample) -> None:
    n, t, e = len(s.item_ids), len(schema.labels), len(s.event_ids)
    used = 0
    for part in s.parts:
        rows = list(part.rows) or list(range(min(part.num_rows, schema.limits.max_candidates + 1)))
        used += len(rows)
        if rows != sorted(set(rows)) or any(r >= part.num_rows for r in rows):
            raise WireError("bad_shape", "rows")
    if n > schema.limits.max_candidates:
        raise WireError("oversized", "candidates")
    optional = [(s.labels_before, n * t), (s.scores, n * t), (s.positions, n), (s.propensities, n)]
    columns = (s.event_candidates, s.event_actions, s.event_values, s.event_times)
    if (
        used != n
        or len(s.labels) != n * t
        or any(len(c) not in (0, m) for c, m in optional)
        or any(len(c) != e for c in columns)
    ):
        raise WireError("bad_shape", "columns")
    if any(c >= n for c in s.event_candidates) or any(a >= len(s.actions) for a in s.event_actions):
        raise WireError("bad_shape", "events")
    if any(p > 0x7FFFFFFF for p in s.positions):
        raise WireError("bad_shape", "positions")
    numbers = [*s.labels, *s.propensities, s.weight, *s.event_values, *s.labels_before]
    if not np.isfinite(numbers).all() or np.isinf(list(s.scores)).any():
        raise WireError("non_finite", "numbers")
    if not 0 <= s.weight <= wire.MAX_WEIGHT or not all(0 < p <= 1 for p in s.propensities):
        raise WireError("bad_number", "weights")


def assert_same_floats(
    got: np.ndarray, present: np.ndarray, expected: list[float | None], default: float
) -> None:
    assert present.tolist() == [v is not None and not np.isnan(v) for v in expected]
    filled = [default if v is None or np.isnan(v) else v for v in expected]
    assert got.tolist() == np.array(filled, np.float32).tolist()


def assert_same_lists(schema: Schema, side: str, lists: Jagged, name: str, expected: list[Any]) -> None:
    f = next(f for f in getattr(schema, side) if f.name == name)
    cut = f.max_len or schema.limits.max_list
    k = lists.index(name)
    assert lists.present_KN[k].tolist() == [v is not None for v in expected]
    keys = {"": "", "weights": "weights", **{c: c for c in f.columns}}
    for key in keys:
        flat: list[Any] = []
        for value in expected:
            if value is None:
                continue
            if isinstance(value, list):
                entries = value if not key else [1.0] * len(value)
            else:
                main = main_key(f) if f.kind == "sequence" else "ids"
                entries = value[main] if not key else value.get(key, [1.0] * len(value[main]))
            flat += entries[:cut]
        if not key:
            assert lists.values_of(name).tolist() == flat
            assert lists.lengths_KN[k].sum() == len(flat)
        elif key == "weights":
            weights = lists.weights_of(name)
            assert weights is None or weights.tolist() == np.array(flat, np.float32).tolist()
        else:
            assert lists.columns[f"{name}.{key}"].tolist() == flat


def assert_equals_reference(schema: Schema, batch: Batch, kept: list[pb.Sample]) -> None:
    ro = [decode_block(schema, "ro", s.ro, 1) for s in kept]
    for i, f in enumerate(schema.floats("ro")):
        assert_same_floats(
            batch.ro_float_RF[:, i], batch.ro_present_RF[:, i], [v.get(f.name) for v in ro], f.default
        )
    for f in schema.lists("ro"):
        assert_same_lists(schema, "ro", batch.ro_lists, f.name, [v.get(f.name) for v in ro])
    nro: dict[str, list[Any]] = {f.name: [] for f in schema.nro}
    for s in kept:
        for part in s.parts:
            block = decode_block(schema, "nro", part.nro, part.num_rows)
            for name, column in block.items():
                nro[name] += [column[row] for row in (part.rows or range(part.num_rows))]
    for i, f in enumerate(schema.floats("nro")):
        assert_same_floats(batch.nro_float_BF[:, i], batch.nro_present_BF[:, i], nro[f.name], f.default)
    for f in schema.lists("nro"):
        assert_same_lists(schema, "nro", batch.nro_lists, f.name, nro[f.name])
    assert_same_scalars(batch, kept, len(schema.labels))


def assert_same_scalars(batch: Batch, kept: list[pb.Sample], t: int) -> None:
    def column(values: list[list[float]], dtype: type = np.float32) -> list[float]:
        return np.array([v for row in values for v in row], dtype).tolist()

    n = [len(s.item_ids) for s in kept]
    assert batch.num_candidates_R.tolist() == n
    assert batch.item_B.tolist() == [signed(i) for s in kept for i in s.item_ids]
    assert batch.request_index_B.tolist() == [r for r, count in enumerate(n) for _ in range(count)]
    assert batch.label_BT.ravel().tolist() == column([list(s.labels) for s in kept])
    assert batch.weight_BT.ravel().tolist() == column(
        [[s.weight or 1.0] * (len(s.item_ids) * t) for s in kept]
    )
    assert batch.position_B.tolist() == column(
        [list(s.positions) or [-1] * len(s.item_ids) for s in kept], np.int32
    )
    assert batch.propensity_B.tolist() == column(
        [list(s.propensities) or [1.0] * len(s.item_ids) for s in kept]
    )
    scores = [list(s.scores) or [np.nan] * (len(s.item_ids) * t) for s in kept]
    np.testing.assert_array_equal(batch.served_score_BT.ravel(), column(scores))
    assert batch.time_ms_R.tolist() == [s.header.time_ms for s in kept]
    assert batch.close_ms_R.tolist() == [s.close_ms for s in kept]
    assert batch.sample_id_R.tolist() == [signed(s.sample_id) for s in kept]
    assert batch.oldest_engagement_ms_R.tolist() == [min(s.event_times, default=0) for s in kept]


def valid_sample(schema: Schema) -> pb.Sample:
    nro = encode_nro(schema, {"age": [1.0, 2.0], "item": [[1], [2]]}, 2)
    ro = encode_ro(schema, {"hour": 1.0, "tags": {"ids": [1], "weights": [0.5]}})
    return pb.Sample(
        header=pb.Header(schema=schema.fingerprint),
        item_ids=[1, 2],
        labels=[0.0] * 4,
        parts=[pb.Part(nro=nro, num_rows=2)],
        ro=ro,
        actions=["click"],
    )
