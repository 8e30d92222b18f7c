"""The arrays that serving scores equal, bit for bit, the arrays that training decodes from the logged
bytes."""

from __future__ import annotations

import dataclasses
import tomllib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roostream.errors import WireError
from roostream.schema.schema import Schema
from roostream.schema.schema_file import schema_from_dict
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.batch import Batch
from roostream.wire.block import (
    NO_COLUMNS,
    columns_of,
    decode_block,
    encode_nro,
    flat_values,
    nro_columns,
    pack,
    ro_columns,
)
from roostream.wire.decode import Decoder
from roostream.wire.records import Record
from serving import request_batch
from serving.request_batch import (
    RequestColumns,
    build_batch,
    checked,
    fast_checked_columns,
    precompile,
    read_request,
)
from tests.wire.sample_builders import RICH

NOW_MS = 1_700_000_000_000
KINDS = {
    "float": "",
    "ids": 'kind = "ids"\ntable = "t"',
    "weighted_ids": 'kind = "weighted_ids"\ntable = "t"',
    "sequence": 'kind = "sequence"\ntable = "t"\ncolumns = { a = "ids", b = "time_ms", c = "time_ms" }',
}
ID = st.integers(-(1 << 63), (1 << 64) - 1)
FLOAT = st.none() | st.floats(allow_nan=True, allow_infinity=False, width=32)


@st.composite
def schemas(draw: st.DrawFn) -> Schema:
    """Strategy of schemas with request and candidate features of any kind, some with `max_len` or a
    default."""
    text = '[limits]\nmax_list = 6\n[tables.t]\ndim = 2\n[[label]]\nname = "y"\naction = "y"\n'
    for side in ("ro", "nro"):
        for i, kind in enumerate(draw(st.lists(st.sampled_from(list(KINDS)), max_size=4))):
            text += f'[[{side}]]\nname = "{side}{i}"\n{KINDS[kind]}\n'
            if kind == "float":
                text += f"default = {draw(st.sampled_from([0.0, -2.5]))}\n"
            elif draw(st.booleans()):
                text += "max_len = 2\n"
    return schema_from_dict(tomllib.loads(text))


@st.composite
def values(draw: st.DrawFn, kind: str) -> Any:
    if kind == "float":
        return draw(FLOAT)
    if draw(st.booleans()):
        return None
    n = draw(st.integers(0, 6))
    ids = st.lists(ID, min_size=n, max_size=n)
    if kind == "ids":
        return draw(ids)
    if kind == "weighted_ids":
        return {
            "ids": draw(ids),
            "weights": draw(st.lists(st.floats(-100, 100, width=32), min_size=n, max_size=n)),
        }
    times = st.lists(st.integers(-(1 << 63), (1 << 63) - 1), min_size=n, max_size=n)
    return {"t": draw(ids), "a": draw(ids), "b": draw(times), "c": draw(times)}


@st.composite
def requests(draw: st.DrawFn, schema: Schema) -> RequestColumns:
    n = draw(st.integers(1, 4))
    ro = {f.name: draw(values(f.kind)) for f in schema.ro}
    nro = {f.name: [draw(values(f.kind)) for _ in range(n)] for f in schema.nro}
    flat = [f.name for f in schema.nro if f.kind == "ids"] if draw(st.booleans()) else []
    nro |= {name: np.arange(n) for name in flat}
    item_ids = np.array(draw(st.lists(st.integers(0, 99), min_size=n, max_size=n)), dtype=np.int64)
    return RequestColumns(ro_columns(schema, ro), nro_columns(schema, nro, n), item_ids, NOW_MS)


def as_record(schema: Schema, request: RequestColumns, at: int) -> Record:
    """Return the sample that the joiner makes of this request."""
    n = len(request.item_ids)
    sample = pb.Sample(
        header=pb.Header(request_id=f"r{at}", time_ms=request.time_ms, schema=schema.fingerprint),
        close_ms=NOW_MS,
        ro=pack(request.ro),
        item_ids=request.item_ids.tolist(),
        parts=[pb.Part(nro=pack(request.nro), num_rows=n)],
        labels=[0.0] * n,
    )
    return Record("samples", 0, at, NOW_MS, b"", wire.encode(wire.SAMPLE, sample))


def assert_equal(built: Batch, decoded: Batch, fields: tuple[str, ...] = ()) -> None:
    """Assert that the arrays of `fields` (none given = all) are equal bit for bit."""
    for name in fields or [f.name for f in dataclasses.fields(Batch) if f.name != "schema"]:
        a, b = getattr(built, name), getattr(decoded, name)
        if isinstance(a, np.ndarray):
            assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes()), name
            continue
        assert (
            a.keys == b.keys
            and list(a.columns) == list(b.columns)
            and (a.weights is None) == (b.weights is None)
        )
        arrays = ("lengths_KN", "values", "present_KN", *(("weights",) if a.weights is not None else ()))
        pairs = [(x, getattr(a, x), getattr(b, x)) for x in arrays] + [
            (c, a.columns[c], b.columns[c]) for c in a.columns
        ]
        for inner, x, y in pairs:
            assert (x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes()), f"{name}.{inner}"


