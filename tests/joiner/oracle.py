"""An independent implementation of the join's rules. It sees all events at once and has no arrival order,
watermark or state.

It shares no code with joiner/. It takes messages and returns plain values, which tests compare with the
joiner's outputs.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import xxhash

from roostream.schema.schema import Schema
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb

Message = pb.Impression | pb.Engagement


@dataclasses.dataclass
class Result:
    """Samples by request id, corrections by event id, and dead letters as a multiset of (event, reason)."""

    samples: dict[str, dict[str, Any]]
    corrections: dict[int, dict[str, Any]]
    dead: Counter[tuple[object, str]]


def join_all(messages: Sequence[Message], rules: Any, schemas: dict[int, Schema]) -> Result:
    """Join `messages` of one key, given in any order and with duplicates."""
    copies = Counter(m.SerializeToString(deterministic=True) for m in messages)
    distinct = list({m.SerializeToString(deterministic=True): m for m in messages}.values())
    impressions = [m for m in distinct if isinstance(m, pb.Impression)]
    engagements = [m for m in distinct if isinstance(m, pb.Engagement)]
    result = Result({}, {}, Counter())
    shown_requests = {m.header.request_id for m in impressions}
    openings = {
        r: min((m for m in impressions if m.header.request_id == r), key=_order).header
        for r in shown_requests
    }
    starts = {r: (h.time_ms, h.session_id) for r, h in openings.items()}
    for request in shown_requests:
        _join_request(
            request,
            sorted((m for m in impressions if m.header.request_id == request), key=_order),
            [e for e in engagements if e.header.request_id == request],
            starts,
            rules,
            schemas,
            copies,
            result,
        )
    for e in engagements:
        if e.header.request_id not in shown_requests:
            result.dead[(e.event_id, "no_request")] += 1
    return result


def _order(m: pb.Impression) -> tuple[int, int]:
    return m.header.time_ms, xxhash.xxh3_64_intdigest(wire.encode(wire.IMPRESSION, m))


def _join_request(request, impressions, engagements, starts, rules, schemas, copies, result) -> None:  # type: ignore[no-untyped-def]  # noqa: C901, PLR0912 (an oracle is one plain function)
    first = impressions[0]
    start, schema = first.header.time_ms, schemas[first.header.schema]
    shown: dict[int, int] = {}
    for m in impressions:
        for item in m.item_ids if m.header.schema == first.header.schema else ():
            shown.setdefault(item, m.header.time_ms)

    effective = {}
    for e in engagements:
        at = shown.get(e.item_id)
        if at is not None and at <= e.header.time_ms + rules.orphan_timeout_ms:
            effective[e.event_id] = max(at, e.header.time_ms)
    by_id = {e.event_id: e for e in engagements}
    in_order = sorted(effective, key=lambda i: (effective[i], i))

    window = rules.surface_windows.get(first.header.surface, rules.window_ms)
    close, reason = start + window, "CLOSE_WINDOW"
    if rules.early_close_ms:
        close, reason = start + rules.early_close_ms, "CLOSE_EARLY"
    for n, i in enumerate(in_order, 1):
        if n == rules.engaged_threshold or by_id[i].action in rules.terminal_actions:
            at = max(effective[i], start + rules.engaged_min_wait_ms)
            if at < close:
                close, reason = at, "CLOSE_ENGAGED"
            break
    if rules.next_request != "off":
        for other, (time, session) in starts.items():
            in_scope = rules.next_request == "user" or session == starts[request][1]
            if other != request and time > start and in_scope and time + rules.linger_ms < close:
                close, reason = time + rules.linger_ms, "CLOSE_NEXT_REQUEST"

    used = []
    for m in impressions:
        if m.header.time_ms > close:
            result.dead[(m.SerializeToString(deterministic=True), "after_close")] += 1
        elif m.header.schema != first.header.schema:
            result.dead[(m.SerializeToString(deterministic=True), "unknown_schema")] += 1
        else:
            used.append(m)
    features: dict[int, tuple[bytes, int]] = {}
    repeats = 0
    for m in used:
        for row, item in enumerate(m.item_ids):
            repeats += item in features
            features.setdefault(item, (m.nro, row))
    folded = [i for i in in_order if effective[i] <= close]
    history = [(effective[i], i, by_id[i]) for i in folded]

    def labels(item: int, events: list[Any]) -> list[float]:
        out = []
        for label in schema.labels:
            until = start + (label.window_ms or window)
            values = [
                e.value
                for at, _, e in sorted(events, key=lambda x: x[:2])
                if e.item_id == item and e.action == label.action and at <= until
            ]
            fold = {"any": lambda v: 1.0, "count": len, "sum": sum, "max": max, "last": lambda v: v[-1]}[
                label.fold
            ]
            out.append(float(fold(values)) if values else 0.0)
        return out

    num_copies = sum(
        copies[m.SerializeToString(deterministic=True)] - 1 for m in [*used, *(by_id[i] for i in folded)]
    )
    ro = [m.ro for m in used if m.HasField("ro")]
    result.samples[request] = {
        "close": (close, reason),
        "header": first.header.SerializeToString(deterministic=True),
        "ro": ro[0] if ro else None,
        "features": features,
        "labels": {item: labels(item, history) for item in features},
        "events": [(i, by_id[i].item_id, by_id[i].action, by_id[i].value, effective[i]) for i in folded],
        "num_duplicates": num_copies + repeats,
    }
    for e in sorted(
        (e for e in engagements if e.event_id not in folded), key=lambda e: (e.header.time_ms, e.event_id)
    ):
        time = e.header.time_ms
        if time > close + 2 * rules.late_horizon_ms:
            result.dead[(e.event_id, "no_request")] += 1
        elif time > close + rules.late_horizon_ms:
            result.dead[(e.event_id, "too_late")] += 1
        elif e.item_id in features and e.event_id in effective:
            has_features = rules.correction_horizon_ms and time <= close + rules.correction_horizon_ms
            corrected_items = list(features) if has_features else [e.item_id]
            before = {item: labels(item, history) for item in corrected_items}
            history.append((time, e.event_id, e))
            result.corrections[e.event_id] = {
                "request": request,
                "item": e.item_id,
                "before": before,
                "after": {item: labels(item, history) for item in corrected_items},
                "ro": ro[0] if ro and has_features else None,
                "features": features if has_features else {},
            }
        elif start > time + rules.orphan_timeout_ms:
            result.dead[(e.event_id, "no_request")] += 1
        else:
            result.dead[(e.event_id, "item_not_shown")] += 1
