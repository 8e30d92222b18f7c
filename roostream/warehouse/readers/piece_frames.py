"""The wire format of a piece of rows between reader and worker: one RPC header and arrays
(roostream/runtime/rpc/frames.py).

    header  schema: digest of its text · end: position after it · keys and columns of the lists of each side
    arrays  at_R, the arrays of `Batch` in their order, the lists of each side; booleans and texts as bytes

`request_index_B` follows from the numbers of candidates and is not sent. Decoded arrays are views of the
frame, bit for bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import xxhash

from roostream.errors import SchemaError, WireError
from roostream.runtime.rpc.transport import Arrays, Header
from roostream.schema.registry import to_toml
from roostream.schema.schema import Schema
from roostream.warehouse.sessions.session_rows import Piece
from roostream.wire.batch import TEXT, Batch
from roostream.wire.jagged import Jagged

_NAMES = tuple(
    f.name for f in dataclasses.fields(Batch) if f.type == "np.ndarray" and f.name != "request_index_B"
)
_BOOLS = frozenset(("ro_present_RF", "nro_present_BF", "correction_R"))
_TEXTS = frozenset(("surface_R",))
_SIDES = ("ro_lists", "nro_lists")
_TEXT_BYTES = np.dtype(TEXT).itemsize


def schema_digest_of(schema: Schema) -> str:
    """Digest of everything that determines how rows are read, also list limits and defaults, unlike the
    fingerprint."""
    return xxhash.xxh3_64_hexdigest(to_toml(schema).encode())


def encode_piece(piece: Piece, schema_digest: str) -> tuple[Header, list[np.ndarray]]:
    """Encode a piece; `decode_piece` is the inverse."""
    batch, arrays = piece.batch, [piece.at_R]
    arrays += [_to_numbers(name, getattr(batch, name)) for name in _NAMES]
    sides = {}
    for side in _SIDES:
        lists: Jagged = getattr(batch, side)
        sides[side] = {
            "keys": list(lists.keys),
            "columns": list(lists.columns),
            "weighted": lists.weights is not None,
        }
        arrays += [lists.lengths_KN, lists.values, lists.present_KN.view(np.uint8)]
        arrays += [lists.weights] if lists.weights is not None else []
        arrays += lists.columns.values()
    return {"schema": schema_digest, "end": piece.end, "lists": sides}, arrays


def decode_piece(header: Header, arrays: Arrays, schema: Schema, schema_digest: str) -> Piece:
    """Decode a piece of `schema`.

    Raises:
        SchemaError: it was read with another schema.
        WireError: it is not a piece.
    """
    if header.get("schema") != schema_digest:
        raise SchemaError(
            f"expected rows of schema {schema.name!r} with digest {schema_digest}, "
            f"got {header.get('schema')!r}; start the controller and the workers with the same schema file"
        )
    try:
        return _piece(header, iter(arrays), schema)
    except (AssertionError, StopIteration, KeyError, TypeError, ValueError, IndexError) as error:
        raise WireError(
            "undecodable", f"expected a piece of rows, got something else ({error!r:.100})"
        ) from None


def total_bytes(arrays: Sequence[np.ndarray]) -> int:
    """Bytes of all arrays together."""
    return sum(array.nbytes for array in arrays)


def _piece(header: Header, arrays: Iterator[np.ndarray], schema: Schema) -> Piece:
    at_R = next(arrays)
    found: dict[str, Any] = {name: _from_numbers(name, next(arrays)) for name in _NAMES}
    counts_R = found["num_candidates_R"]
    found["request_index_B"] = np.repeat(np.arange(len(counts_R), dtype=np.int64), counts_R)
    for side in _SIDES:
        lists = header["lists"][side]
        lengths_KN, values, present_KN = next(arrays), next(arrays), next(arrays).view(np.bool_)
        weights = next(arrays) if lists["weighted"] else None
        columns = {name: next(arrays) for name in lists["columns"]}
        found[side] = Jagged(
            keys=tuple(lists["keys"]),
            lengths_KN=lengths_KN,
            values=values,
            present_KN=present_KN,
            weights=weights,
            columns=columns,
        )
    piece = Piece(Batch(schema=schema, **found), at_R, int(header["end"]))
    if len(at_R) != piece.batch.num_requests:
        raise ValueError(f"{len(at_R)} positions of {piece.batch.num_requests} rows")
    return piece


def _to_numbers(name: str, array: np.ndarray) -> np.ndarray:
    if name in _TEXTS:
        return np.ascontiguousarray(array).view(np.uint8).reshape(len(array), _TEXT_BYTES)
    return np.ascontiguousarray(array).view(np.uint8) if name in _BOOLS else array


def _from_numbers(name: str, array: np.ndarray) -> np.ndarray:
    if name in _TEXTS:
        return np.ascontiguousarray(array).reshape(-1).view(TEXT)
    return array.view(np.bool_) if name in _BOOLS else array
