"""A block's columns: reading its protobuf fields as arrays without a copy, checking them, and writing them.

Packed fixed-width fields have the wire bytes of a little-endian array, so a block that we wrote is six arrays, each behind a
tag and a length. Plain numpy: the joiner runs this inside the JVM's Python.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Literal, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError

from roostream.errors import WireError
from roostream.schema.schema import Limits, Schema
from roostream.wire import roo_pb2 as pb
from roostream.wire.proto_fields import BLOCK, BYTES
from roostream.wire.records import MAX_WEIGHT

Side = Literal["ro", "nro"]
_NAMES = ("<f4", "<u4", "<i8", "<f4", "<i8", "u1")  # of `wire_fields.BLOCK`, whose numbers are 1 to 6
_DTYPES = tuple(np.dtype(name) for name in _NAMES)
_SIZES = tuple(dtype.itemsize for dtype in _DTYPES)


class Columns(NamedTuple):
    """A block's arrays; views of its bytes where these are packed, as ours always are."""

    floats: np.ndarray  # float32 [n x F]
    lengths: np.ndarray  # uint32 [n x K]
    ids: np.ndarray  # int64
    weights: np.ndarray  # float32
    times: np.ndarray  # int64
    missing: np.ndarray  # uint8


def columns_of(data: bytes) -> Columns:
    """The arrays of a block. Anything but our own form (a column in pieces or not packed, groups) is read by protobuf.

    Raises:
        WireError: `undecodable`.
    """
    spans = _spans(data)
    if spans is None:
        return _columns_by_protobuf(data)
    parts = zip(_DTYPES, _SIZES, spans, NO_COLUMNS, strict=True)
    return Columns._make(
        [np.frombuffer(data, dtype, n // size, at) if n else none for dtype, size, (at, n), none in parts]
    )


def _spans(data: bytes) -> list[tuple[int, int]] | None:
    """(start, bytes) of each column, or None if the block isn't in the form that we write."""
    spans, at, last = [(0, 0)] * 6, 0, 0
    while at < len(data):
        tag = data[at]
        if tag & 0x87 != 2 or not last < tag >> 3 <= 6:
            return None
        last = tag >> 3
        size, at = _varint(data, at + 1)
        if not 0 <= size <= len(data) - at or size % _SIZES[last - 1]:
            return None
        spans[last - 1] = (at, size)
        at += size
    return spans


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """(value, next place); value -1 if it runs out or takes more than 5 bytes."""
    value = 0
    for shift in range(0, 35, 7):
        if at >= len(data):
            return -1, at
        value |= (data[at] & 0x7F) << shift
        at += 1
        if data[at - 1] < 0x80:
            return value, at
    return -1, at


def canonical(data: bytes) -> bytes:
    """The same block in the form that we write: columns whole, packed and in order, unknown fields gone.

    Raises:
        WireError: `undecodable`.
    """
    return data if _spans(data) is not None else pack(_columns_by_protobuf(data))


def _columns_by_protobuf(data: bytes) -> Columns:
    """The arrays as copies, of a block in any form."""
    try:
        block = pb.Block.FromString(data)
    except DecodeError as error:
        raise WireError("undecodable", f"expected a Block: {error}") from None
    return Columns(
        np.array(block.floats, np.float32),
        np.array(block.lengths, np.uint32),
        np.array(block.ids, np.uint64).view(np.int64),
        np.array(block.weights, np.float32),
        np.array(block.times, np.int64),
        np.frombuffer(block.missing, np.uint8),
    )


def check_columns(schema: Schema, side: Side, columns: Columns, num_rows: int, limits: Limits) -> None:
    """See `roostream.wire.block.check_block`. `roostream.wire.decode_kernels.check_block` is the same rule for many blocks at once: two statements,
    since this one says which number was wrong; tests/wire/test_decode.py holds them equal on damaged blocks."""
    if num_rows > limits.max_candidates:
        raise WireError("oversized", f"expected at most {limits.max_candidates} candidates, got {num_rows}")
    if any(len(c) for c in columns):
        _check_shape(schema, side, columns, num_rows, limits)
    if len(columns.floats) and np.isinf(columns.floats).any():
        raise WireError("non_finite", f"expected finite {side} floats (or NaN for missing), got an infinity")
    if not len(columns.weights):
        return
    if not np.isfinite(columns.weights).all():
        raise WireError("non_finite", f"expected finite {side} weights, got an infinity or NaN")
    if (largest := float(np.abs(columns.weights).max())) > MAX_WEIGHT:
        raise WireError(
            "bad_number",
            f"expected {side} weights within ±{MAX_WEIGHT:.0f}, got one of magnitude {largest:g}",
        )


def _check_shape(schema: Schema, side: Side, columns: Columns, num_rows: int, limits: Limits) -> None:
    """Every column has the length that rows and lists say."""
    lists = schema.lists(side)
    _equal(side, "floats", len(columns.floats), num_rows * len(schema.floats(side)))
    _equal(side, "lengths", len(columns.lengths), num_rows * len(lists))
    longest = int(columns.lengths.max(initial=0))
    if longest > limits.max_list:
        raise WireError("oversized", f"expected lists of at most {limits.max_list} entries, got {longest}")
    totals_K = (
        columns.lengths.reshape(num_rows, len(lists)).sum(axis=0, dtype=np.int64).tolist() if lists else []
    )
    _equal(
        side,
        "ids",
        len(columns.ids),
        sum(n * (1 + len(f.id_columns)) for f, n in zip(lists, totals_K, strict=True)),
    )
    _equal(
        side,
        "times",
        len(columns.times),
        sum(n * len(f.time_columns) for f, n in zip(lists, totals_K, strict=True)),
    )
    weighted = sum(n for f, n in zip(lists, totals_K, strict=True) if f.kind == "weighted_ids")
    _equal(side, "weights", len(columns.weights), weighted)
    bits = num_rows * len(lists)
    if len(columns.missing) > (bits + 7) // 8:
        raise WireError(
            "bad_shape",
            f"{side} block: expected at most {bits} missing bits, got {len(columns.missing)} bytes",
        )
    if len(columns.missing) and (columns.lengths[missing_bits(columns, bits)] > 0).any():
        raise WireError("bad_shape", f"{side} block: expected length 0 for a missing list, got more")


def _equal(side: Side, name: str, got: int, expected: int) -> None:
    if got != expected:
        raise WireError("bad_shape", f"{side} block: expected {expected} {name}, got {got}")


def missing_bits(columns: Columns, count: int) -> np.ndarray:
    """bool [count]."""
    bits = np.zeros(count, dtype=np.bool_)
    given = np.unpackbits(columns.missing, bitorder="little")[:count]
    bits[: len(given)] = given
    return bits


NO_COLUMNS = Columns._make(np.zeros(0, dtype) for dtype in _DTYPES)
"""A block in which everything is missing."""


def pack(columns: Columns) -> bytes:
    """The columns as packed fields in order; empty ones are left out."""
    return fields_of(
        (number, c.tobytes() if c.size else None) for number, c in zip(BLOCK, columns, strict=True)
    )


def fields_of(contents: Iterable[tuple[int, bytes | None]]) -> bytes:
    """A message of length-delimited fields (bytes, messages, packed columns), in the order given; None = absent."""
    out: list[bytes] = []
    for number, content in contents:
        if content is not None:
            out += (_field_head(number, len(content)), content)
    return b"".join(out)


@functools.lru_cache(maxsize=4096)
def _field_head(number: int, size: int) -> bytes:
    """Tag and length."""
    out = bytearray((number << 3 | BYTES,))
    while size >= 0x80:
        out.append(size & 0x7F | 0x80)
        size >>= 7
    out.append(size)
    return bytes(out)
