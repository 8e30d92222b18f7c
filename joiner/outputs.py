"""Builds the records that the joiner writes: samples, corrections and dead letters.

A sample is assembled from the bytes of its impressions, field by field in ascending order as protobuf encodes
them; feature blocks and columns are copied, not parsed. tests/joiner/test_outputs.py compares the bytes with
protobuf's own encoding.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from joiner.labels import JoinedEngagement
from joiner.state import Engagement, Impression, Origin, Page, Request
from joiner.wire_offsets import (
    HEADER,
    NRO,
    POSITIONS,
    PROPENSITIES,
    RO,
    SCORES,
    WEIGHT,
    field_tags,
    field_value,
    length_delimited,
    varint,
)
from roostream.runtime.kafka.topics import CORRECTIONS, DEAD_LETTERS, SAMPLES
from roostream.schema.ids import sample_id
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb

OUTPUTS = (SAMPLES, CORRECTIONS, DEAD_LETTERS)
MAX_RAW_BYTES = 64 << 10
"""A dead letter contains at most this much of the original record."""

_TAG, _PART_TAG = field_tags(pb.Sample), field_tags(pb.Part)
_REASON = {value.number: value.name for value in pb.CloseReason.DESCRIPTOR.values}
_SAMPLE, _CORRECTION = bytes((wire.SAMPLE, wire.VERSION)), bytes((wire.CORRECTION, wire.VERSION))
_HEADER, _RO, _ITEMS, _PARTS, _LABELS = (
    _TAG[name] for name in ("header", "ro", "item_ids", "parts", "labels")
)
_SCORES, _POSITIONS, _PROPENSITIES = _TAG["scores"], _TAG["positions"], _TAG["propensities"]
_WEIGHT, _NRO, _NUM_ROWS, _ACTIONS = _TAG["weight"], _PART_TAG["nro"], _PART_TAG["num_rows"], _TAG["actions"]
_IDS = struct.Struct(f"<{len(_TAG['sample_id'])}sQ{len(_TAG['close_reason'])}sB{len(_TAG['close_ms'])}sq")
_NO_SCORE, _NO_PROPENSITY = struct.pack("<f", float("nan")), struct.pack("<f", 1.0)
_u4 = struct.Struct("<I").pack


class Output(NamedTuple):
    """A record to write."""

    topic: str  # without the deployment's prefix
    key: bytes
    value: bytes
    timestamp_ms: int | None  # None: the time of writing
    reason: str  # of a dead letter, or of a sample's close; for metrics


class RowSelection(NamedTuple):
    """The rows of each page that a sample uses: the first row of each candidate. Later rows of the same item
    are repeats."""

    rows: Sequence[Sequence[int]]  # of each page
    items: bytes  # candidate ids in shown order, 8 bytes each
    num_repeats: int


class SampleContent(NamedTuple):
    """The parts of a sample that its `Request` does not have."""

    impressions: Sequence[Impression]  # in (time, digest) order
    rows: Sequence[Sequence[int]]  # used of each impression
    num_labels: int  # of the schema
    labels: bytes  # f4 [candidates, labels]
    engagements: Sequence[JoinedEngagement]  # in (time, event id) order
    num_duplicates: int


class LabelChange(NamedTuple):
    """What an engagement after the close changes: the labels of its candidate."""

    engagement: JoinedEngagement
    # Of the sample, while features are kept; empty: the correction is untrainable.
    impressions: Sequence[Impression]
    before: bytes  # f4 [labels] of that candidate; with features f4 [candidates, labels]
    after: bytes


class _Features(NamedTuple):
    """Encoded fields of a sample; empty fields are omitted."""

    ro: bytes = b""
    parts: bytes = b""
    served: bytes = b""  # scores, positions, propensities and weight as logged by serving


def select_rows(pages: Sequence[Page]) -> RowSelection:
    """Select the rows of these pages, which are in (time, digest) order."""
    first = pages[0]
    if len(pages) == 1 and first.num_distinct == len(first.items) >> 3:
        return RowSelection((range(first.num_distinct),), first.items, 0)
    seen: dict[int, None] = {}
    rows_of_page: list[list[int]] = []
    for page in pages:
        rows = []
        for row, item in enumerate(_u64s(page.items)):
            if item not in seen:
                seen[item] = None
                rows.append(row)
        rows_of_page.append(rows)
    num_shown = sum(len(page.items) >> 3 for page in pages)
    return RowSelection(rows_of_page, struct.pack(f"<{len(seen)}Q", *seen), num_shown - len(seen))


def _u64s(packed: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(packed) >> 3}Q", packed)


def header_of(impression: Impression) -> bytes:
    """The header field with its length, as `Request.header` keeps it."""
    offsets = impression.offsets
    return impression.data[offsets[HEADER] : offsets[HEADER + 1]]


def sample(key: bytes, request_id: str, request: Request, content: SampleContent) -> Output:
    """Return the record of the sample of a request that has just closed."""
    impressions, rows = content.impressions, content.rows
    fields = [_SAMPLE, _HEADER, request.header, _ids(request, sample_id(key, request_id))]
    if len(impressions) == 1 and len(rows[0]) == len(impressions[0].page.items) >> 3:
        _add_single_impression(fields, impressions[0], content.labels)
    else:
        features = _features(impressions, rows, content.num_labels)
        fields += (
            features.ro,
            length_delimited(_ITEMS, request.items),
            features.parts,
            length_delimited(_LABELS, content.labels),
            features.served,
        )
    if content.engagements:
        _add_engagements(fields, content.engagements)
    if content.num_duplicates:
        fields += (_TAG["num_duplicates"], varint(content.num_duplicates))
    return Output(SAMPLES, key, b"".join(fields), request.close_ms, _REASON[request.reason])


def correction(key: bytes, request_id: str, request: Request, change: LabelChange, num_labels: int) -> Output:
    """The change of labels by one engagement after the close: labels without it and with it.

    With features it contains the whole list of candidates, because a model's score of one candidate depends
    on the others. Without features it contains only the one candidate.

    Its timestamp is when it was due. Readers merge partitions by timestamp. With the time of writing, all
    corrections of an outage would be trained after all its samples, and the model would diverge
    (docs/decisions/0032).
    """
    features = _Features()
    candidate = change.engagement[4]
    items = request.items
    impressions = change.impressions
    if impressions:
        features = _features(impressions, select_rows([i.page for i in impressions]).rows, num_labels)
    else:
        items, candidate = items[8 * candidate : 8 * candidate + 8], 0
    engagement: list[bytes] = []
    _add_engagements(engagement, [(*change.engagement[:4], candidate)])
    value = b"".join(
        (
            _CORRECTION,
            _HEADER,
            request.header,
            _ids(request, sample_id(key, request_id, change.engagement[1])),
            features.ro,
            length_delimited(_ITEMS, items),
            features.parts,
            length_delimited(_LABELS, change.after),
            features.served,
            b"".join(engagement),
            length_delimited(_TAG["labels_before"], change.before),
            b"" if impressions else _TAG["untrainable"] + b"\x01",
        )
    )
    due_ms = max(request.close_ms, change.engagement[0])
    return Output(CORRECTIONS, key, value, due_ms, "")


def dead_letter(
    key: bytes,
    origin: Origin,
    raw: bytes | None,
    reason: str,
    error: str,
    *,
    event_id: int = 0,
    request_id: str = "",
) -> Output:
    """The dead letter of a record that could not be joined: its position, the reason and the error."""
    assert reason in wire.REASONS, reason
    message = pb.DeadLetter(
        reason=reason,
        topic=origin.topic,
        partition=origin.partition,
        offset=origin.offset,
        error=error,
        raw=(raw or b"")[:MAX_RAW_BYTES],
        raw_bytes=len(raw or b""),
        event_id=event_id,
        request_id=request_id,
    )
    return Output(DEAD_LETTERS, key, wire.encode(wire.DEAD_LETTER, message), None, reason)


def dead_event(key: bytes, event: Impression | Engagement, reason: str, error: str) -> Output:
    """Return the dead letter of a decoded event."""
    event_id = event.event_id if isinstance(event, Engagement) else 0
    return dead_letter(
        key, event.origin, event.raw, reason, error, event_id=event_id, request_id=event.request_id
    )


def enforce_max_bytes(
    output: Output, max_bytes: int, events: Iterable[Impression | Engagement]
) -> list[Output]:
    """`output`, or a dead letter of each of its `events` if it is larger than a message may be.

    The size budget of a request (`Join`) should prevent this. It is a last safeguard: a sink that refuses a
    record would stop the joiner there forever.
    """
    if len(output.value) <= max_bytes:
        return [output]
    error = f"expected a record of {output.topic} of at most {max_bytes} bytes, got {len(output.value)}"
    return [dead_event(output.key, event, "oversized", error) for event in events]


def _ids(request: Request, id_: int) -> bytes:
    """Return the encoded fields `sample_id`, `close_reason` and `close_ms`."""
    return _IDS.pack(
        _TAG["sample_id"], id_, _TAG["close_reason"], request.reason, _TAG["close_ms"], request.close_ms
    )


def _add_single_impression(fields: list[bytes], impression: Impression, labels: bytes) -> None:
    """Append the encoded features and labels of a sample that has one impression, with distinct items."""
    data = impression.data
    ro, ro_end, items, items_end, nro, nro_end = impression.offsets[2:8]
    scores, scores_end, positions, positions_end, propensities, propensities_end, weight = impression.offsets[
        8:
    ]
    if ro:
        fields += (_RO, data[ro:ro_end])
    if items:
        rows = _NUM_ROWS + varint(impression.page.num_distinct)
        block = data[nro:nro_end]
        size = len(rows) + (len(_NRO) + len(block) if block else 0)
        fields += (_ITEMS, data[items:items_end], _PARTS, varint(size), _NRO if block else b"", block, rows)
    if labels:
        fields += (_LABELS, varint(len(labels)), labels)
    if scores:
        fields += (_SCORES, data[scores:scores_end])
    if positions:
        fields += (_POSITIONS, data[positions:positions_end])
    if propensities:
        fields += (_PROPENSITIES, data[propensities:propensities_end])
    if weight:
        fields += (_WEIGHT, data[weight : weight + 4])


def _features(impressions: Sequence[Impression], rows: Sequence[Sequence[int]], num_labels: int) -> _Features:
    """RO block (of the first impression that has one), parts, and logged scores and positions of the selected
    rows."""
    ro = next((i.data[i.offsets[RO] : i.offsets[RO + 1]] for i in impressions if i.offsets[RO]), b"")
    parts = b"".join(_part(i, selected) for i, selected in zip(impressions, rows, strict=True) if selected)
    starts = [sum(map(len, rows[:n])) for n in range(len(rows))]
    scores = _columns(impressions, rows, SCORES, 4 * num_labels, lambda n, row: _NO_SCORE * num_labels)
    positions = _columns(impressions, rows, POSITIONS, 4, lambda n, row: _u4(starts[n] + row))
    propensities = _columns(impressions, rows, PROPENSITIES, 4, lambda n, row: _NO_PROPENSITY)
    served = (
        length_delimited(_SCORES, scores),
        length_delimited(_POSITIONS, positions),
        length_delimited(_PROPENSITIES, propensities),
    )
    return _Features(_RO + ro if ro else b"", parts, b"".join(served) + _weight(impressions[0]))


def _weight(impression: Impression) -> bytes:
    at = impression.offsets[WEIGHT]
    return _WEIGHT + impression.data[at : at + 4] if at else b""


def _part(impression: Impression, selected: Sequence[int]) -> bytes:
    """The field `parts` of one impression: its NRO block, and which of its rows are used."""
    num_rows = len(impression.page.items) >> 3
    nro = impression.data[impression.offsets[NRO] : impression.offsets[NRO + 1]]
    message = (_NRO + nro if nro else b"") + _NUM_ROWS + varint(num_rows)
    if len(selected) < num_rows:
        message += length_delimited(_PART_TAG["rows"], struct.pack(f"<{len(selected)}I", *selected))
    return _PARTS + varint(len(message)) + message


def _columns(
    impressions: Sequence[Impression],
    rows: Sequence[Sequence[int]],
    index: int,
    width: int,
    missing: Callable[[int, int], bytes],
) -> bytes:
    """The column's entries of the selected rows, `width` bytes each. An impression without the column
    contributes `missing(number of the impression, row)`. Empty if no impression has the column."""
    columns = [field_value(i.data, i.offsets, index) for i in impressions]
    if not any(columns):
        return b""
    out = []
    for n, (packed, selected) in enumerate(zip(columns, rows, strict=True)):
        out += [packed[row * width : (row + 1) * width] if packed else missing(n, row) for row in selected]
    return b"".join(out)


def _add_engagements(fields: list[bytes], engagements: Sequence[JoinedEngagement]) -> None:
    times_ms, ids, names, values, candidates = zip(*engagements, strict=True)
    actions = dict.fromkeys(names, 0)
    numbers: Sequence[int] = (0,) * len(names)
    if len(actions) > 1:
        actions = {name: n for n, name in enumerate(actions)}
        numbers = [actions[name] for name in names]
    for (tag, pack), column in zip(
        _engagement_columns(len(ids)), (ids, candidates, numbers, values, times_ms), strict=True
    ):
        fields += (tag, pack(*column))
    for name in actions:
        text = name.encode()
        fields += (_ACTIONS, varint(len(text)), text)


@functools.lru_cache(maxsize=256)
def _engagement_columns(n: int) -> list[tuple[bytes, Callable[..., bytes]]]:
    """For each column of `n` engagements: tag with length, and the function that packs the values."""
    kinds = (
        ("event_ids", "Q"),
        ("event_candidates", "I"),
        ("event_actions", "I"),
        ("event_values", "f"),
        ("event_times", "q"),
    )
    packers = [(name, struct.Struct(f"<{n}{kind}")) for name, kind in kinds]
    return [(_TAG[name] + varint(packer.size), packer.pack) for name, packer in packers]
