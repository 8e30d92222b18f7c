"""A repeated event is counted once, within the documented time and number of events."""

from __future__ import annotations

import numpy as np
import pytest

from roostream.errors import CheckpointError
from roostream.online.counters import SEEN, Counters
from roostream.online.entity_fields import NO_FIELDS
from roostream.online.seen_events import (
    MAX_SEEN,
    SEEN_MS,
    EventId,
    SeenEvents,
    engagement_id,
    list_id,
    seen_from_bytes,
)
from roostream.schema.ids import key_bytes
from roostream.schema.schema import Schema

T0 = 1_700_000_000_000
HEADER = (9, 4, "front", "r-1")


def click(
    counters: Counters, at_ms: int, event_id: int = 77, header: tuple[int, int, str, str] = HEADER
) -> None:
    counters.apply_engagement(header[0], 8, "click", 1.0, at_ms, NO_FIELDS, engagement_id(header, event_id))


def show(
    counters: Counters,
    at_ms: int,
    items: tuple[int, ...] = (8, 5),
    has_ro: bool = True,
    request_id: str = "r-1",
) -> None:
    header = (9, 4, "front", request_id)
    counters.apply_impression(9, list(items), at_ms, NO_FIELDS, list_id(header, list(items), has_ro))


def views(counters: Counters) -> list[float]:
    views_n: list[float] = counters.read(9, [8, 5], T0 + 60_000)[1]["user_views"].tolist()
    return views_n


def test_a_click_that_is_posted_three_times_counts_once_at_its_first_time() -> None:
    counters = Counters(Schema())
    for late_ms in (0, 400, 2000):
        click(counters, T0 + late_ms)
    ro, nro = counters.read(9, [8], T0 + 2000)
    assert ro["history"]["ids"] == [8] and ro["history"]["time"] == [T0]  # type: ignore[index]
    assert nro["user_clicks"].tolist() == [1.0] and 0.9 < nro["clicks_1h"][0] <= 1.0


@pytest.mark.parametrize("header", [(0, 4, "", "r-1"), (0, 0, "", "r-1")], ids=["session", "request"])
def test_repeated_events_without_a_user_count_once(header: tuple[int, int, str, str]) -> None:
    counters = Counters(Schema())
    click(counters, T0, header=header)
    click(counters, T0 + 400, header=header)
    assert counters.read(0, [8], T0 + 400)[1]["clicks_1h"][0] <= 1.0


def test_events_with_other_ids_count_each() -> None:
    counters = Counters(Schema())
    click(counters, T0)
    click(counters, T0 + 1, event_id=78)
    click(counters, T0 + 2, header=(9, 4, "front", "r-2"))
    assert counters.read(9, [8], T0 + 2)[1]["user_clicks"].tolist() == [3.0]


def test_a_repeated_request_counts_once_and_a_page_adds_its_items_once() -> None:
    counters = Counters(Schema())
    show(counters, T0)
    show(counters, T0 + 400, items=(5, 8))
    assert views(counters) == [1.0, 1.0]
    for _ in range(2):
        show(counters, T0 + 500, items=(7, 5), has_ro=False)
    show(counters, T0 + 600, items=(5, 7), has_ro=False)
    assert views(counters) == [1.0, 2.0]
    show(counters, T0 + 700, request_id="r-2")
    assert views(counters) == [2.0, 3.0]


def test_events_without_ids_count_each() -> None:
    counters = Counters(Schema())
    assert engagement_id((9, 4, "", ""), 77) is None and engagement_id(HEADER, 0) is None
    click(counters, T0, event_id=0)
    click(counters, T0 + 1, event_id=0)
    assert counters.read(9, [8], T0 + 1)[1]["user_clicks"].tolist() == [2.0]


def test_a_repetition_is_recognized_for_an_hour_of_event_time() -> None:
    seen = SeenEvents()
    assert seen.add(1, T0) and not seen.add(1, T0 + SEEN_MS - 1)
    assert not seen.add(1, T0 - SEEN_MS + 1), "the order of arrival must not matter"
    assert seen.add(1, T0 + SEEN_MS)
    assert not seen.add(1, T0 + SEEN_MS + 5)


def test_the_newest_events_are_remembered_in_any_order_of_arrival() -> None:
    ascending, descending = SeenEvents(), SeenEvents()
    for n in range(MAX_SEEN + 10):
        assert ascending.add(n, T0 + n)
    for n in reversed(range(MAX_SEEN + 10)):
        assert descending.add(n, T0 + n)
    assert ascending.to_bytes() == descending.to_bytes() and len(ascending.to_bytes()) == 1 + 16 * MAX_SEEN
    assert ascending.add(9, T0 + 9), "beyond the limit a repetition is counted again"
    assert not ascending.add(10, T0 + 10)


def test_memory_is_bounded_by_the_events_of_the_last_hour() -> None:
    counters = Counters(Schema())
    for n in range(4200):
        counters.apply_impression(0, [], T0 + 20_000 * n, NO_FIELDS, EventId(n, 1))
    kept = counters.dump({SEEN: np.arange(4200)})
    assert None not in kept[-180:] and len(kept) - kept.count(None) < 300


def test_decoding_is_the_inverse_of_encoding_and_rejects_other_bytes() -> None:
    seen = SeenEvents()
    for n in range(5):
        seen.add(n - 2, T0 + n)
    decoded = seen_from_bytes(seen.to_bytes())
    assert decoded.to_bytes() == seen.to_bytes() and not decoded.add(-2, T0)
    for data in (b"", b"\x02", seen.to_bytes()[:-1]):
        with pytest.raises(CheckpointError, match="version 1"):
            seen_from_bytes(data)


def test_the_stored_format_of_seen_events_does_not_change() -> None:
    seen = SeenEvents()
    seen.add(5, T0)
    seen.add(-1, T0 - 1)
    golden = "01" + "ff" * 8 + "0500000000000000" + "ff67e5cf8b010000" + "0068e5cf8b010000"
    assert seen.to_bytes().hex() == golden
    assert not seen_from_bytes(bytes.fromhex(golden)).add(5, T0 + 1)


def test_the_key_of_an_event_is_the_key_of_its_kafka_record() -> None:
    identity = engagement_id((2**64 - 5, 0, "", "r"), 7)
    assert identity is not None and identity.key == -5
    assert identity.key.to_bytes(8, "little", signed=True) == key_bytes(2**64 - 5, 0, "r")
    assert list(Counters(Schema()).seen_keys(identity)[SEEN]) == [-5]
