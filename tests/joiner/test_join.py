"""`join.py`, sentence by sentence: when a request closes and what its sample holds. Window 100 ms, late
horizon 1000 ms."""

from __future__ import annotations

from typing import Any

import pytest

from roostream.schema.ids import sample_id
from tests.joiner.cases import (
    KEY,
    OTHER_SCHEMA,
    Driver,
    closed,
    engagement,
    features_of,
    impression,
    nro_block,
    only,
    reasons,
    rules,
    samples,
)

T = 1_000


# events are stored on arrival; nothing closes on arrival


def test_nothing_is_emitted_before_the_watermark_reaches_the_close() -> None:
    driver = Driver(rules(engaged_threshold=1))
    assert driver.send(impression(T), engagement(T + 5, event=1), impression(T + 7, request="s")) == []
    assert driver.at(T + 4) == []
    assert [s.message.header.request_id for s in samples(driver.at(T + 5))] == ["r"]


def test_a_request_is_emitted_when_the_watermark_equals_its_close_and_not_one_ms_before() -> None:
    driver = Driver(rules())
    driver.send(impression(T))
    assert driver.at(T + 99) == []
    sample = only(driver.at(T + 100), "samples")
    assert (sample.message.close_ms, sample.reason) == (T + 100, "CLOSE_WINDOW")


def test_all_open_requests_are_emitted_at_the_end_of_input_with_the_close_that_close_time_gives() -> None:
    driver = Driver(rules(next_request="user"))
    driver.send(impression(T), impression(T + 10, request="s"))
    closes = {s.message.header.request_id: (s.message.close_ms, s.reason) for s in samples(driver.end())}
    assert closes == {"r": (T + 10, "CLOSE_NEXT_REQUEST"), "s": (T + 110, "CLOSE_WINDOW")}


def test_the_request_is_due_when_it_closes_and_that_moves_when_the_close_moves() -> None:
    driver = Driver(rules(engaged_threshold=2))
    driver.send(impression(T))
    assert driver.state.requests["r"].due_ms == T + 100
    driver.send(engagement(T + 9, event=1))
    assert driver.state.requests["r"].due_ms == T + 100
    driver.send(engagement(T + 50, event=2))
    assert driver.state.requests["r"].due_ms == T + 50


# window


def test_a_surface_can_have_its_own_window() -> None:
    sample = closed(impression(T, surface="feed"), surface_windows={"feed": 30})
    assert sample.message.close_ms == T + 30


def test_jitter_shortens_windows_by_a_hash_of_the_request_and_spreads_them() -> None:
    def close_ms(request: str) -> int:
        return closed(impression(T, request=request), window_jitter_ms=50).message.close_ms - T

    widths = [close_ms(f"r{n}") for n in range(30)]
    assert widths == [close_ms(f"r{n}") for n in range(30)]
    assert min(widths) >= 50 and max(widths) <= 100 and len(set(widths)) > 10


def test_jitter_reaches_both_the_widest_and_the_narrowest_window() -> None:
    driver = Driver(rules(window_jitter_ms=3, max_open_requests=99))
    driver.send(*(impression(T, request=f"r{n}") for n in range(60)))
    assert {s.message.close_ms - T for s in samples(driver.end())} == {97, 98, 99, 100}


# engaged


@pytest.mark.parametrize(
    ("settings", "close", "why"),
    [
        ({"engaged_threshold": 2}, T + 20, "the second distinct one reaches the threshold"),
        ({"engaged_threshold": 3}, T + 30, "the third one"),
        ({"terminal_actions": ("buy",)}, T + 30, "the terminal one"),
        ({"engaged_threshold": 2, "terminal_actions": ("buy",)}, T + 20, "whichever comes first"),
        ({"engaged_threshold": 9}, T + 100, "none does"),
        ({"engaged_threshold": 1, "engaged_min_wait_ms": 60}, T + 60, "not before the minimum wait"),
        ({"engaged_threshold": 3, "engaged_min_wait_ms": 20}, T + 30, "which has passed by then"),
    ],
)
def test_the_engagement_that_reaches_the_threshold_or_is_terminal_closes(
    settings: dict[str, Any], close: int, why: str
) -> None:
    events = [engagement(T + 10, event=1), engagement(T + 10, event=1), engagement(T + 20, 2, event=2)]
    sample = closed(impression(T), *events, engagement(T + 30, event=3, action="buy"), **settings)
    assert sample.message.close_ms == close, why
    assert sample.reason == ("CLOSE_WINDOW" if close == T + 100 else "CLOSE_ENGAGED")


