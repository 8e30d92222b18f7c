"""Fields of the messages that we read and write without protobuf: their numbers and wire forms, taken from the messages.

A field is named `SAMPLE.item_ids`, in kernels too: to numba these tuples are constants. A new field of Sample is written in
three places: `roo.proto` (with its generated code), the names below, and whoever reads it; `forms` finds its wire form.
Kernels are cached by their own source, so a number here may never change, as in `roo.proto`. Plain numpy: the joiner imports it.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import numpy as np
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from roostream.wire import roo_pb2 as pb

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # protobuf's wire types
REPEATED, TEXT = 1, 2  # flags: several times, each with a tag; UTF-8
_SIZES = {
    **dict.fromkeys(
        (FieldDescriptor.TYPE_FIXED64, FieldDescriptor.TYPE_SFIXED64, FieldDescriptor.TYPE_DOUBLE), 8
    ),
    **dict.fromkeys(
        (FieldDescriptor.TYPE_FIXED32, FieldDescriptor.TYPE_SFIXED32, FieldDescriptor.TYPE_FLOAT), 4
    ),
}
_IN_BYTES = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES, FieldDescriptor.TYPE_MESSAGE)


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


def forms(message: Descriptor) -> np.ndarray:
    """Field number → (wire type, bytes an element, flags), as int64 [highest + 1, 3]; absent numbers have wire type -1."""
    out = np.full((max(f.number for f in message.fields) + 1, 3), -1, dtype=np.int64)
    for f in message.fields:
        out[f.number] = _form(f)
    return out


def _form(f: FieldDescriptor) -> tuple[int, int, int]:
    """A row of `forms`."""
    repeated = f.label == FieldDescriptor.LABEL_REPEATED
    if f.type in _IN_BYTES:
        return BYTES, 1, REPEATED * repeated | TEXT * (f.type == FieldDescriptor.TYPE_STRING)
    size = _SIZES.get(f.type, 1)
    assert size > 1 or not repeated, (
        f"{f.full_name}: a packed column of varints has no fixed width; use fixed32 or fixed64"
    )
    if repeated:
        return BYTES, size, 0
    return {8: FIXED64, 4: FIXED32, 1: VARINT}[size], 1, 0
