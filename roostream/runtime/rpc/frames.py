"""Frames of calls (docs/protocols.md, "Calls"): a prefix of fixed size, a small msgpack header, then the
arrays.

    prefix   magic ROO2 u32 · kind u8 · 3 zero bytes · header bytes u32 · number of arrays u32
             · payload bytes u64 · checksum u64
    header   msgpack map {"method", "header", "arrays": [[dtype, [dimension…]]…]};
             errors carry {"error", "message", "reason"}
    payload  each array's bytes, little-endian, C order, padded to 8 bytes
    checksum xxh3-64 of all bytes before and after it

No I/O here. Sizes are checked before memory is allocated for them.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
import xxhash

from roostream.errors import WireError

Body: TypeAlias = dict[str, Any]

MAGIC = int.from_bytes(b"ROO2", "little")
CALL, ANSWER, ERROR = 1, 2, 3
GREETING = "greet"
"""The method with which a client sends its token, first on a connection. No handler has a method of this
name."""

MAX_HEADER_BYTES = 16 << 20
"""The controller's status has the reports of all workers in its header."""
MAX_GREETING_BYTES = 1 << 20
"""Limit of a header while no payload is allowed: the client has not sent its token."""
MAX_FRAME_BYTES = 1 << 30
MAX_ARRAYS = 4096
MAX_DIMENSIONS = 4
DTYPES = {code: np.dtype("<" + code) for code in ("i1", "u1", "i4", "u4", "i8", "u8", "f4", "f8")}

_PREFIX, _CHECKSUM = struct.Struct("<IB3sIIQ"), struct.Struct("<Q")
PREFIX_BYTES = _PREFIX.size + _CHECKSUM.size
_MAGIC_1 = int.from_bytes(b"ROO1", "little")
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_PAD = bytes(8)


class Prefix(NamedTuple):
    """The fixed part at the beginning of a frame."""

    kind: int
    header_bytes: int
    num_arrays: int
    payload_bytes: int
    checksum: int = 0


def _plain(value: object) -> object:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"expected plain values in the header of a call, got {type(value).__name__}")


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder()


def encode(
    kind: int, body: Body, arrays: Sequence[np.ndarray] = (), max_frame_bytes: int = MAX_FRAME_BYTES
) -> list[Any]:
    """Encode a frame as a list of buffers for `sendmsg`. Contiguous arrays are not copied.

    Raises:
        WireError: `oversized` header or payload, or `bad_shape` for an unsupported dtype.
    """
    described: list[list[Any]] = []
    buffers: list[Any] = []
    payload_bytes = 0
    for array in arrays:
        code = _CODES.get(array.dtype)
        if code is None or array.ndim > MAX_DIMENSIONS:
            raise WireError(
                "bad_shape", f"a frame carries {', '.join(DTYPES)} of at most 4 dimensions, got {array.dtype}"
            )
        described.append([code, list(array.shape)])
        if array.nbytes:
            buffers.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
            if pad := -array.nbytes % 8:
                buffers.append(_PAD[:pad])
            payload_bytes += array.nbytes + pad
    header = _encoder.encode({**body, "arrays": described})
    _check_sizes(len(header), len(described), payload_bytes, max_frame_bytes)
    sizes = _PREFIX.pack(MAGIC, kind, b"\0\0\0", len(header), len(described), payload_bytes)
    return [sizes + _CHECKSUM.pack(_checksum((sizes, header, *buffers))) + header, *buffers]


def parse_prefix(data: bytes | bytearray | memoryview, max_frame_bytes: int = MAX_FRAME_BYTES) -> Prefix:
    """Decode the first PREFIX_BYTES of a frame.

    Raises:
        WireError: not a valid frame (`undecodable`), or sizes beyond the limits (`oversized`).
    """
    magic, kind, zero, header_bytes, num_arrays, payload_bytes = _PREFIX.unpack_from(data)
    if magic == _MAGIC_1:
        raise WireError(
            "undecodable",
            "expected a frame that starts with ROO2, got ROO1: run all programs from one Roostream version",
        )
    if magic != MAGIC or kind not in (CALL, ANSWER, ERROR) or zero != b"\0\0\0":
        raise WireError("undecodable", f"expected a frame that starts with ROO2, got {bytes(data[:8])!r}")
    _check_sizes(header_bytes, num_arrays, payload_bytes, max_frame_bytes)
    return Prefix(kind, header_bytes, num_arrays, payload_bytes, _CHECKSUM.unpack_from(data, _PREFIX.size)[0])


