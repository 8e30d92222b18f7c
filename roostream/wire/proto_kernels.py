"""Kernels that walk protobuf messages in a byte buffer. No Python objects, no GIL, no read out of bounds.

`scan` notes where each field of a message lies, by the forms of its fields (roostream/wire/proto_fields.py), and vouches for every bound.
It knows the form that protobuf writers produce (fields in ascending order, packed columns whole) and says False to
everything else, damaged or merely unusual: protobuf itself then decides (roostream/wire/decode.py). The others read only inside spans so
noted.

A span is [start, end); N messages, P parts.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from roostream.wire.proto_fields import BYTES, FIXED32, FIXED64, REPEATED, TEXT, VARINT


@njit(cache=True, nogil=True)
def varint(buf: np.ndarray, at: int, end: int) -> tuple[np.int64, int]:
    """(value as int64, next place); next place -1 if it runs out of bytes or bits."""
    value = np.int64(0)
    for i in range(10):
        if at + i >= end:
            return value, -1
        byte = np.int64(buf[at + i])
        if i == 9 and byte > 1:
            return value, -1
        value |= (byte & 0x7F) << (7 * i)
        if byte < 0x80:
            return value, at + i + 1
    return value, -1


@njit(cache=True, nogil=True)
def u32(buf: np.ndarray, at: int) -> np.int64:
    """Little-endian uint32 as int64; no alignment needed."""
    return (
        np.int64(buf[at])
        | np.int64(buf[at + 1]) << 8
        | np.int64(buf[at + 2]) << 16
        | np.int64(buf[at + 3]) << 24
    )


@njit(cache=True, nogil=True)
def i64(buf: np.ndarray, at: int) -> np.int64:
    return u32(buf, at) | u32(buf, at + 4) << 32


@njit(cache=True, nogil=True)
def any_infinite(buf: np.ndarray, span: np.ndarray, nan_too: bool) -> bool:
    """Whether the float32s in `span` hold an infinity (or, with `nan_too`, a NaN)."""
    for at in range(span[0], span[1], 4):
        bits = u32(buf, at) & 0x7FFFFFFF
        if bits == 0x7F800000 or (nan_too and bits > 0x7F800000):
            return True
    return False


@njit(cache=True, nogil=True)
def any_beyond(buf: np.ndarray, span: np.ndarray, max_bits: int) -> bool:
    """Whether the float32s in `span` hold one of a larger magnitude than that of the bits `max_bits`, or a NaN."""
    for at in range(span[0], span[1], 4):
        if u32(buf, at) & 0x7FFFFFFF > max_bits:
            return True
    return False


@njit(cache=True, nogil=True)
def any_not_above_zero(buf: np.ndarray, span: np.ndarray) -> bool:
    """Whether the float32s in `span` hold a zero or a negative one."""
    for at in range(span[0], span[1], 4):
        bits = u32(buf, at)
        if bits == 0 or bits >> 31:
            return True
    return False


@njit(cache=True, nogil=True)
def skip(buf: np.ndarray, at: int, end: int, wire: int) -> tuple[int, int | np.int64]:
    """(start, end) of the field's content at `at`; end -1 if it doesn't fit in `end`."""
    if wire == VARINT:
        return at, varint(buf, at, end)[1]
    size = np.int64(8 if wire == FIXED64 else 4)
    if wire == BYTES:
        size, at = varint(buf, at, end)
        if at < 0:
            return at, -1
    elif wire != FIXED64 and wire != FIXED32:
        return at, -1
    return (at, at + size) if 0 <= size <= end - at else (at, -1)


@njit(cache=True, nogil=True)
def is_utf8(buf: np.ndarray, at: int, end: int) -> bool:
    """Whether bytes are UTF-8 as the Unicode standard has it (table 3-7): no overlong forms, surrogates, or ends cut off."""
    while at < end:
        first = buf[at]
        at += 1
        if first < 0x80:
            continue
        if first < 0xC2 or first > 0xF4:
            return False
        low, high = 0x80, 0xBF  # of the second byte
        if first == 0xE0:
            low = 0xA0
        elif first == 0xED:
            high = 0x9F
        elif first == 0xF0:
            low = 0x90
        elif first == 0xF4:
            high = 0x8F
        for _ in range(1 + (first >= 0xE0) + (first >= 0xF0)):
            if at >= end or not low <= buf[at] <= high:
                return False
            low, high = 0x80, 0xBF
            at += 1
    return True


@njit(cache=True, nogil=True)
def walk(buf: np.ndarray, at: int, end: int, fields: np.ndarray, spans: np.ndarray) -> bool:
    """Spans of one message's fields; a REPEATED field has (place of its first tag, number) instead."""
    last = 0
    while at < end:
        place = at
        tag, at = varint(buf, at, end)
        number = tag >> 3
        if at < 0 or not 8 <= tag <= 0xFFFFFFFF or number < last:
            return False
        start, at = skip(buf, at, end, tag & 7)
        if at < 0:
            return False
        if number >= len(fields) or fields[number, 0] < 0:
            last = number
            continue
        flags = fields[number, 2]
        if (
            fields[number, 0] != tag & 7
            or (at - start) % fields[number, 1]
            or (number == last and not flags & REPEATED)
        ):
            return False
        if flags & TEXT and not is_utf8(buf, start, at):
            return False
        if flags & REPEATED:
            spans[number, 0] = spans[number, 0] if spans[number, 1] else place
            spans[number, 1] += 1
        else:
            spans[number, 0], spans[number, 1] = start, at
        last = number
    return True


