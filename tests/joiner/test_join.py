"""`join.py`, sentence by sentence: when a request closes and what its sample holds. Window 100 ms, late
horizon 1000 ms."""

from __future__ import annotations

from typing import Any

import pytest

from tests.joiner.cases import (
    Driver,
    closed,
    engagement,
    features_of,
    impression,
    nro_block,
    only,
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


# window


def test_a_surface_can_have_its_own_window() -> None:
    sample = closed(impression(T, surface="feed"), surface_windows={"feed": 30})
    assert sample.message.close_ms == T + 30


def test_jitter_shortens_windows_by_a_hash_of_the_request() -> None:
    closes = []
    for _ in range(2):
        driver = Driver(rules(window_jitter_ms=3, max_open_requests=99))
        driver.send(*(impression(T, request=f"r{n}") for n in range(60)))
        closes.append([s.message.close_ms - T for s in samples(driver.end())])
    assert closes[0] == closes[1] and set(closes[0]) == {97, 98, 99, 100}


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


def test_a_request_that_came_behind_the_watermark_closes_no_other() -> None:
    driver = Driver(rules(next_request="user"))
    driver.send(impression(T))
    driver.at(T + 50)
    driver.send(impression(T + 20, request="late"), engagement(T + 60, event=1))
    assert [s.message.header.request_id for s in samples(driver.at(T + 99))] == []
    assert only(driver.at(T + 100), "samples").events == [1]


# features and candidates


def test_nro_features_of_a_candidate_come_from_its_first_impression_and_repeats_are_counted() -> None:
    sample = closed(impression(T, (1, 2), tag=10.0), impression(T + 5, (2, 3), tag=20.0, ro=None))
    assert sample.items == [1, 2, 3]
    first, second = nro_block((1, 2), 10.0), nro_block((2, 3), 20.0)
    assert features_of(sample.message) == {1: (first, 0), 2: (first, 1), 3: (second, 1)}
    assert [list(p.rows) for p in sample.message.parts] == [[], [1]], "no rows named = all"
    assert sample.message.num_duplicates == 1


def test_what_was_served_is_copied_and_filled_where_a_page_lacks_it() -> None:
    scores = [0.5 + n for n in range(8)]
    sample = closed(
        impression(T, (1, 2), scores=scores, positions=[4, 5], propensities=[0.5, 0.25], weight=2.0),
        impression(T + 1, (2, 3), ro=None, weight=9.0),
    ).message
    assert list(sample.scores[:8]) == scores
    assert all(x != x for x in sample.scores[8:])
    assert len(sample.scores) == 12
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


def test_an_item_is_found_where_its_bytes_also_lie_across_two_others() -> None:
    """8-byte ids side by side: the middle of the first two reads as the last."""
    across, last = (0x22222222_00000001, 0x00000005_11111111), 0x11111111_22222222
    items = (*across, *range(20, 29), last)
    sample = closed(impression(T, items), engagement(T + 5, last, event=1))
    assert [item for item, labels in sample.labels.items() if labels[0]] == [last]
    assert sample.items[-1] == last
