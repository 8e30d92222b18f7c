"""Where the fields of an encoded impression begin and end, so that the joiner copies them into samples
without parsing the impression.

Field numbers and types come from the protobuf descriptors; `roo.proto` alone defines them.
"""

from __future__ import annotations

from google.protobuf.descriptor import FieldDescriptor as Fd

from roostream.wire import roo_pb2 as pb
from roostream.wire.proto_fields import encode_varint

_LEN = 2  # protobuf's wire type of length-delimited fields
_WIRE_TYPE = {Fd.TYPE_FIXED64: 1, Fd.TYPE_SFIXED64: 1, Fd.TYPE_FLOAT: 5, Fd.TYPE_FIXED32: 5}
_VARINT_TYPES = {Fd.TYPE_UINT32, Fd.TYPE_ENUM, Fd.TYPE_BOOL}


def varint(n: int) -> bytes:
    """An unsigned integer in protobuf's encoding."""
    return _SMALL_VARINTS[n] if n < len(_SMALL_VARINTS) else encode_varint(n)


_SMALL_VARINTS = [encode_varint(n) for n in range(1 << 12)]


def field_tags(message: type) -> dict[str, bytes]:
    """Field name → the tag bytes in front of its value."""
    return {f.name: varint(f.number << 3 | _wire_type(f)) for f in message.DESCRIPTOR.fields}  # type: ignore[attr-defined]


def _wire_type(f: Fd) -> int:
    if f.label == Fd.LABEL_REPEATED:
        return _LEN  # packed
    return 0 if f.type in _VARINT_TYPES else _WIRE_TYPE.get(f.type, _LEN)


def length_delimited(tag: bytes, value: bytes) -> bytes:
    """Tag, length and value of a field; b"" if the value is empty."""
    return tag + varint(len(value)) + value if value else b""


IMPRESSION_TAGS = field_tags(pb.Impression)
_FIELDS = ("header", "ro", "item_ids", "nro", "scores", "positions", "propensities")
_INDEX_OF_TAG = {IMPRESSION_TAGS[name][0]: 2 * n for n, name in enumerate(_FIELDS)}
HEADER, RO, ITEMS, NRO, SCORES, POSITIONS, PROPENSITIES = range(0, 14, 2)
"""Indices into the result of `field_offsets`, which has the offset of the field's length there, and then that
of the field's end; 0, 0: absent or empty."""
WEIGHT = 14
"""Index of the offset of the weight's four bytes; 0: absent."""
_RO_TAG, _WEIGHT_TAG = IMPRESSION_TAGS["ro"][0], IMPRESSION_TAGS["weight"][0]


def field_offsets(data: bytes) -> list[int]:
    """The offsets of an impression record, to be read with HEADER … WEIGHT.

    The record is two bytes (type and version) and a message that protobuf has encoded: fields ascend, and
    none is repeated.
    """
    offsets, at, end = [0] * 15, 2, len(data)
    while at < end:
        tag = data[at]
        begin = at + 1
        if tag in _INDEX_OF_TAG:
            size, at = data[begin], begin + 1
            if size > 127:
                size, at = _read_varint(data, begin)
            at += size
            if size or tag == _RO_TAG:  # an empty RO block is one in which every feature is missing
                index = _INDEX_OF_TAG[tag]
                offsets[index], offsets[index + 1] = begin, at
        elif tag == _WEIGHT_TAG:
            offsets[WEIGHT] = begin
            at = begin + 4
        else:
            break  # fields of later builds come last and are not copied
    return offsets


def field_value(data: bytes, offsets: list[int], index: int) -> bytes:
    """The value of the field at `index`, such as ITEMS, without its length; b"" = absent or empty."""
    begin, end = offsets[index], offsets[index + 1]
    if begin == end:
        return b""
    return data[begin + 1 : end] if data[begin] < 128 else data[_read_varint(data, begin)[1] : end]


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Read the varint at `at`; return its value and the offset of the byte after it."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
