"""Numbers and wire formats of the fields of messages that are read and written without protobuf's own
classes.

`SAMPLE.item_ids` is a field's number, also in kernels, where these tuples are constants. A new field of
Sample is added to `roo.proto` (with its generated code), to the names below, and to its readers;
`field_formats` finds its wire format. Numba caches a kernel by the kernel's own source, so a number may never
change. The joiner imports this module: plain numpy only.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple, TypeVar

import numpy as np
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from roostream.wire import roo_pb2 as pb

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # protobuf's wire types
REPEATED, TEXT = 1, 2  # flags: a tag before each entry; UTF-8
_SIZES = {
    **dict.fromkeys(
        (FieldDescriptor.TYPE_FIXED64, FieldDescriptor.TYPE_SFIXED64, FieldDescriptor.TYPE_DOUBLE), 8
    ),
    **dict.fromkeys(
        (FieldDescriptor.TYPE_FIXED32, FieldDescriptor.TYPE_SFIXED32, FieldDescriptor.TYPE_FLOAT), 4
    ),
}
_LENGTH_DELIMITED = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES, FieldDescriptor.TYPE_MESSAGE)


class HeaderFields(NamedTuple):
    request_id: int
    user_id: int
    session_id: int
    surface: int
    time_ms: int
    schema: int
    model_version: int
    traceparent: int


class BlockFields(NamedTuple):
    floats: int
    lengths: int
    ids: int
    weights: int
    times: int
    missing: int


class PartFields(NamedTuple):
    nro: int
    num_rows: int
    rows: int


class ImpressionFields(NamedTuple):
    header: int
    ro: int
    item_ids: int
    nro: int
    scores: int
    positions: int
    propensities: int
    weight: int


class RankAnswerFields(NamedTuple):
    request_id: int
    model_version: int
    tasks: int
    scores: int
    order: int
    degraded: int


class SampleFields(NamedTuple):
    header: int
    sample_id: int
    close_reason: int
    close_ms: int
    ro: int
    item_ids: int
    parts: int
    labels: int
    scores: int
    positions: int
    propensities: int
    weight: int
    event_ids: int
    event_candidates: int
    event_actions: int
    event_values: int
    event_times: int
    actions: int
    num_duplicates: int
    labels_before: int
    untrainable: int


_Names = TypeVar("_Names", bound=NamedTuple)


def _numbered(names: type[_Names], message: type[Message]) -> _Names:
    fields: Any = message.DESCRIPTOR.fields_by_name
    return names(*(fields[name].number for name in names._fields))


HEADER = _numbered(HeaderFields, pb.Header)
BLOCK = _numbered(BlockFields, pb.Block)
PART = _numbered(PartFields, pb.Part)
IMPRESSION = _numbered(ImpressionFields, pb.Impression)
RANK_ANSWER = _numbered(RankAnswerFields, pb.RankAnswer)
SAMPLE = _numbered(SampleFields, pb.Sample)


def field_formats(message: Descriptor) -> np.ndarray:
    """Field number → (wire type, bytes of an element, flags), int64 [highest + 1, 3]; wire type -1 = no such
    field."""
    out = np.full((max(f.number for f in message.fields) + 1, 3), -1, dtype=np.int64)
    for f in message.fields:
        out[f.number] = _format(f)
    return out


def _format(f: FieldDescriptor) -> tuple[int, int, int]:
    """One row of `field_formats`."""
    repeated = f.label == FieldDescriptor.LABEL_REPEATED
    if f.type in _LENGTH_DELIMITED:
        return BYTES, 1, REPEATED * repeated | TEXT * (f.type == FieldDescriptor.TYPE_STRING)
    size = _SIZES.get(f.type, 1)
    assert size > 1 or not repeated, (
        f"{f.full_name}: a packed column of varints has no fixed width; use fixed32 or fixed64"
    )
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