@njit(cache=True, nogil=True)
def scan(
    buf: np.ndarray,
    starts_N: np.ndarray,
    ends_N: np.ndarray,
    fields: np.ndarray,
    spans_N: np.ndarray,
    ok_N: np.ndarray,
) -> None:
    """`walk` over N messages: fills spans_N (int64 [N, fields, 2], zero = absent) and ok_N."""
    for n in range(len(starts_N)):
        ok_N[n] = walk(buf, starts_N[n], ends_N[n], fields, spans_N[n])


@njit(cache=True, nogil=True)
def split_parts(
    buf: np.ndarray, parts_N: np.ndarray, end: int, starts_P: np.ndarray, ends_P: np.ndarray
) -> None:
    """Spans of the parts, given (place of the first tag, number) a sample."""
    p = 0
    for n in range(len(parts_N)):
        at = parts_N[n, 0]
        for _ in range(parts_N[n, 1]):
            starts_P[p], ends_P[p] = skip(buf, varint(buf, at, end)[1], end, BYTES)
            at = ends_P[p]
            p += 1


@njit(cache=True, nogil=True)
def read_i64(buf: np.ndarray, spans_N: np.ndarray) -> np.ndarray:
    """A fixed64 field of each message; 0 where absent."""
    out = np.zeros(len(spans_N), dtype=np.int64)
    for n in range(len(spans_N)):
        if spans_N[n, 1] > spans_N[n, 0]:
            out[n] = i64(buf, spans_N[n, 0])
    return out


@njit(cache=True, nogil=True)
def read_u32(buf: np.ndarray, spans_N: np.ndarray) -> np.ndarray:
    """A fixed32 or float field's bits; 0 where absent."""
    out = np.zeros(len(spans_N), dtype=np.uint32)
    for n in range(len(spans_N)):
        if spans_N[n, 1] > spans_N[n, 0]:
            out[n] = u32(buf, spans_N[n, 0])
    return out


@njit(cache=True, nogil=True)
def read_varint(buf: np.ndarray, spans_N: np.ndarray) -> np.ndarray:
    """A varint field; 0 where absent."""
    out = np.zeros(len(spans_N), dtype=np.int64)
    for n in range(len(spans_N)):
        if spans_N[n, 1] > spans_N[n, 0]:
            out[n] = varint(buf, spans_N[n, 0], spans_N[n, 1])[0]
    return out
