"""Step 1 of decoding: finds the fields of protobuf messages in a byte buffer, and checks samples and blocks.

The kernels use no Python objects, hold no GIL and never read outside of the buffer. `scan_messages` notes the
span of each field and checks every bound. It knows the form that protobuf writers produce: fields in
ascending order, packed columns in one piece. It reports any other message, damaged or merely unusual, as not
ok; protobuf itself then parses it (decode.py). All other kernels read only inside of noted spans.

A span is [start, end) in the buffer; 0, 0 = the field is absent.
Letters: N messages or samples, P parts, M blocks, S writers' schemas, F floats, K list features.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numba import njit

from roostream.wire import roo_pb2 as pb
from roostream.wire.proto_fields import (
    BLOCK,
    BYTES,
    FIXED32,
    FIXED64,
    HEADER,
    PART,
    REPEATED,
    SAMPLE,
    TEXT,
    VARINT,
    field_formats,
)
from roostream.wire.records import MAX_WEIGHT

OK, BAD_SHAPE, NON_FINITE, OVERSIZED, BAD_NUMBER = range(5)
"""Status of a sample or block."""
# Non-negative floats are ordered like their bits.
_MAX_WEIGHT_BITS = int(np.float32(MAX_WEIGHT).view(np.uint32))
_ONE_BITS = int(np.float32(1).view(np.uint32))
_FINITE_FLOATS = (
    SAMPLE.labels,
    SAMPLE.propensities,
    SAMPLE.weight,
    SAMPLE.event_values,
    SAMPLE.labels_before,
)
_SAMPLE_FIELDS, _HEADER_FIELDS, _PART_FIELDS, BLOCK_FIELDS = (
    field_formats(m.DESCRIPTOR) for m in (pb.Sample, pb.Header, pb.Part, pb.Block)
)


class ReadingPlan(NamedTuple):
    """How the blocks of one side are read: one row for each writer's schema, padded with -1."""

    num_floats_S: np.ndarray  # int64: floats as written
    num_lists_S: np.ndarray  # int64: list features as written
    float_to_SF: np.ndarray  # int64: the reader's index of a written float, -1 = dropped
    list_to_SK: np.ndarray  # int64: the same for list features
    streams_SK3: np.ndarray  # int64: arrays of a list's length that it adds to ids, weights, times
    max_len_K: np.ndarray  # int64: the reader's


class Blocks(NamedTuple):
    """M blocks of one side, and the output rows of each."""

    spans_M: np.ndarray  # int64 [M, 7, 2]: fields of Block
    rows_M: np.ndarray  # int64: rows in the block
    select_M: np.ndarray  # int64 [M, 2]: span of the fixed32 numbers of the rows in use; empty = all
    out_M: np.ndarray  # int64: first output row
    plan_M: np.ndarray  # int64: row of the ReadingPlan

    def take(self, index: np.ndarray) -> Blocks:
        return Blocks(*(a[index] for a in self))


@dataclasses.dataclass(frozen=True, eq=False)
class SampleScan:
    """Where the fields of N samples and their P parts lie, in the order of the samples."""

    buf: np.ndarray  # uint8
    index_N: np.ndarray  # int64: the record of each sample
    spans_N: np.ndarray  # int64 [N, 22, 2]: fields of Sample
    ok_N: np.ndarray  # bool: in our writers' form; False = the other arrays have no meaning
    schema_N: np.ndarray  # int64 bits: fingerprint of the writer's schema
    time_ms_N: np.ndarray  # int64
    surface_N: np.ndarray  # int64 [N, 2]: spans
    ro_spans_N: np.ndarray  # int64 [N, 7, 2]: fields of the RO block
    sample_P: np.ndarray  # int64: the sample of each part
    nro_spans_P: np.ndarray  # int64 [P, 7, 2]: fields of the NRO block
    select_P: np.ndarray  # int64 [P, 2]: span of the selected rows, empty = all
    rows_P: np.ndarray  # int64: rows in the part's block
    used_P: np.ndarray  # int64: rows in use
    status_P: np.ndarray  # int64: OK, or the error of rows and selection

    def ro_blocks(self, plan_N: np.ndarray) -> Blocks:
        n = len(plan_N)
        none = np.zeros((n, 2), dtype=np.int64)
        return Blocks(self.ro_spans_N, np.ones(n, dtype=np.int64), none, np.arange(n), plan_N)

    def nro_blocks(self, plan_N: np.ndarray) -> Blocks:
        """The blocks of all parts; output rows follow each other."""
        out_P = offsets(self.used_P)[:-1]
        return Blocks(self.nro_spans_P, self.rows_P, self.select_P, out_P, plan_N[self.sample_P])


