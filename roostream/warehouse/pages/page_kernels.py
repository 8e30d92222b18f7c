"""Kernels that decode pages of a Parquet file. No Python objects, no GIL; each checks every bound and says -1 to what it doesn't
know or what doesn't fit, so that others decide (roostream/warehouse/pages/page_reader.py).

Letters: L levels, N lists of one depth, R rows, V values.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from roostream.wire.proto_kernels import varint

TYPE, UNPACKED, PACKED, CRC, LEVELS, ENCODING, DEFINED_BY, REPEATED_BY, FIELDS = range(9)
"""Of a page's header, as `header` notes them; -1 = not told."""
_VARINT_KINDS = (4, 5, 6)  # of thrift's compact protocol: i16, i32, i64
_BINARY, _STRUCT, _DOUBLE, _BYTE = 8, 12, 7, 3
_DATA, _DICTIONARY = 5, 7  # fields of a page's header that are structs
_DEEPEST = 8
_WIDEST = 56  # bits of a packed number: with a byte more they still fit into 64


@njit(cache=True, nogil=True)
def zigzag(value: int) -> int:
    """A signed number whose bits were moved up by one, for its sign."""
    return np.int64(np.uint64(value) >> np.uint64(1)) ^ -(value & 1)  # type: ignore[return-value]