def test_engagements_at_the_close_enter_in_time_and_event_id_order() -> None:
    events = [
        engagement(T + 20, event=5),
        engagement(T + 20, event=4),
        engagement(T + 10, event=9),
        engagement(T + 20, event=6),
    ]
    sample = closed(impression(T), *events, engaged_threshold=2, at=T + 20)
    assert sample.message.close_ms == T + 20
    assert sample.events == [9, 4, 5, 6], "all with time <= close, and so not only those up to the threshold"


def test_engagements_with_items_that_were_not_shown_do_not_close() -> None:
    sample = closed(impression(T, (1, 2)), engagement(T + 10, 99, event=1), engaged_threshold=1)
    assert (sample.message.close_ms, sample.events) == (T + 100, [])


# next_request


@pytest.mark.parametrize(
    ("scope", "session", "linger", "close"),
    [
        ("off", 4, 0, T + 100),
        ("session", 4, 0, T + 40),
        ("session", 5, 0, T + 100),
        ("user", 5, 0, T + 40),
        ("user", 5, 25, T + 65),
        ("user", 5, 80, T + 100),
    ],
)
def test_the_next_request_in_scope_closes_after_linger(
    scope: str, session: int, linger: int, close: int
) -> None:
    driver = Driver(rules(next_request=scope, linger_ms=linger))
    driver.send(impression(T), impression(T + 40, request="next", session=session))
    first = samples(driver.end())[0].message
    assert (first.header.request_id, first.close_ms) == ("r", close)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_a_request_is_emitted_when_the_watermark_reaches_the_next_one_whichever_came_first(
    order: tuple[int, ...],
) -> None:
    driver = Driver(rules(next_request="user", linger_ms=5))
    events = [impression(T, request="a"), impression(T + 20, request="b"), impression(T + 60, request="c")]
    driver.send(*(events[n] for n in order))
    emitted = {
        ms: [s.message.header.request_id for s in samples(driver.at(T + ms))]
        for ms in (24, 25, 64, 65, 159, 160)
    }
    assert emitted == {24: [], 25: ["a"], 64: [], 65: ["b"], 159: [], 160: ["c"]}


def test_the_smallest_later_time_is_the_next_request_whatever_the_order_of_arrival() -> None:
    driver = Driver(rules(next_request="user"))
    driver.send(impression(T + 60, request="c"), impression(T, request="a"), impression(T + 20, request="b"))
    assert [s.message.close_ms for s in samples(driver.end())] == [T + 20, T + 60, T + 160]


def test_an_older_request_never_closes_a_newer_one() -> None:
    driver = Driver(rules(next_request="user", linger_ms=50))
    driver.send(
        impression(T + 30, request="new"),
        impression(T, request="old"),
        impression(T + 40, request="old", items=(7,), ro=None),
    )
    closes = {s.message.header.request_id: s.message.close_ms for s in samples(driver.end())}
    assert closes == {"old": T + 80, "new": T + 130}


def test_requests_of_the_same_time_do_not_close_each_other() -> None:
    driver = Driver(rules(next_request="user"))
    driver.send(impression(T, request="a"), impression(T, request="b"))
    assert {s.reason for s in samples(driver.end())} == {"CLOSE_WINDOW"}


def test_a_request_that_came_behind_the_watermark_closes_no_other() -> None:
    driver = Driver(rules(next_request="user"))
    driver.send(impression(T))
    driver.at(T + 50)
    driver.send(impression(T + 20, request="late"), engagement(T + 60, event=1))
    assert [s.message.header.request_id for s in samples(driver.at(T + 99))] == []
    assert only(driver.at(T + 100), "samples").events == [1]


# features and candidates


def test_ro_features_come_from_the_smallest_time_and_bytes_byte_for_byte() -> None:
    first, second = impression(T, ro=1.0), impression(T + 5, ro=2.0)
    for order in ([first, second], [second, first]):
        assert closed(*order).message.ro == first.ro
    tied = [impression(T, ro=float(n)) for n in range(4)]
    chosen = {closed(*order).message.ro for order in (tied, tied[::-1], tied[2:] + tied[:2])}
    assert len(chosen) == 1


def test_nro_features_of_a_candidate_come_from_its_first_impression_and_repeats_are_counted() -> None:
    sample = closed(impression(T, (1, 2), tag=10.0), impression(T + 5, (2, 3), tag=20.0, ro=None))
    assert sample.items == [1, 2, 3]
    first, second = nro_block((1, 2), 10.0), nro_block((2, 3), 20.0)
    assert features_of(sample.message) == {1: (first, 0), 2: (first, 1), 3: (second, 1)}
    assert [list(p.rows) for p in sample.message.parts] == [[], [1]], "no rows named = all"
    assert sample.message.num_duplicates == 1