@settings(max_examples=60)
@given(data=st.data())
def test_a_batch_of_values_equals_the_decoded_bytes_bit_for_bit(data: st.DataObject) -> None:
    schema = data.draw(schemas())
    decoder = Decoder(schema, lambda _: schema)
    drawn = [data.draw(requests(schema)) for _ in range(data.draw(st.integers(1, 3)))]
    for request in drawn:
        read = decoder.decode_request(pack(request.ro), pack(request.nro), request.item_ids, request.time_ms)
        assert_equal(build_batch(schema, [request]), read)
    trained, rejects = decoder.decode([as_record(schema, request, i) for i, request in enumerate(drawn)])
    assert not rejects
    side = ("ro_float_RF", "ro_present_RF", "ro_lists", "nro_float_BF", "nro_present_BF", "nro_lists")
    of_all = ("num_candidates_R", "request_index_B", "item_B", "time_ms_R")
    assert_equal(build_batch(schema, drawn), trained, (*side, *of_all))


@settings(max_examples=30)
@given(data=st.data())
def test_columns_equal_those_of_their_encoding(data: st.DataObject) -> None:
    schema = data.draw(schemas())
    request = data.draw(requests(schema))
    for columns in (request.ro, request.nro):
        for mine, read in zip(columns, columns_of(pack(columns)), strict=True):
            assert (mine.dtype, mine.tobytes()) == (read.dtype, read.tobytes()) and mine.flags.c_contiguous
    read = read_request(schema, pack(request.ro), pack(request.nro), request.item_ids, NOW_MS)
    assert_equal(build_batch(schema, [read]), build_batch(schema, [request]))


@settings(max_examples=60)
@given(data=st.data())
def test_flat_values_equal_lists_decoded_one_by_one(data: st.DataObject) -> None:
    schema = data.draw(schemas())
    request = data.draw(requests(schema))
    n = len(request.item_ids)
    flat = flat_values(schema, request.nro, n)
    if flat is not None:
        assert encode_nro(schema, flat, n) == pack(request.nro)
    else:
        decoded = decode_block(schema, "nro", pack(request.nro), n)
        lists = [decoded[f.name] for f in schema.lists("nro")]
        assert any(
            v is not None and (not isinstance(v, list) or len(v) != 1 or None in column)
            for column in lists
            for v in column
        )


@settings(max_examples=60)
@given(data=st.data())
def test_the_fast_check_agrees_with_the_full_one(data: st.DataObject) -> None:
    """For valid and for damaged blocks: whatever the fast check accepts, the full check accepts too, with
    equal arrays.
    """
    schema = data.draw(schemas())
    request = data.draw(requests(schema))
    n, valid = len(request.item_ids), [pack(request.ro), pack(request.nro)]
    assert fast_checked_columns(schema, valid[0], valid[1], n) is not None
    blocks = list(valid)
    side = data.draw(st.integers(0, 1))
    if blocks[side]:
        damaged = bytearray(blocks[side])
        damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        blocks[side] = bytes(damaged)
    fast = fast_checked_columns(schema, blocks[0], blocks[1], n)
    if fast is None:
        return
    for columns, (name, block, rows) in zip(fast, (("ro", blocks[0], 1), ("nro", blocks[1], n)), strict=True):
        full = checked(schema, "ro" if name == "ro" else "nro", block, rows)
        assert [(c.dtype, c.tobytes()) for c in columns] == [(c.dtype, c.tobytes()) for c in full]


def test_too_many_candidates_are_left_to_the_full_check() -> None:
    schema = schema_from_dict(tomllib.loads(RICH))
    max_candidates = schema.limits.max_candidates
    assert fast_checked_columns(schema, b"", b"", max_candidates) is not None
    assert fast_checked_columns(schema, b"", b"", max_candidates + 1) is None
    with pytest.raises(WireError, match=f"at most {max_candidates} candidates"):
        checked(schema, "nro", b"", max_candidates + 1)


def test_labels_are_unknown_and_read_only() -> None:
    schema = schema_from_dict(tomllib.loads(RICH))
    batch = build_batch(schema, [RequestColumns(NO_COLUMNS, NO_COLUMNS, np.array([5, 6]), NOW_MS)])
    assert np.isnan(batch.label_before_BT).all() and batch.weight_BT.all() and batch.offset_R.tolist() == [-1]
    with pytest.raises(ValueError, match="read-only"):
        batch.label_BT[:] = 1.0


def test_precompile_covers_every_request() -> None:
    precompile()
    kernels = (request_batch.layout_side, request_batch.locate_block_columns)
    before = [len(kernel.nopython_signatures) for kernel in kernels]
    schema = schema_from_dict(tomllib.loads(RICH))
    given = {
        "history": {"item": [1], "action": [2], "kind": [3], "time": [4]},
        "tags": {"ids": [1], "weights": [0.5]},
    }
    request = RequestColumns(
        ro_columns(schema, given), nro_columns(schema, {"item": np.array([1, 2])}, 2), np.arange(2), 0
    )
    for batch in ([request], [request, request], [request._replace(nro=NO_COLUMNS), request]):
        build_batch(schema, batch)
    build_batch(schema, [read_request(schema, pack(request.ro), pack(request.nro), np.arange(2), 0)])
    assert [len(kernel.nopython_signatures) for kernel in kernels] == before
