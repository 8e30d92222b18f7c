"""Numbers and wire formats of the fields of messages that are read and written without protobuf's own
classes.

`SAMPLE.item_ids` is a field's number, also in kernels, where these tuples are constants. `field_formats`
finds the wire formats. Numba caches a kernel by the kernel's own source, so a number may never change. The
joiner imports this module: plain numpy only.
"""

from __future__ import annotations

import functools
from collections import namedtuple
from collections.abc import Iterable
from typing import Any

import numpy as np
from google.protobuf.descriptor import Descriptor
from google.protobuf.descriptor import FieldDescriptor as Fd
from google.protobuf.message import Message

from roostream.wire import roo_pb2 as pb

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # protobuf's wire types
REPEATED, TEXT = 1, 2  # flags: a tag before each entry; UTF-8
_SIZES = {
    **dict.fromkeys((Fd.TYPE_FIXED64, Fd.TYPE_SFIXED64, Fd.TYPE_DOUBLE), 8),
    **dict.fromkeys((Fd.TYPE_FIXED32, Fd.TYPE_SFIXED32, Fd.TYPE_FLOAT), 4),
}
_LENGTH_DELIMITED = (Fd.TYPE_STRING, Fd.TYPE_BYTES, Fd.TYPE_MESSAGE)


def _numbers(message: type[Message]) -> Any:
    """Field name → number as a named tuple, in the order of the numbers."""
    fields: Any = sorted(message.DESCRIPTOR.fields, key=lambda field: field.number)
    names = namedtuple(f"{message.DESCRIPTOR.name}Fields", [f.name for f in fields], module=__name__)  # type: ignore[misc]
    return names(*(field.number for field in fields))


HEADER, BLOCK, PART, SAMPLE = map(_numbers, (pb.Header, pb.Block, pb.Part, pb.Sample))
IMPRESSION, RANK_ANSWER = _numbers(pb.Impression), _numbers(pb.RankAnswer)


def field_formats(message: Descriptor) -> np.ndarray:
    """Field number → (wire type, bytes of an element, flags), int64 [highest + 1, 3]; wire type -1 = no such
    field."""
    out = np.full((max(f.number for f in message.fields) + 1, 3), -1, dtype=np.int64)
    for f in message.fields:
        out[f.number] = _format(f)
    return out


def _format(f: Fd) -> tuple[int, int, int]:
    """One row of `field_formats`."""
    repeated = f.label == Fd.LABEL_REPEATED
    if f.type in _LENGTH_DELIMITED:
        return BYTES, 1, REPEATED * repeated | TEXT * (f.type == Fd.TYPE_STRING)
    size = _SIZES.get(f.type, 1)
    assert size > 1 or not repeated, f"{f.full_name}: expected a repeated field of fixed width"
    if repeated:
        return BYTES, size, 0
    return {8: FIXED64, 4: FIXED32, 1: VARINT}[size], 1, 0


def encode_fields(contents: Iterable[tuple[int, bytes | None]]) -> bytes:
    """A message of length-delimited fields (bytes, messages, packed columns) in the given order; None =
    absent."""
    out: list[bytes] = []
    for number, content in contents:
        if content is not None:
            out += (_tag_and_length(number, len(content)), content)
    return b"".join(out)


@functools.lru_cache(maxsize=4096)
def _tag_and_length(number: int, size: int) -> bytes:
    return bytes((number << 3 | BYTES,)) + encode_varint(size)


def encode_varint(value: int) -> bytes:
    """A non-negative integer, seven bits a byte, lowest first."""
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