def check(prefix: Prefix, *parts: Any) -> None:
    """Verify the checksum. `parts`: the bytes of prefix, header and payload.

    Raises:
        WireError: `undecodable`: the frame was damaged.
    """
    before, *rest = parts
    got = _checksum((before[: _PREFIX.size], *rest))
    if got != prefix.checksum:
        raise WireError(
            "undecodable",
            f"expected a frame with checksum {prefix.checksum:016x}, got {got:016x}: it was damaged",
        )


def _checksum(parts: Iterable[Any]) -> int:
    hashed = xxhash.xxh3_64()
    for part in parts:
        hashed.update(part)
    return int(hashed.intdigest())


def parse_header(prefix: Prefix, data: bytes | bytearray | memoryview) -> Body:
    """Decode the header; the arrays' shapes are checked against the prefix before the payload is read.

    Raises:
        WireError: `undecodable` or `bad_shape`.
    """
    try:
        body = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError("undecodable", f"expected a msgpack header: {error}") from None
    if (
        not isinstance(body, dict)
        or not isinstance(body.get("arrays"), list)
        or not isinstance(body.get("header", {}), dict)
    ):
        raise WireError("undecodable", "expected a header that is a map with 'arrays'")
    total = sum(_padded(*_shape_of(entry)) for entry in body["arrays"])
    if len(body["arrays"]) != prefix.num_arrays or total != prefix.payload_bytes:
        raise WireError(
            "bad_shape",
            f"expected {prefix.num_arrays} arrays in {prefix.payload_bytes} bytes, got "
            f"{len(body['arrays'])} in {total}",
        )
    return body


def views(body: Body, payload: np.ndarray) -> list[np.ndarray]:
    """The arrays as views of `payload` (uint8 [payload_bytes], 8-byte aligned). `body` is of
    `parse_header`."""
    arrays, at = [], 0
    for entry in body["arrays"]:
        dtype, shape = _shape_of(entry)
        count = math.prod(shape)
        arrays.append(payload[at : at + count * dtype.itemsize].view(dtype).reshape(shape))
        at += _padded(dtype, shape)
    return arrays


def _shape_of(entry: object) -> tuple[np.dtype, tuple[int, ...]]:
    if (
        isinstance(entry, list)
        and len(entry) == 2
        and isinstance(entry[0], str)
        and isinstance(entry[1], list)
    ):
        dtype, shape = DTYPES.get(entry[0]), entry[1]
        if (
            dtype
            and len(shape) <= MAX_DIMENSIONS
            and all(type(n) is int and 0 <= n <= MAX_FRAME_BYTES for n in shape)
        ):
            return dtype, tuple(shape)
    raise WireError(
        "bad_shape", f"expected [dtype, shape] with a dtype of {', '.join(DTYPES)}, got {entry!r:.80}"
    )


def _padded(dtype: np.dtype, shape: tuple[int, ...]) -> int:
    return -(-math.prod(shape) * dtype.itemsize // 8) * 8


def _check_sizes(header_bytes: int, num_arrays: int, payload_bytes: int, max_frame_bytes: int) -> None:
    for what, got, limit in (
        ("a header", header_bytes, MAX_HEADER_BYTES if max_frame_bytes else MAX_GREETING_BYTES),
        ("arrays", num_arrays, MAX_ARRAYS),
        ("a payload", payload_bytes, max_frame_bytes),
    ):
        if got > limit:
            raise WireError(
                "oversized", f"expected {what} of at most {limit}, got {got}; send less in one call"
            )
