"""Samples, corrections and dead letters: each built by one call, feature blocks and columns copied byte for byte.

Samples are put together from the bytes of their impressions, field by field in ascending order, as protobuf writes them: no
message is parsed or made on the way. tests/joiner/test_build.py holds the bytes against protobuf's own.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from joiner.fold import Fact
from joiner.spans import (
    HEADER,
    NRO,
    POSITIONS,
    PROPENSITIES,
    RO,
    SCORES,
    WEIGHT,
    column,
    payload,
    tags_of,
    varint,
)
from joiner.state import Engagement, Impression, Origin, Page, Request
from roostream.runtime.kafka.topics import CORRECTIONS, DEAD_LETTERS, SAMPLES
from roostream.schema.ids import sample_id
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb

MAX_RAW_BYTES = 64 << 10
"""A dead letter carries at most this much of the record."""

_TAG, _PART_TAG = tags_of(pb.Sample), tags_of(pb.Part)
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
    """One record to write."""

    topic: str  # without the stack's prefix
    key: bytes
    value: bytes
    timestamp_ms: int | None  # None: the writer's now
    why: str  # reason of a dead letter, close reason of a sample; for counting


class Rows(NamedTuple):
    """Which rows of each impression a sample uses: a candidate's first row, later ones are repeats."""

    of_page: Sequence[Sequence[int]]
    items: bytes  # the candidates in shown order, 8 bytes each
    num_repeats: int


class Content(NamedTuple):
    """What a sample holds beside what its request says."""

    used: Sequence[Impression]  # in (time, digest) order
    rows: Sequence[Sequence[int]]  # of each of them
    num_labels: int  # of the schema
    labels: bytes  # f4 [candidates, labels]
    facts: Sequence[Fact]  # in (time, event id) order
    num_duplicates: int


class Change(NamedTuple):
    """What an engagement behind the close changes: labels of its candidate, `fact[4]`."""

    fact: Fact
    used: Sequence[
        Impression
    ]  # the sample's while features are kept, or none: then the correction is untrainable
    before: bytes  # f4 [labels] of that candidate; of all [candidates, labels] with features
    after: bytes


class _Features(NamedTuple):
    """Fields of a sample, with their tags; empty ones are left out."""

    ro: bytes = b""
    parts: bytes = b""
    served: bytes = b""  # scores, positions, propensities, weight


def choose_rows(pages: Sequence[Page]) -> Rows:
    """`pages` in (time, digest) order; candidates come in shown order."""
    first = pages[0]
    if len(pages) == 1 and first.num_distinct == len(first.items) >> 3:
        return Rows((range(first.num_distinct),), first.items, 0)
    seen: dict[int, None] = {}
    of_page: list[list[int]] = []
    for page in pages:
        rows = []
        for row, item in enumerate(_u8s(page.items)):
            if item not in seen:
                seen[item] = None
                rows.append(row)
        of_page.append(rows)
    num_shown = sum(len(page.items) >> 3 for page in pages)
    return Rows(of_page, struct.pack(f"<{len(seen)}Q", *seen), num_shown - len(seen))


def _u8s(packed: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(packed) >> 3}Q", packed)


def header_of(impression: Impression) -> bytes:
    """The header's bytes with their length in front, as `Request.header` keeps them."""
    spans = impression.spans
    return impression.data[spans[HEADER] : spans[HEADER + 1]]


def sample(key: bytes, request_id: str, request: Request, content: Content) -> Output:
    """The sample of a request that is CLOSED now."""
    used, rows = content.used, content.rows
    fields = [_SAMPLE, _HEADER, request.header, _ids(request, sample_id(key, request_id))]
    if len(used) == 1 and len(rows[0]) == len(used[0].page.items) >> 3:
        _add_whole(fields, used[0], content.labels)
    else:
        features = _features(used, rows, content.num_labels)
        fields += (
            features.ro,
            column(_ITEMS, request.items),
            features.parts,
            column(_LABELS, content.labels),
            features.served,
        )
    if content.facts:
        _add_events(fields, content.facts)
    if content.num_duplicates:
        fields += (_TAG["num_duplicates"], varint(content.num_duplicates))
    return Output(SAMPLES, key, b"".join(fields), request.close_ms, _REASON[request.reason])


def correction(key: bytes, request_id: str, request: Request, change: Change, num_labels: int) -> Output:
    """What an engagement changes on a sample, labels without it and with it: of the whole list with its features, since what a
    model makes of a candidate depends on the others, or of the one candidate without features."""
    features, candidate, items, used = _Features(), change.fact[4], request.items, change.used
    if used:
        features = _features(used, choose_rows([i.page for i in used]).of_page, num_labels)
    else:
        items, candidate = items[8 * candidate : 8 * candidate + 8], 0
    events: list[bytes] = []
    _add_events(events, [(*change.fact[:4], candidate)])
    value = b"".join(
        (
            _CORRECTION,
            _HEADER,
            request.header,
            _ids(request, sample_id(key, request_id, change.fact[1])),
            features.ro,
            column(_ITEMS, items),
            features.parts,
            column(_LABELS, change.after),
            features.served,
            b"".join(events),
            column(_TAG["labels_before"], change.before),
            b"" if used else _TAG["untrainable"] + b"\x01",
        )
    )
    return Output(CORRECTIONS, key, value, None, "")


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
    """A record that has no place, with where it came from and why."""
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
    """The dead letter of an event that could be read."""
    event_id = event.event_id if isinstance(event, Engagement) else 0
    return dead_letter(
        key, event.origin, event.raw, reason, error, event_id=event_id, request_id=event.request_id
    )


