"""Parsing of engagements: serving sets their time, repeated ones have the same id, and one bad engagement
rejects the whole body."""

from __future__ import annotations

import json
from typing import Any

import pytest

from roostream.schema.ids import hash64, key_bytes
from roostream.wire import records as wire
from serving.errors import RequestError
from serving.http.engagements import MAX_ENGAGEMENTS, EngagementParser
from tests.serving.serving_cases import NOW_MS, SCHEMA

CLICK = {
    "request_id": "r-1",
    "user_id": 17,
    "session_id": 4,
    "surface": "front",
    "item_id": 8,
    "action": "click",
    "value": 2,
}


def parse(body: Any, now_ms: int = NOW_MS) -> tuple[list[Any], list[int]]:
    parsed = EngagementParser(SCHEMA).parse(
        body if isinstance(body, bytes) else json.dumps(body).encode(), now_ms
    )
    return [(r, *wire.decode(r.value)) for r in parsed.records], parsed.event_ids


def test_an_engagement_is_logged_with_request_header_and_receive_time() -> None:
    ((record, kind, message),), ids = parse({**CLICK, "event_id": 77, "time_ms": 5})
    assert kind == wire.ENGAGEMENT and ids == [77] == [message.event_id]
    assert (record.topic, record.partition, record.key) == ("engagements", -1, key_bytes(17, 4, "r-1"))
    assert record.timestamp_ms == message.header.time_ms == NOW_MS and message.client_time_ms == 5
    header = message.header
    assert (header.request_id, header.user_id, header.session_id, header.surface) == ("r-1", 17, 4, "front")
    assert header.schema == SCHEMA.fingerprint
    assert (message.item_id, message.action, message.value) == (8, "click", 2.0)


def test_a_body_may_have_many_engagements_and_string_ids() -> None:
    parsed, ids = parse([CLICK, {**CLICK, "user_id": 0, "item_id": "nine", "event_id": "e"}])
    assert len(parsed) == 2 and ids[1] == hash64("e")
    assert parsed[1][2].item_id == hash64("nine") and parsed[1][0].key == key_bytes(0, 4, "r-1")
    assert parse([]) == ([], [])


def test_a_repeated_post_has_the_same_event_id() -> None:
    _, first = parse(CLICK)
    _, again = parse(CLICK, NOW_MS + 5000)
    assert first == again


@pytest.mark.parametrize(
    "change",
    [
        {"request_id": "r-2"},
        {"user_id": 18},
        {"item_id": 9},
        {"action": "read"},
        {"value": 3},
        {"time_ms": 9},
    ],
    ids=lambda c: next(iter(c)),
)
def test_different_events_have_different_ids(change: dict[str, Any]) -> None:
    assert parse(CLICK)[1] != parse({**CLICK, **change})[1]


BAD_BODIES = [
    (b"{", "$", "truncated"),
    ([{**CLICK, "session_id": None}], "$[0].session_id", "leave it out"),
    ({**CLICK, "acton": "x"}, "$.acton", "did you mean 'action'"),
    ([CLICK, {**CLICK, "itemid": 1}], "$[1].itemid", "did you mean 'item_id'"),
    ([CLICK, {**CLICK, "action": ""}], "$[1].action", "expected 1 to 64 bytes"),
    ({**CLICK, "action": "a" * 65}, "$.action", "at most 64 bytes"),
    ({**CLICK, "request_id": ""}, "$.request_id", "expected 1 to 64 bytes"),
    ({**CLICK, "value": 1e39}, "$.value", "finite 32-bit"),
    ({**CLICK, "item_id": 2**64}, "$.item_id", "64-bit"),
    ({**CLICK, "event_id": -(2**63) - 1}, "$.event_id", "64-bit"),
    ({**CLICK, "event_id": -1}, "$.event_id", "from 0 on"),
    ({**CLICK, "user_id": 2**64}, "$.user_id", "64-bit"),
    ({**CLICK, "time_ms": 2**63}, "$.time_ms", "64-bit"),
    ({k: v for k, v in CLICK.items() if k != "action"}, "$", "missing required field `action`"),
]


@pytest.mark.parametrize(("body", "path", "text"), BAD_BODIES, ids=[f"{c[1]} {c[2]}" for c in BAD_BODIES])
def test_a_bad_engagement_is_400_with_its_path(body: Any, path: str, text: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse(body)
    assert (caught.value.status, caught.value.path) == (400, path)
    assert text in str(caught.value)


def test_too_many_engagements_are_413() -> None:
    with pytest.raises(RequestError, match="at most 1000 engagements") as caught:
        parse([CLICK] * (MAX_ENGAGEMENTS + 1))
    assert caught.value.status == 413