@njit(cache=True, nogil=True)
def unpacked(buf: np.ndarray, at: int, width: int, out: np.ndarray) -> None:
    """Fills `out` with numbers of `width` bits (1 to 56) that lie behind each other, lowest bits first. Their bytes are there."""
    if width == 1:
        unpacked_bits(buf[at : at + (len(out) + 7) // 8], out)
        return
    held, bits, mask = np.uint64(0), 0, (np.uint64(1) << np.uint64(width)) - np.uint64(1)
    words = len(buf) - 4 if width <= 32 else -1  # where four bytes can be taken at once
    for i in range(len(out)):
        while bits < width:
            if at <= words:
                word = np.uint32(buf[at]) | np.uint32(buf[at + 1]) << np.uint32(8)
                word |= np.uint32(buf[at + 2]) << np.uint32(16) | np.uint32(buf[at + 3]) << np.uint32(24)
                held |= np.uint64(word) << np.uint64(bits)
                at += 4
                bits += 32
            else:
                held |= np.uint64(buf[at]) << np.uint64(bits)
                at += 1
                bits += 8
        out[i] = held & mask
        held >>= np.uint64(width)
        bits -= width


@njit(cache=True, nogil=True)
def unpacked_bits(buf: np.ndarray, out: np.ndarray) -> None:
    """As `unpacked`, of one bit each: a byte's eight at once."""
    whole = len(out) // 8
    for i in range(whole):
        byte, its = buf[i], out[8 * i : 8 * i + 8]
        for bit in range(8):
            its[bit] = (byte >> np.uint8(bit)) & np.uint8(1)
    for n in range(8 * whole, len(out)):
        out[n] = (buf[whole] >> np.uint8(n & 7)) & np.uint8(1)


@njit(cache=True, nogil=True)
def header(buf: np.ndarray, at: int, end: int, out: np.ndarray) -> int:
    """Notes a page's header that begins at `at` in `out` (int64 [FIELDS]); where it ends, or -1."""
    out[:] = -1
    last = np.zeros(_DEEPEST, dtype=np.int64)  # field number of each struct that is open
    depth, within = 0, 0
    while True:
        if at < 0 or at >= end:
            return -1
        byte = np.int64(buf[at])
        at += 1
        if byte == 0:
            if depth == 0:
                return at
            depth -= 1
            continue
        kind, step = byte & 15, byte >> 4
        if step == 0:
            number, at = varint(buf, at, end)
            if at < 0:
                return -1
            last[depth] = zigzag(int(number))
        else:
            last[depth] += step
        field = last[depth]
        if kind in _VARINT_KINDS:
            number, at = varint(buf, at, end)
            if at < 0:
                return -1
            value = zigzag(int(number))
            if depth == 0 and 1 <= field <= 4:
                out[TYPE + field - 1] = value
            elif depth == 1 and (
                (within == _DATA and 1 <= field <= 4) or (within == _DICTIONARY and 1 <= field <= 2)
            ):
                out[LEVELS + field - 1] = value
        elif kind == _BINARY:
            number, at = varint(buf, at, end)
            if at < 0 or number < 0 or number > end - at:
                return -1
            at += int(number)
        elif kind == _STRUCT:
            if depth == 0:
                within = field
            depth += 1
            if depth == _DEEPEST:
                return -1
            last[depth] = 0
        elif kind == _DOUBLE:
            at += 8
        elif kind == _BYTE:
            at += 1
        elif kind not in (1, 2):  # true, false
            return -1


@njit(cache=True, nogil=True)
def runs(buf: np.ndarray, at: int, end: int, width: int, out: np.ndarray) -> int:
    """Fills `out` from runs of equal numbers and of packed ones (Parquet's RLE) of `width` bits; where they end, or -1."""
    n, total = 0, len(out)
    size = (width + 7) // 8
    if not 1 <= width <= 32:
        return -1
    while n < total:
        number, at = varint(buf, at, end)
        if at < 0:
            return -1
        count = int(number) >> 1
        if count < 0:
            return -1
        if number & 1:
            if count > (end - at) // width:
                return -1
            until = min(n + count * 8, total)
            unpacked(buf, at, width, out[n:until])
            n, at = until, at + count * width
        else:
            if count < 1 or at + size > end:
                return -1
            value = np.uint64(0)
            for i in range(size):
                value |= np.uint64(buf[at + i]) << np.uint64(8 * i)
            until = total if count > total - n else n + count
            out[n:until] = value
            n, at = until, at + size
    return at


@njit(cache=True, nogil=True)
def lists(
    repeated_L: np.ndarray,
    defined_L: np.ndarray,
    full: int,
    begun_2: np.ndarray,
    lengths_R: np.ndarray,
    present_R: np.ndarray,
) -> int:
    """Adds levels of a page to lists, of which `begun_2[0]` have begun before; values of the page, or -1. `full`: the level of a
    value; a level of `full` - 1 is an empty list where `full` is 2, and a null value where it is 3."""
    values, row = 0, begun_2[0]
    for n in range(len(repeated_L)):
        level = defined_L[n]
        if repeated_L[n] == 0:
            if row >= len(lengths_R):
                return -1
            present_R[row] = level > 0
            row += 1
        elif row == 0 or level != full:
            return -1
        if level == full:
            lengths_R[row - 1] += 1
            values += 1
        elif level > 1:
            return -1
    begun_2[0] = row
    return values


@njit(cache=True, nogil=True)
def lists_of_lists(
    repeated_L: np.ndarray,
    defined_L: np.ndarray,
    begun_2: np.ndarray,
    lengths_R: np.ndarray,
    present_R: np.ndarray,
    lengths_N: np.ndarray,
    present_N: np.ndarray,
) -> int:
    """As `lists`, of rows that have lists of lists; `begun_2`: rows and inner lists before. Levels: 0 no outer list, 1 an empty
    one, 2 no inner list, 3 an empty one, 4 a null value, 5 a value."""
    values, row, n = 0, begun_2[0], begun_2[1]
    for i in range(len(repeated_L)):
        again, level = repeated_L[i], defined_L[i]
        if level == 4 or level > 5 or again > 2:
            return -1
        if again == 0:
            if row >= len(lengths_R):
                return -1
            present_R[row] = level > 0
            row += 1
        elif row == 0 or level < 2 or lengths_R[row - 1] == 0:
            return -1
        if level < 2:
            continue
        if again < 2:
            if n >= len(lengths_N):
                return -1
            lengths_R[row - 1] += 1
            present_N[n] = level > 2
            n += 1
        elif level != 5 or lengths_N[n - 1] == 0:
            return -1
        if level == 5:
            lengths_N[n - 1] += 1
            values += 1
    begun_2[0], begun_2[1] = row, n
    return values


@njit(cache=True, nogil=True)
def looked_up(index_V: np.ndarray, known: np.ndarray, out_V: np.ndarray) -> int:
    """Values of a dictionary; -1 for an index that it lacks."""
    for n in range(len(index_V)):
        if index_V[n] >= len(known):
            return -1
        out_V[n] = known[index_V[n]]
    return 0


@njit(cache=True, nogil=True)
def joined(buf: np.ndarray, at: int, end: int, out_V: np.ndarray) -> int:
    """uint32 [V] of four streams of bytes, the first that of their lowest ones."""
    n = len(out_V)
    if end - at != 4 * n:
        return -1
    a, b, c, d = (
        buf[at : at + n],
        buf[at + n : at + 2 * n],
        buf[at + 2 * n : at + 3 * n],
        buf[at + 3 * n : end],
    )
    for i in range(n):
        out_V[i] = (
            np.uint32(a[i])
            | np.uint32(b[i]) << np.uint32(8)
            | np.uint32(c[i]) << np.uint32(16)
            | np.uint32(d[i]) << np.uint32(24)
        )
    return 0


@njit(cache=True, nogil=True)
def summed(buf: np.ndarray, at: int, end: int, out_V: np.ndarray) -> int:
    """int64 [V] of differences (DELTA_BINARY_PACKED), which wrap around."""
    told = np.zeros(4, dtype=np.int64)  # numbers of a block and of its parts, of all; the first
    for i in range(4):
        told[i], at = varint(buf, at, end)
        if at < 0:
            return -1
    block, parts, total, number = int(told[0]), int(told[1]), int(told[2]), int(told[3])
    if total != len(out_V) or parts < 1 or parts > block or block > 1 << 20:
        return -1
    of_part = block // parts
    if of_part % 32 or block % parts:
        return -1
    value, n = zigzag(int(number)), 1
    if len(out_V):
        out_V[0] = value
    while n < len(out_V):
        told[0], at = varint(buf, at, end)
        if at < 0 or at + parts > end:
            return -1
        least, widths = zigzag(int(told[0])), at
        at += parts
        for p in range(parts):
            if n >= len(out_V):
                break
            width = int(buf[widths + p])
            if width > _WIDEST or at + of_part * width // 8 > end:
                return -1
            until = min(n + of_part, len(out_V))
            if width:
                unpacked(buf, at, width, out_V[n:until])
            else:
                out_V[n:until] = 0
            for i in range(n, until):
                value += least + out_V[i]
                out_V[i] = value
            n = until
            at += of_part * width // 8
    return 0