def join_values(values: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """One buffer (uint8, one byte longer than the values) and the start of each value (int64 [values +
    1])."""
    starts = offsets(np.fromiter(map(len, values), dtype=np.int64, count=len(values)))
    return np.frombuffer(b"".join((*values, b"\0")), dtype=np.uint8), starts


def offsets(counts_N: np.ndarray) -> np.ndarray:
    """int64 [N + 1]: 0 and the running sums."""
    offset_N1 = np.zeros(len(counts_N) + 1, dtype=np.int64)
    np.cumsum(counts_N, out=offset_N1[1:])
    return offset_N1


def scan_samples(buf: np.ndarray, starts: np.ndarray, index_N: np.ndarray, max_rows: int) -> SampleScan:
    """Scan samples among the records of `join_values`; each begins behind its type and version byte."""
    spans_N, ok_N = _scan(buf, starts[index_N] + 2, starts[index_N + 1], _SAMPLE_FIELDS)
    headers_N, header_ok_N = _scan(buf, *_bounds(spans_N, SAMPLE.header), _HEADER_FIELDS)
    ro_N, ro_ok_N = _scan(buf, *_bounds(spans_N, SAMPLE.ro), BLOCK_FIELDS)
    ok_N &= header_ok_N & ro_ok_N
    spans_N[~ok_N, SAMPLE.parts] = 0
    sample_P = np.repeat(np.arange(len(index_N)), spans_N[:, SAMPLE.parts, 1])
    starts_P, ends_P = np.zeros((2, len(sample_P)), dtype=np.int64)
    split_parts(buf, field(spans_N, SAMPLE.parts), len(buf), starts_P, ends_P)
    parts_P, part_ok_P = _scan(buf, starts_P, ends_P, _PART_FIELDS)
    nro_P, nro_ok_P = _scan(buf, *_bounds(parts_P, PART.nro), BLOCK_FIELDS)
    ok_N[sample_P[~(part_ok_P & nro_ok_P)]] = False
    rows_P = read_varint(buf, field(parts_P, PART.num_rows)) & 0xFFFFFFFF
    used_P, status_P = np.zeros((2, len(sample_P)), dtype=np.int64)
    check_parts(buf, field(parts_P, PART.rows), rows_P, max_rows, used_P, status_P)
    return SampleScan(
        buf=buf,
        index_N=index_N,
        spans_N=spans_N,
        ok_N=ok_N,
        schema_N=read_i64(buf, field(headers_N, HEADER.schema)),
        time_ms_N=read_i64(buf, field(headers_N, HEADER.time_ms)),
        surface_N=field(headers_N, HEADER.surface),
        ro_spans_N=ro_N,
        sample_P=sample_P,
        nro_spans_P=nro_P,
        select_P=field(parts_P, PART.rows),
        rows_P=rows_P,
        used_P=used_P,
        status_P=status_P,
    )


def scan_blocks(blocks: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Blocks in one buffer, their fields' spans (int64 [M, 7, 2]), and whether each has our writers' form
    (bool [M])."""
    buf, starts = join_values(blocks)
    return buf, *_scan(buf, starts[:-1], starts[1:], BLOCK_FIELDS)


def field(spans_N: np.ndarray, number: int) -> np.ndarray:
    """int64 [N, 2]: the spans of one field, contiguous, so that each kernel is compiled for one layout
    only."""
    return np.ascontiguousarray(spans_N[:, number])


def _bounds(spans_N: np.ndarray, number: int) -> tuple[np.ndarray, np.ndarray]:
    return np.ascontiguousarray(spans_N[:, number, 0]), np.ascontiguousarray(spans_N[:, number, 1])


def _scan(
    buf: np.ndarray, starts: np.ndarray, ends: np.ndarray, fields: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    spans, ok = np.zeros((len(starts), len(fields), 2), dtype=np.int64), np.zeros(len(starts), dtype=np.bool_)
    scan_messages(buf, starts, ends, fields, spans, ok)
    return spans, ok


# ---- kernels: numbers ----


@njit(cache=True, nogil=True)
def varint(buf: np.ndarray, at: int, end: int) -> tuple[np.int64, int]:
    """Decode the varint at `at` of buf[:end]. Returns the value as int64 and the position after it, which is
    -1 if the varint does not end within `end`, or not within 10 bytes."""
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
    """The little-endian int64 at byte `at`."""
    return u32(buf, at) | u32(buf, at + 4) << 32


@njit(cache=True, nogil=True)
def any_infinite(buf: np.ndarray, span: np.ndarray, nan_too: bool) -> bool:
    """Whether a float32 in `span` is an infinity or, with `nan_too`, a NaN."""
    for at in range(span[0], span[1], 4):
        bits = u32(buf, at) & 0x7FFFFFFF
        if bits == 0x7F800000 or (nan_too and bits > 0x7F800000):
            return True
    return False


@njit(cache=True, nogil=True)
def any_beyond(buf: np.ndarray, span: np.ndarray, max_bits: int) -> bool:
    """Whether a float32 in `span` is a NaN or larger in magnitude than the float with the bits `max_bits`."""
    for at in range(span[0], span[1], 4):
        if u32(buf, at) & 0x7FFFFFFF > max_bits:
            return True
    return False


@njit(cache=True, nogil=True)
def any_not_above_zero(buf: np.ndarray, span: np.ndarray) -> bool:
    """Whether a float32 in `span` is zero or negative."""
    for at in range(span[0], span[1], 4):
        bits = u32(buf, at)
        if bits == 0 or bits >> 31:
            return True
    return False


@njit(cache=True, nogil=True)
def is_utf8(buf: np.ndarray, at: int, end: int) -> bool:
    """Whether bytes are UTF-8 by the Unicode standard, table 3-7: no overlong forms, surrogates or truncated
    sequences."""
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


# ---- kernels: scan ----


@njit(cache=True, nogil=True)
def skip(buf: np.ndarray, at: int, end: int, wire_type: int) -> tuple[int, int | np.int64]:
    """(start, end) of a field's content, whose length or value is at `at`; end -1 if it does not fit."""
    if wire_type == VARINT:
        return at, varint(buf, at, end)[1]
    size = np.int64(8 if wire_type == FIXED64 else 4)
    if wire_type == BYTES:
        size, at = varint(buf, at, end)
        if at < 0:
            return at, -1
    elif wire_type != FIXED64 and wire_type != FIXED32:
        return at, -1
    return (at, at + size) if 0 <= size <= end - at else (at, -1)


@njit(cache=True, nogil=True)
def scan_message(buf: np.ndarray, at: int, end: int, fields: np.ndarray, spans: np.ndarray) -> bool:
    """Note the spans of a message's fields, False = not in our form. A REPEATED field has (start of its first
    tag, count)."""
    last = 0
    while at < end:
        tag_start = at
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
            spans[number, 0] = spans[number, 0] if spans[number, 1] else tag_start
            spans[number, 1] += 1
        else:
            spans[number, 0], spans[number, 1] = start, at
        last = number
    return True


@njit(cache=True, nogil=True)
def scan_messages(
    buf: np.ndarray,
    starts_N: np.ndarray,
    ends_N: np.ndarray,
    fields: np.ndarray,
    spans_N: np.ndarray,
    ok_N: np.ndarray,
) -> None:
    """`scan_message` of N messages into spans_N (int64 [N, fields, 2], zero before) and ok_N."""
    for n in range(len(starts_N)):
        ok_N[n] = scan_message(buf, starts_N[n], ends_N[n], fields, spans_N[n])


@njit(cache=True, nogil=True)
def split_parts(
    buf: np.ndarray, parts_N: np.ndarray, end: int, starts_P: np.ndarray, ends_P: np.ndarray
) -> None:
    """Spans of the parts, from the (start of the first tag, count) of each sample."""
    p = 0
    for n in range(len(parts_N)):
        at = parts_N[n, 0]
        for _ in range(parts_N[n, 1]):
            starts_P[p], ends_P[p] = skip(buf, varint(buf, at, end)[1], end, BYTES)
            at = ends_P[p]
            p += 1


# ---- kernels: check ----


@njit(cache=True, nogil=True)
def check_parts(
    buf: np.ndarray,
    select_P: np.ndarray,
    rows_P: np.ndarray,
    max_rows: int,
    used_P: np.ndarray,
    status_P: np.ndarray,
) -> None:
    """Count the rows in use; selected rows must ascend and lie in the block."""
    for p in range(len(rows_P)):
        selected_rows = (select_P[p, 1] - select_P[p, 0]) // 4
        used_P[p] = selected_rows if selected_rows else rows_P[p]
        if rows_P[p] > max_rows:
            status_P[p] = OVERSIZED
        elif selected_rows:
            last = np.int64(-1)
            for at in range(select_P[p, 0], select_P[p, 1], 4):
                row = u32(buf, at)
                if row <= last or row >= rows_P[p]:
                    status_P[p] = BAD_SHAPE
                last = row


@njit(cache=True, nogil=True)
def check_samples(
    buf: np.ndarray,
    spans_N: np.ndarray,
    num_labels_N: np.ndarray,
    used_N: np.ndarray,
    max_candidates: int,
    status_N: np.ndarray,
) -> None:
    """`check_sample` of each sample that is OK so far; writes `status_N`."""
    for n in range(len(spans_N)):
        if status_N[n] == OK:
            status_N[n] = check_sample(buf, spans_N[n], num_labels_N[n], used_N[n], max_candidates)


@njit(cache=True, nogil=True)
def check_sample(
    buf: np.ndarray, spans: np.ndarray, num_labels: int, num_used: int, max_candidates: int
) -> int:
    """A status: columns agree with the candidates, events with each other, numbers are finite and within
    bounds."""
    size = spans[:, 1] - spans[:, 0]
    n = size[SAMPLE.item_ids] // 8
    if n > max_candidates:
        return OVERSIZED
    if not (
        num_used == n
        and has_candidate_shape(size, n, num_labels)
        and has_event_shape(buf, spans, n)
        and not any_above_int32(buf, spans[SAMPLE.positions])
    ):
        return BAD_SHAPE
    is_finite = not any_infinite(buf, spans[SAMPLE.scores], False)
    for number in _FINITE_FLOATS:
        is_finite = is_finite and not any_infinite(buf, spans[number], True)
    if not is_finite:
        return NON_FINITE
    return OK if has_bounds(buf, spans) else BAD_NUMBER


@njit(cache=True, nogil=True)
def has_candidate_shape(size: np.ndarray, n: int, num_labels: int) -> bool:
    """Whether the columns of the candidates have `n` entries, or are absent where that is allowed."""
    by_label = 4 * n * num_labels
    is_ok = size[SAMPLE.labels] == by_label
    for number in (SAMPLE.labels_before, SAMPLE.scores):
        is_ok = is_ok and (size[number] == 0 or size[number] == by_label)
    for number in (SAMPLE.positions, SAMPLE.propensities):
        is_ok = is_ok and (size[number] == 0 or size[number] == 4 * n)
    return is_ok


@njit(cache=True, nogil=True)
def has_event_shape(buf: np.ndarray, spans: np.ndarray, n: int) -> bool:
    """Whether the columns of events agree with each other, with the `n` candidates and with the actions."""
    size = spans[:, 1] - spans[:, 0]
    events = size[SAMPLE.event_ids] // 8
    is_ok = size[SAMPLE.event_times] == 8 * events
    for number in (SAMPLE.event_candidates, SAMPLE.event_actions, SAMPLE.event_values):
        is_ok = is_ok and size[number] == 4 * events
    candidates, actions = spans[SAMPLE.event_candidates, 0], spans[SAMPLE.event_actions, 0]
    for e in range(events if is_ok else 0):
        if u32(buf, candidates + 4 * e) >= n or u32(buf, actions + 4 * e) >= spans[SAMPLE.actions, 1]:
            return False
    return is_ok


@njit(cache=True, nogil=True)
def any_above_int32(buf: np.ndarray, span: np.ndarray) -> bool:
    """Whether a uint32 in `span` has no positive int32."""
    for at in range(span[0], span[1], 4):
        if u32(buf, at) > 0x7FFFFFFF:
            return True
    return False


@njit(cache=True, nogil=True)
def has_bounds(buf: np.ndarray, spans: np.ndarray) -> bool:
    """Whether the weight is in 0..MAX_WEIGHT (0 = none given) and propensities are in (0, 1]; all of them are
    finite."""
    weight, propensities = spans[SAMPLE.weight], spans[SAMPLE.propensities]
    if weight[1] > weight[0] and u32(buf, weight[0]) & 0x7FFFFFFF and any_not_above_zero(buf, weight):
        return False
    return not (
        any_beyond(buf, weight, _MAX_WEIGHT_BITS)
        or any_beyond(buf, propensities, _ONE_BITS)
        or any_not_above_zero(buf, propensities)
    )


@njit(cache=True, nogil=True)
def check_blocks(
    buf: np.ndarray, blocks: Blocks, plan: ReadingPlan, max_list: int, status_M: np.ndarray
) -> None:
    """`check_block` of each block that is OK so far; writes `status_M`."""
    for m in range(len(blocks.rows_M)):
        if status_M[m] == OK:
            status_M[m] = check_block(
                buf, blocks.spans_M[m], blocks.rows_M[m], plan, blocks.plan_M[m], max_list
            )


@njit(cache=True, nogil=True)
def check_block(
    buf: np.ndarray, spans: np.ndarray, rows: int, plan: ReadingPlan, s: int, max_list: int
) -> int:
    """A status, by the same rule as `roostream.wire.block.check_columns`, which says what is wrong and needs
    no compiler. tests/wire/test_decode.py compares the two on damaged blocks."""
    if is_blank(spans):
        return OK
    lists = plan.num_lists_S[s]
    size = spans[:, 1] - spans[:, 0]
    if (
        size[BLOCK.floats] != 4 * rows * plan.num_floats_S[s]
        or size[BLOCK.lengths] != 4 * rows * lists
        or size[BLOCK.missing] > (rows * lists + 7) // 8
    ):
        return BAD_SHAPE
    ids, weights, times, conflict = np.int64(0), np.int64(0), np.int64(0), False
    for i in range(rows * lists):
        length = u32(buf, spans[BLOCK.lengths, 0] + 4 * i)
        if length > max_list:
            return OVERSIZED
        conflict = conflict or (length > 0 and is_missing(buf, spans[BLOCK.missing], i))
        streams = plan.streams_SK3[s, i % lists]
        ids += length * streams[0]
        weights += length * streams[1]
        times += length * streams[2]
    if (
        conflict
        or size[BLOCK.ids] != 8 * ids
        or size[BLOCK.weights] != 4 * weights
        or size[BLOCK.times] != 8 * times
    ):
        return BAD_SHAPE
    if any_infinite(buf, spans[BLOCK.floats], False) or any_infinite(buf, spans[BLOCK.weights], True):
        return NON_FINITE
    return BAD_NUMBER if any_beyond(buf, spans[BLOCK.weights], _MAX_WEIGHT_BITS) else OK


@njit(cache=True, nogil=True)
def is_blank(spans: np.ndarray) -> bool:
    """Whether a block has no columns: every feature is missing."""
    for number in BLOCK:
        if is_given(spans, number):
            return False
    return True


@njit(cache=True, nogil=True)
def is_given(spans: np.ndarray, number: int) -> bool:
    """Whether the field with this number is present."""
    return spans[number, 1] > spans[number, 0]


@njit(cache=True, nogil=True)
def is_missing(buf: np.ndarray, span: np.ndarray, bit: int) -> bool:
    """Whether this bit of the missing bits is set; bits after the last byte are 0."""
    at = span[0] + (bit >> 3)
    return at < span[1] and (buf[at] >> (bit & 7)) & 1 == 1
