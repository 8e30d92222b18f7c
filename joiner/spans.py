"""Where the fields of an impression lie in its bytes, and the bytes of a sample: columns go from one to the other as they are.

Field numbers and types come from the descriptors, so that `roo.proto` alone says them.
"""

from __future__ import annotations

from google.protobuf.descriptor import FieldDescriptor as Fd

from roostream.wire import roo_pb2 as pb

_LEN = 2
_WIRE_TYPE = {Fd.TYPE_FIXED64: 1, Fd.TYPE_SFIXED64: 1, Fd.TYPE_FLOAT: 5, Fd.TYPE_FIXED32: 5}
_VARINTS = {Fd.TYPE_UINT32, Fd.TYPE_ENUM, Fd.TYPE_BOOL}


def varint(n: int) -> bytes:
    """An unsigned integer as protobuf writes it."""
    return _SMALL[n] if n < len(_SMALL) else _varint(n)


def _varint(n: int) -> bytes:
    out = bytearray()
    while n > 127:
        out.append(n & 127 | 128)
        n >>= 7
    out.append(n)
    return bytes(out)


_SMALL = [_varint(n) for n in range(1 << 12)]


def tags_of(message: type) -> dict[str, bytes]:
    """Field name → the bytes that stand before its value."""
    return {f.name: varint(f.number << 3 | _wire_type(f)) for f in message.DESCRIPTOR.fields}  # type: ignore[attr-defined]


def _wire_type(f: Fd) -> int:
    if f.label == Fd.LABEL_REPEATED:
        return _LEN  # packed
    return 0 if f.type in _VARINTS else _WIRE_TYPE.get(f.type, _LEN)


def column(tag: bytes, packed: bytes) -> bytes:
    """A field with its length; nothing for an empty one."""
    return tag + varint(len(packed)) + packed if packed else b""


IMPRESSION = tags_of(pb.Impression)
_FIELDS = ("header", "ro", "item_ids", "nro", "scores", "positions", "propensities")
_PLACE = {IMPRESSION[name][0]: 2 * n for n, name in enumerate(_FIELDS)}
HEADER, RO, ITEMS, NRO, SCORES, POSITIONS, PROPENSITIES = range(0, 14, 2)
"""Places in the spans: begin of a field's length, and behind it the end of the field; 0, 0 = it is not there or empty."""
WEIGHT = 14
"""Place of the four bytes of the weight; 0 = it is not there."""
_RO_TAG, _WEIGHT_TAG = IMPRESSION["ro"][0], IMPRESSION["weight"][0]


def spans_of(data: bytes) -> list[int]:
    """The spans of an impression's record, whose message is as protobuf writes it (ascending, nothing twice)."""
    spans, at, end = [0] * 15, 2, len(data)
    while at < end:
        tag = data[at]
        begin = at + 1
        if tag in _PLACE:
            size, at = data[begin], begin + 1
            if size > 127:
                size, at = _long(data, begin)
            at += size
            if size or tag == _RO_TAG:  # an empty RO block is one in which everything is missing
                place = _PLACE[tag]
                spans[place], spans[place + 1] = begin, at
        elif tag == _WEIGHT_TAG:
            spans[WEIGHT] = begin
            at = begin + 4
        else:
            break  # fields of a later build come last; they are not copied
    return spans


def payload(data: bytes, spans: list[int], place: int) -> bytes:
    """A field without its length."""
    begin, end = spans[place], spans[place + 1]
    if begin == end:
        return b""
    return data[begin + 1 : end] if data[begin] < 128 else data[_long(data, begin)[1] : end]


def _long(data: bytes, at: int) -> tuple[int, int]:
    """(value, place behind it) of a varint."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