def test_the_opening_item_has_its_features_and_labels_like_any_other() -> None:
    sample = closed(impression(T, (1, 2)), engagement(T + 1, 1, event=1))
    assert features_of(sample.message)[1] == (nro_block((1, 2)), 0)
    assert sample.labels == {1: [1.0, 1.0, 0.0, 1.0], 2: [0.0, 0.0, 0.0, 0.0]}


def test_a_request_without_an_ro_block_has_none_and_one_that_only_a_page_brings_is_taken() -> None:
    assert not closed(impression(T, ro=None)).message.HasField("ro")
    page = impression(T + 5, (3,), ro=2.0)
    assert closed(impression(T, ro=None), page).message.ro == page.ro


def test_an_item_that_only_a_later_page_shows_has_its_own_labels() -> None:
    sample = closed(impression(T, (1, 2)), impression(T + 5, (3, 4), ro=None), engagement(T + 9, 3, event=1))
    assert {item: labels[0] for item, labels in sample.labels.items()} == {1: 0.0, 2: 0.0, 3: 1.0, 4: 0.0}


def test_an_engagement_with_what_a_later_page_shows_is_no_orphan_any_more() -> None:
    driver = Driver(rules(), "memory")
    driver.send(impression(T, (1, 2)), engagement(T + 5, 3, event=1), engagement(T + 6, 9, event=2))
    assert driver.state.counts.num_orphans == 2
    driver.send(impression(T + 7, (3,), ro=None))
    assert driver.state.counts.num_orphans == 1, "9 is shown nowhere"
    assert only(driver.at(T + 100), "samples").labels[3][0] == 1.0 and driver.state.counts.num_orphans == 0


def test_a_page_adds_candidates_until_the_close_and_is_a_dead_letter_after_it() -> None:
    driver = Driver(rules())
    driver.send(impression(T), impression(T + 100, (3,), ro=None), impression(T + 101, (4,), ro=None))
    outputs = driver.at(T + 100)
    assert only(outputs, "samples").items == [1, 2, 3]
    assert reasons(outputs) == ["after_close"]


def test_what_was_served_is_copied_and_filled_where_a_page_lacks_it() -> None:
    scores = [0.5 + n for n in range(8)]
    sample = closed(
        impression(T, (1, 2), scores=scores, positions=[4, 5], propensities=[0.5, 0.25], weight=2.0),
        impression(T + 1, (2, 3), ro=None, weight=9.0),
    ).message
    assert (
        list(sample.scores[:8]) == scores
        and all(x != x for x in sample.scores[8:])
        and len(sample.scores) == 12
    )
    assert (list(sample.positions), list(sample.propensities), sample.weight) == (
        [4, 5, 3],
        [0.5, 0.25, 1.0],
        2.0,
    )
    assert not closed(impression(T)).message.scores


@pytest.mark.parametrize("items", [(), (1,), tuple(range(1, 1001))])
def test_requests_of_no_one_and_the_most_candidates_are_ordinary(items: tuple[int, ...]) -> None:
    sample = closed(impression(T, items))
    assert tuple(sample.items) == items and len(sample.message.labels) == 4 * len(items)


def test_an_impression_of_another_schema_than_its_request_is_a_dead_letter() -> None:
    driver = Driver(rules())
    driver.send(
        impression(T), impression(T + 1, (7,), schema=OTHER_SCHEMA, ro=None), engagement(T + 2, 7, event=1)
    )
    outputs = driver.end()
    assert only(outputs, "samples").items == [1, 2]
    assert sorted(reasons(outputs)) == ["item_not_shown", "unknown_schema"]


def test_an_engagement_whose_item_an_earlier_impression_s_schema_takes_away_is_given_up_at_its_own_time() -> (
    None
):
    driver = Driver(rules(orphan_timeout_ms=20))
    driver.send(impression(T + 5, (3,)), engagement(T + 9, 3, event=1))
    driver.send(impression(T, (1, 2), schema=OTHER_SCHEMA, ro=None))
    assert driver.at(T + 28) == [] and reasons(driver.at(T + 29)) == ["item_not_shown"]


def test_an_item_is_found_where_its_bytes_also_lie_across_two_others() -> None:
    """8-byte ids side by side: the middle of the first two reads as the last."""
    across, last = (0x22222222_00000001, 0x00000005_11111111), 0x11111111_22222222
    items = (*across, *range(20, 29), last)
    sample = closed(impression(T, items), engagement(T + 5, last, event=1))
    assert [item for item, labels in sample.labels.items() if labels[0]] == [last] and sample.items[
        -1
    ] == last


def test_ids_are_made_of_key_and_request_and_the_header_is_the_openings() -> None:
    m = closed(impression(T, session=4), impression(T + 1, session=5, ro=None)).message
    assert m.sample_id == sample_id(KEY, "r") and (m.header.time_ms, m.header.session_id) == (T, 4)
