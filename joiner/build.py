"""Samples, corrections and dead letters: each built by one call, feature blocks copied byte for byte."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from joiner.fold import fold_labels
from joiner.state import Engagement, Folded, Impression, Origin, Tombstone
from roo import roo_pb2 as pb
from roo import wire
from roo.ids import sample_id
from roo.schema import Schema
from runtime.topics import CORRECTIONS, DEAD_LETTERS, SAMPLES

MAX_RAW_BYTES = 64 << 10
"""A dead letter carries at most this much of the record."""


class Output(NamedTuple):
    """One record to write."""

    topic: str  # without the stack's prefix
    key: bytes
    value: bytes
    timestamp_ms: int | None  # None: the writer's now
    why: str  # reason of a dead letter, close reason of a sample; for counting


class Rows(NamedTuple):
    """Which rows of each impression a sample uses: a candidate's first row, later ones are repeats."""

    of_impression: list[list[int]]
    item_ids: list[int]
    num_repeats: int


def choose_rows(used: Sequence[Impression]) -> Rows:
    """`used` in (time, digest) order; candidates come in shown order."""
    index: dict[int, None] = {}
    of_impression = []
    for impression in used:
        rows = []
        for row, item in enumerate(impression.item_ids):
            if item not in index:
                index[item] = None
                rows.append(row)
        of_impression.append(rows)
    return Rows(of_impression, list(index), sum(len(i.item_ids) for i in used) - len(index))


def sample(key: bytes, used: Sequence[Impression], tombstone: Tombstone, schema: Schema, *, num_duplicates: int) -> Output:
    """The sample of a request that closes. `used`: its impressions in (time, digest) order; `tombstone.folded`: what joined."""
    message = _start(key, used[0].request_id, tombstone)
    message.num_duplicates = num_duplicates
    message.item_ids.extend(tombstone.item_ids)
    messages = [_parse(i) for i in used]
    _copy_features(message, messages, choose_rows(used).of_impression, len(schema.labels))
    message.labels.extend(labels_of(tombstone, message.header.time_ms, schema))
    _copy_events(message, tombstone.folded)
    value = wire.encode(wire.SAMPLE, message)
    return Output(SAMPLES, key, value, tombstone.close_ms, pb.CloseReason.Name(tombstone.reason))


def correction(
    key: bytes,
    engagement: Engagement,
    tombstone: Tombstone,
    before: Sequence[Folded],
    used: Sequence[Impression],
    schema: Schema,
) -> Output:
    """What `engagement` changes on a sample: the one candidate, its labels without it (`before`) and with it
    (`tombstone.folded`). `used`: the sample's impressions while features are kept, or none: then it is untrainable."""
    message = _start(key, engagement.request_id, tombstone, engagement.event_id)
    candidate = tombstone.item_ids.index(engagement.item_id)
    of_candidate = [f for f in tombstone.folded if f.candidate == candidate]
    message.item_ids.append(engagement.item_id)
    message.untrainable = not used
    if used:
        rows = choose_rows(used).of_impression
        _copy_features(message, [_parse(i) for i in used], _only(rows, candidate), len(schema.labels))
    time_ms, window_ms = message.header.time_ms, tombstone.window_ms
    for labels, folded in (
        (message.labels_before, [f for f in before if f.candidate == candidate]),
        (message.labels, of_candidate),
    ):
        alone = [Folded(f.event_id, 0, f.action, f.value, f.time_ms) for f in folded]
        labels.extend(fold_labels(schema, 1, alone, request_ms=time_ms, window_ms=window_ms))
    _copy_events(
        message, [Folded(f.event_id, 0, f.action, f.value, f.time_ms) for f in of_candidate if f.event_id == engagement.event_id]
    )
    return Output(CORRECTIONS, key, wire.encode(wire.CORRECTION, message), None, "")


def labels_of(tombstone: Tombstone, request_ms: int, schema: Schema) -> list[float]:
    """n x T labels of a closed request."""
    return fold_labels(schema, len(tombstone.item_ids), tombstone.folded, request_ms=request_ms, window_ms=tombstone.window_ms)


def dead_letter(
    key: bytes, origin: Origin, raw: bytes | None, reason: str, error: str, *, event_id: int = 0, request_id: str = ""
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
    return dead_letter(key, event.origin, event.raw, reason, error, event_id=event_id, request_id=event.request_id)


def header_of(impression: Impression) -> bytes:
    return _parse(impression).header.SerializeToString(deterministic=True)


def _parse(impression: Impression) -> pb.Impression:
    return pb.Impression.FromString(impression.raw[2:])


def _start(key: bytes, request_id: str, tombstone: Tombstone, event_id: int | None = None) -> pb.Sample:
    return pb.Sample(
        header=pb.Header.FromString(tombstone.header),
        sample_id=sample_id(key, request_id, event_id),
        close_reason=pb.CloseReason.Name(tombstone.reason),
        close_ms=tombstone.close_ms,
    )


def _copy_features(message: pb.Sample, used: Sequence[pb.Impression], rows: Sequence[Sequence[int]], num_labels: int) -> None:
    """RO block, parts, and what was served of the rows used. RO: of the first impression that has a block."""
    first_ro = next((i.ro for i in used if i.HasField("ro")), None)
    if first_ro is not None:
        message.ro = first_ro
    message.weight = used[0].weight
    for impression, taken in zip(used, rows, strict=True):
        n = len(impression.item_ids)
        if taken:
            message.parts.add(nro=impression.nro, num_rows=n, rows=taken if len(taken) < n else ())
    if any(i.scores for i in used):
        _copy_column(message.scores, [i.scores for i in used], rows, width=num_labels, missing=math.nan)
    if any(i.positions for i in used):
        starts = _starts(rows)
        columns = [i.positions or range(start, start + len(i.item_ids)) for i, start in zip(used, starts, strict=True)]
        _copy_column(message.positions, columns, rows, width=1, missing=0)
    if any(i.propensities for i in used):
        _copy_column(message.propensities, [i.propensities for i in used], rows, width=1, missing=1.0)


def _copy_column(
    out: Any, columns: Sequence[Sequence[float]], rows: Sequence[Sequence[int]], *, width: int, missing: float
) -> None:
    """The entries of the taken rows; an impression without the column gives `missing`."""
    for column, taken in zip(columns, rows, strict=True):
        for row in taken:
            out.extend(column[row * width : (row + 1) * width] if len(column) else [missing] * width)


def _starts(rows: Sequence[Sequence[int]]) -> list[int]:
    starts = [0]
    for taken in rows[:-1]:
        starts.append(starts[-1] + len(taken))
    return starts


def _only(rows: Sequence[Sequence[int]], candidate: int) -> list[list[int]]:
    """`rows` reduced to those of the candidate'th one."""
    pairs = [(i, row) for i, taken in enumerate(rows) for row in taken]
    impression, row = pairs[candidate]
    return [[row] if i == impression else [] for i in range(len(rows))]


def _copy_events(message: pb.Sample, folded: Sequence[Folded]) -> None:
    actions: dict[str, int] = {}
    for f in folded:
        message.event_ids.append(f.event_id)
        message.event_candidates.append(f.candidate)
        message.event_actions.append(actions.setdefault(f.action, len(actions)))
        message.event_values.append(f.value)
        message.event_times.append(f.time_ms)
    message.actions.extend(actions)