def within(output: Output, max_bytes: int, made_of: Iterable[Impression | Engagement]) -> list[Output]:
    """`output`, or where it is larger than a message may be, a dead letter of each event that it was made of: the last defence
    behind `joiner.budget`, since a sink that refuses a record stops the joiner at it for ever."""
    if len(output.value) <= max_bytes:
        return [output]
    error = f"expected {output.topic} of at most {max_bytes} bytes, got one of {len(output.value)}"
    return [dead_event(output.key, event, "oversized", error) for event in made_of]


def _ids(request: Request, id_: int) -> bytes:
    return _IDS.pack(
        _TAG["sample_id"], id_, _TAG["close_reason"], request.reason, _TAG["close_ms"], request.close_ms
    )


def _add_whole(fields: list[bytes], impression: Impression, labels: bytes) -> None:
    """The features and labels of one impression with all of its rows, each once."""
    data = impression.data
    (
        _,
        _,
        ro,
        ro_end,
        items,
        items_end,
        nro,
        nro_end,
        scores,
        scores_end,
        places,
        places_end,
        chances,
        chances_end,
        weight,
    ) = impression.spans
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
    if places:
        fields += (_POSITIONS, data[places:places_end])
    if chances:
        fields += (_PROPENSITIES, data[chances:chances_end])
    if weight:
        fields += (_WEIGHT, data[weight : weight + 4])


def _features(used: Sequence[Impression], rows: Sequence[Sequence[int]], num_labels: int) -> _Features:
    """RO block, parts, and what was served of the rows used. RO: of the first impression that has a block."""
    ro = next((i.data[i.spans[RO] : i.spans[RO + 1]] for i in used if i.spans[RO]), b"")
    parts = b"".join(_part(i, taken) for i, taken in zip(used, rows, strict=True) if taken)
    starts = [sum(map(len, rows[:n])) for n in range(len(rows))]
    scores = _columns(used, rows, SCORES, 4 * num_labels, lambda n, row: _NO_SCORE * num_labels)
    positions = _columns(used, rows, POSITIONS, 4, lambda n, row: _u4(starts[n] + row))
    propensities = _columns(used, rows, PROPENSITIES, 4, lambda n, row: _NO_PROPENSITY)
    served = (column(_SCORES, scores), column(_POSITIONS, positions), column(_PROPENSITIES, propensities))
    return _Features(_RO + ro if ro else b"", parts, b"".join(served) + _weight(used[0]))


def _weight(impression: Impression) -> bytes:
    at = impression.spans[WEIGHT]
    return _WEIGHT + impression.data[at : at + 4] if at else b""


def _part(impression: Impression, taken: Sequence[int]) -> bytes:
    num_rows = len(impression.page.items) >> 3
    nro = impression.data[impression.spans[NRO] : impression.spans[NRO + 1]]
    message = (_NRO + nro if nro else b"") + _NUM_ROWS + varint(num_rows)
    if len(taken) < num_rows:
        message += column(_PART_TAG["rows"], struct.pack(f"<{len(taken)}I", *taken))
    return _PARTS + varint(len(message)) + message


def _columns(
    used: Sequence[Impression],
    rows: Sequence[Sequence[int]],
    place: int,
    width: int,
    missing: Callable[[int, int], bytes],
) -> bytes:
    """The entries of the taken rows, `width` bytes each; an impression without the column gives `missing(its number, row)`.
    Nothing if none has it."""
    columns = [payload(i.data, i.spans, place) for i in used]
    if not any(columns):
        return b""
    out = []
    for n, (packed, taken) in enumerate(zip(columns, rows, strict=True)):
        out += [packed[row * width : (row + 1) * width] if packed else missing(n, row) for row in taken]
    return b"".join(out)


def _add_events(fields: list[bytes], facts: Sequence[Fact]) -> None:
    times_ms, ids, names, values, candidates = zip(*facts, strict=True)
    actions = dict.fromkeys(names, 0)
    numbers: Sequence[int] = (0,) * len(names)
    if len(actions) > 1:
        actions = {name: n for n, name in enumerate(actions)}
        numbers = [actions[name] for name in names]
    for (head, pack), column_ in zip(
        _event_columns(len(ids)), (ids, candidates, numbers, values, times_ms), strict=True
    ):
        fields += (head, pack(*column_))
    for name in actions:
        text = name.encode()
        fields += (_ACTIONS, varint(len(text)), text)


@functools.lru_cache(maxsize=256)
def _event_columns(n: int) -> list[tuple[bytes, Callable[..., bytes]]]:
    """Of `n` events, field by field: tag and length, and what packs the values."""
    kinds = (
        ("event_ids", "Q"),
        ("event_candidates", "I"),
        ("event_actions", "I"),
        ("event_values", "f"),
        ("event_times", "q"),
    )
    packers = [(name, struct.Struct(f"<{n}{kind}")) for name, kind in kinds]
    return [(_TAG[name] + varint(packer.size), packer.pack) for name, packer in packers]
