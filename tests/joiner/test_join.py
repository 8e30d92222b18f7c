"""The rules of `join.py` one by one: when a request closes and what its sample holds. The window is 100 ms
and the late horizon 1000 ms."""

from __future__ import annotations

from typing import Any

import pytest

from joiner.join import Join
from joiner.state import CLOSED, EXPIRED, OPEN
from roostream.schema.ids import sample_id
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.decode import Decoder
from roostream.wire.records import Record
from tests.joiner.cases import (
    KEY,
    SCHEMA,
    SCHEMAS,
    Driver,
    engagement,
    features_of,
    impression,
    nro_block,
    only,
    reasons,
    rules,
    sample_of,
    samples,
    view_of,
)

T = 1_000
Message = pb.Impression | pb.Engagement


# Events are stored on arrival; nothing closes on arrival.
def test_nothing_is_emitted_before_the_watermark_reaches_the_close() -> None:
    driver = Driver(rules(engaged_threshold=1))
    assert driver.send(impression(T), engagement(T + 5, event=1), impression(T + 7, request="s")) == []
    assert driver.advance_to(T + 4) == []
    assert [s.message.header.request_id for s in samples(driver.advance_to(T + 5))] == ["r"]


def test_a_request_is_emitted_when_the_watermark_equals_its_close_and_not_one_ms_before() -> None:
    driver = Driver(rules())
    driver.send(impression(T))
    assert driver.advance_to(T + 99) == []
    sample = only(driver.advance_to(T + 100), "samples")
    assert (sample.message.close_ms, sample.reason) == (T + 100, "CLOSE_WINDOW")


# The window
def test_a_surface_can_have_its_own_window() -> None:
    sample = sample_of(impression(T, surface="feed"), surface_windows={"feed": 30})
    assert sample.message.close_ms == T + 30


def test_jitter_shortens_windows_by_a_hash_of_the_request() -> None:
    closes = []
    for _ in range(2):
        driver = Driver(rules(window_jitter_ms=3, max_open_requests=99))
        driver.send(*(impression(T, request=f"r{n}") for n in range(60)))
        closes.append([s.message.close_ms - T for s in samples(driver.end())])
    assert closes[0] == closes[1] and set(closes[0]) == {97, 98, 99, 100}


# Closing by engagements
@pytest.mark.parametrize(
    ("settings", "close", "case"),
    [
        ({"engaged_threshold": 2}, T + 20, "the second distinct engagement reaches the threshold"),
        ({"engaged_threshold": 3}, T + 30, "the third engagement reaches the threshold"),
        ({"terminal_actions": ("buy",)}, T + 30, "the terminal engagement closes"),
        (
            {"engaged_threshold": 2, "terminal_actions": ("buy",)},
            T + 20,
            "the threshold comes before the terminal engagement",
        ),
        ({"engaged_threshold": 9}, T + 100, "no engagement reaches the threshold"),
        ({"engaged_threshold": 1, "engaged_min_wait_ms": 60}, T + 60, "not before the minimum wait"),
        ({"engaged_threshold": 3, "engaged_min_wait_ms": 20}, T + 30, "the minimum wait has passed by then"),
    ],
)
def test_the_engagement_that_reaches_the_threshold_or_is_terminal_closes(
    settings: dict[str, Any], close: int, case: str
) -> None:
    events = [engagement(T + 10, event=1), engagement(T + 10, event=1), engagement(T + 20, 2, event=2)]
    sample = sample_of(impression(T), *events, engagement(T + 30, event=3, action="buy"), **settings)
    assert sample.message.close_ms == close, case
    assert sample.reason == ("CLOSE_WINDOW" if close == T + 100 else "CLOSE_ENGAGED")


# Closing by the next request
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


def test_a_request_that_arrives_behind_the_watermark_closes_no_other() -> None:
    driver = Driver(rules(next_request="user"))
    driver.send(impression(T))
    driver.advance_to(T + 50)
    driver.send(impression(T + 20, request="late"), engagement(T + 60, event=1))
    assert [s.message.header.request_id for s in samples(driver.advance_to(T + 99))] == []
    assert only(driver.advance_to(T + 100), "samples").events == [1]


# Features and candidates
def test_nro_features_of_a_candidate_come_from_its_first_impression_and_repeats_are_counted() -> None:
    sample = sample_of(impression(T, (1, 2), tag=10.0), impression(T + 5, (2, 3), tag=20.0, ro=None))
    assert sample.items == [1, 2, 3]
    first, second = nro_block((1, 2), 10.0), nro_block((2, 3), 20.0)
    assert features_of(sample.message) == {1: (first, 0), 2: (first, 1), 3: (second, 1)}
    assert [list(p.rows) for p in sample.message.parts] == [[], [1]], "an empty list of rows means all rows"
    assert sample.message.num_duplicates == 1


def test_served_columns_are_copied_and_filled_where_a_page_lacks_them() -> None:
    scores = [0.5 + n for n in range(8)]
    sample = sample_of(
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
    assert not sample_of(impression(T)).message.scores


@pytest.mark.parametrize("items", [(), (1,), tuple(range(1, 1001))])
def test_a_request_may_have_none_one_or_the_maximum_of_candidates(items: tuple[int, ...]) -> None:
    sample = sample_of(impression(T, items))
    assert tuple(sample.items) == items and len(sample.message.labels) == 4 * len(items)


def test_an_item_is_not_confused_with_bytes_across_two_others() -> None:
    """Ids are 8 bytes each without gaps. The bytes across the first two ids equal the last id."""
    across, last = (0x22222222_00000001, 0x00000005_11111111), 0x11111111_22222222
    items = (*across, *range(20, 29), last)
    sample = sample_of(impression(T, items), engagement(T + 5, last, event=1))
    assert [item for item, labels in sample.labels.items() if labels[0]] == [last]
    assert sample.items[-1] == last


# Duplicates
def test_engagements_are_idempotent_by_event_id_and_copies_are_counted() -> None:
    event = engagement(T + 5, event=1)
    sample = sample_of(impression(T), event, event, event)
    assert sample.events == [1] and sample.message.num_duplicates == 2
    assert sample.labels[1][1] == 1.0, "the count label must be 1"


def test_a_retry_after_the_close_is_a_duplicate_and_no_correction() -> None:
    driver = Driver(rules())
    driver.send(impression(T), engagement(T + 5, event=1))
    driver.advance_to(T + 100)
    driver.send(engagement(T + 150, event=2))
    driver.advance_to(T + 150)
    assert driver.send(engagement(T + 5, event=1), engagement(T + 150, event=2), impression(T)) == []


def test_a_retry_of_a_refused_engagement_is_a_duplicate_too() -> None:
    driver = Driver(rules())
    driver.send(impression(T), engagement(T + 5, 99, event=1))
    assert reasons(driver.advance_to(T + 105)) == ["item_not_shown"]
    assert driver.send(engagement(T + 5, 99, event=1)) == []


# Orphans
@pytest.mark.parametrize(("messages", "reason"), [([], "no_request"), ([impression(T)], "item_not_shown")])
def test_an_orphan_is_refused_when_the_watermark_reaches_its_timeout(
    messages: list[Any], reason: str
) -> None:
    driver = Driver(rules(orphan_timeout_ms=40))
    driver.send(*messages, engagement(T + 5, 99, event=1))
    assert reasons(driver.advance_to(T + 44)) == []
    outputs = driver.advance_to(T + 45)
    assert reasons(outputs) == [reason]
    assert only(outputs, "dead_letters").message.event_id == 1


# After the close
def corrected(*messages: Any, close: int = T + 100, until_ms: int = T + 900, **settings: Any) -> Any:
    """The one correction from these messages, which arrive after the close of a request with items 1 and 2
    and a click on 1 at T + 5."""
    driver = Driver(rules(**settings))
    driver.send(impression(T), engagement(T + 5, event=1))
    driver.advance_to(close)
    driver.send(*messages)
    driver.advance_to(max(until_ms, close))
    return only(driver.outputs, "corrections")


def test_an_engagement_behind_the_close_becomes_a_correction_with_labels_before_and_after() -> None:
    # its time is within the window, but it arrived after the close
    late = corrected(engagement(T + 60, 2, event=2))
    assert late.message.sample_id == sample_id(KEY, "r", 2)
    assert (late.labels_before, late.labels) == ({2: [0.0] * 4}, {2: [1.0, 1.0, 0.0, 0.0]})
    assert late.events == [2] and late.items == [2]
    assert (late.message.close_ms, late.message.close_reason) == (T + 100, pb.CLOSE_WINDOW)


@pytest.mark.parametrize(("time", "trainable"), [(T + 150, True), (T + 151, False)])
def test_a_correction_has_features_within_the_correction_horizon(time: int, trainable: bool) -> None:
    m = corrected(engagement(time, 2, event=2), correction_horizon_ms=50).message
    assert m.untrainable is not trainable
    block = nro_block((1, 2))
    assert features_of(m) == ({1: (block, 0), 2: (block, 1)} if trainable else {}), (
        "a correction must have the features of the whole list, which models use"
    )
    assert m.HasField("ro") is trainable


@pytest.mark.parametrize("horizon_ms", [0, 500])
def test_readers_accept_corrections_with_and_without_features(horizon_ms: int) -> None:
    m = corrected(engagement(T + 60, 2, event=2), correction_horizon_ms=horizon_ms).message
    reader = Decoder(SCHEMA, {SCHEMA.fingerprint: SCHEMA}.get)
    record = Record("corrections", 0, 0, T, KEY, wire.encode(wire.CORRECTION, m))
    batch, rejects = reader.decode([record], corrections=True)
    assert rejects == []
    assert batch.num_requests == (1 if horizon_ms else 0)


# The early close
def test_after_an_early_close_the_rest_of_the_window_becomes_corrections() -> None:
    driver = Driver(rules(early_close_ms=10))
    driver.send(
        impression(T),
        engagement(T + 5, event=1),
        engagement(T + 50, 2, event=2),
        engagement(T + 101, 2, event=3),
    )
    early = only(driver.advance_to(T + 10), "samples")
    assert (early.reason, early.message.close_ms, early.events) == ("CLOSE_EARLY", T + 10, [1])
    driver.advance_to(T + 200)
    late = [view_of(o) for o in driver.outputs if o.topic == "corrections"]
    assert [c.events for c in late] == [[2], [3]] and not any(c.message.untrainable for c in late)
    assert [(c.labels_before[2][1], c.labels[2][1]) for c in late] == [(0.0, 1.0), (1.0, 1.0)], (
        "the click at T + 101 is outside the label's window"
    )


def test_a_second_correction_starts_from_the_first_ones_labels() -> None:
    driver = Driver(rules(engaged_threshold=1))
    driver.send(
        impression(T), engagement(T + 5, event=1), engagement(T + 30, event=3), engagement(T + 20, event=2)
    )
    driver.advance_to(T + 200)
    counts = [
        (m.message.event_ids[0], m.labels_before[1][1], m.labels[1][1])
        for m in (only([o], "corrections") for o in driver.outputs if o.topic == "corrections")
    ]
    assert counts == [(2, 1.0, 2.0), (3, 2.0, 3.0)], "corrections must be in time order"


@pytest.mark.parametrize(("time_ms", "due_ms"), [(T + 130, T + 130), (T + 60, T + 100)])
def test_the_record_of_a_correction_has_the_time_when_it_was_due(time_ms: int, due_ms: int) -> None:
    """Even if the joiner was behind. With the joiner's clock instead, training would read all corrections of
    an outage after all samples of it, and a correction's gradient does not shrink as the logit grows."""
    driver = Driver(rules())
    driver.send(impression(T))
    driver.advance_to(T + 100)
    driver.send(engagement(time_ms, event=1))
    driver.advance_to(T + 900)
    (output,) = [output for output in driver.outputs if output.topic == "corrections"]
    assert output.timestamp_ms == due_ms


def test_corrections_are_emitted_in_event_time_order() -> None:
    driver = Driver(rules(engaged_threshold=1))
    driver.send(impression(T), engagement(T + 5, event=1), engagement(T + 50, event=2))
    assert [o.topic for o in driver.advance_to(T + 49)] == ["samples"]
    assert [o.topic for o in driver.advance_to(T + 50)] == ["corrections"]


@pytest.mark.parametrize(
    ("time", "reason", "case"),
    [
        (T + 1_100, "", "at the horizon it still becomes a correction"),
        (T + 1_101, "too_late", "beyond the horizon"),
        (T + 2_100, "too_late", "while the request's name is still stored"),
        (T + 2_101, "no_request", "once the request is forgotten"),
    ],
)
@pytest.mark.parametrize("early", [True, False])
def test_an_engagement_beyond_the_late_horizon_is_too_late(
    time: int, reason: str, case: str, early: bool
) -> None:
    driver = Driver(rules())
    driver.send(impression(T))
    driver.advance_to(T + 100 if early else time - 1)
    driver.send(engagement(time, event=1))
    driver.advance_to(time + 200)
    assert reasons(driver.outputs) == ([reason] if reason else []), case
    assert len([o for o in driver.outputs if o.topic == "corrections"]) == (not reason)


def test_engagements_that_are_too_late_do_not_count_for_the_cap() -> None:
    driver = Driver(rules(max_engagements=2))
    driver.send(impression(T))
    driver.advance_to(T + 1_100)
    for event in range(1, 6):
        driver.send(engagement(T + 1_101 + event, event=event))
        driver.advance_to(T + 1_101 + event)
    assert reasons(driver.outputs) == ["too_late"] * 5


def test_copies_of_pages_are_recognized_until_the_request_is_forgotten() -> None:
    """Copies of a page in the sample, of a page after the close, and of a page that came when only the
    request's name was stored."""
    driver = Driver(rules())
    sampled, late, last = (impression(T + n, (n + 1,)) for n in range(3))
    driver.send(sampled)
    driver.advance_to(T + 100)
    assert reasons(driver.send(late)) == ["after_close"] and driver.send(sampled, late) == []
    driver.advance_to(T + 1_100)
    assert driver.state.requests["r"].phase == EXPIRED and driver.send(sampled, late) == []
    assert reasons(driver.send(last)) == ["after_close"] and driver.send(last, late, sampled) == []


def test_a_request_is_closed_then_expired_then_forgotten() -> None:
    driver = Driver(rules())
    driver.send(impression(T))
    phases = [
        (driver.advance_to(ms), driver.state.requests["r"].phase)[1]
        for ms in (T + 99, T + 100, T + 1_099, T + 1_100, T + 2_099)
    ]
    assert phases == [OPEN, CLOSED, CLOSED, EXPIRED, EXPIRED]
    driver.advance_to(T + 2_100)
    assert driver.state.requests == {}


# Behind the watermark
def test_a_late_request_closes_with_its_window() -> None:
    driver = Driver(rules())
    driver.send(engagement(T + 9, event=1))
    driver.advance_to(T + 50)
    assert driver.send(impression(T), engagement(T + 70, event=2)) == [] and driver.advance_to(T + 99) == []
    sample = only(driver.advance_to(T + 100), "samples")
    assert (sample.reason, sample.message.close_ms, sample.events) == ("CLOSE_WINDOW", T + 100, [1, 2])


@pytest.mark.parametrize(("watermark", "late"), [(T + 99, False), (T + 100, True)])
def test_a_request_past_its_close_is_emitted_at_once_with_waiting_engagements(
    watermark: int, late: bool
) -> None:
    driver = Driver(rules(orphan_timeout_ms=500))
    driver.send(engagement(T + 9, event=1), engagement(T + 104, event=2))
    driver.advance_to(watermark)
    outputs = driver.send(impression(T))
    assert bool(outputs) is late
    sample = only([*outputs, *driver.advance_to(T + 104)], "samples")
    assert (sample.reason, sample.message.close_ms) == ("CLOSE_LATE" if late else "CLOSE_WINDOW", T + 100)
    assert sample.events == [1] and only(driver.outputs, "corrections").events == [2]


def test_an_engagement_of_a_forgotten_request_becomes_an_orphan() -> None:
    driver = Driver(rules(), "memory")
    close_ms, horizon_ms = T + driver.join.rules.window_ms, driver.join.rules.late_horizon_ms
    far_ms = close_ms + 2 * horizon_ms + 1
    driver.send(impression(T), engagement(far_ms, event=1))
    driver.advance_to(far_ms - 1)
    assert driver.state.counts.num_orphans == 1, "the request and its shown items are forgotten"
    assert reasons(driver.advance_to(far_ms + driver.join.rules.orphan_timeout_ms)) == ["no_request"]
    assert driver.state.counts.num_orphans == 0 and not driver.state.requests


def test_an_impression_older_than_the_memory_of_requests_is_too_late() -> None:
    driver = Driver(rules())
    driver.advance_to(T + 1_000)
    assert reasons(driver.send(impression(T))) == ["too_late"]
    assert only(driver.send(impression(T + 1, request="s")), "samples").reason == "CLOSE_LATE"


def test_a_page_older_than_the_memory_of_requests_does_not_become_the_first_page() -> None:
    driver = Driver(rules())
    driver.send(impression(T + 5_000))
    driver.advance_to(T + 5_001)
    assert reasons(driver.send(impression(1, items=(8,)))) == ["too_late"]
    sample = only(driver.advance_to(T + 5_100), "samples")
    assert (sample.message.header.time_ms, sample.message.close_ms) == (T + 5_000, T + 5_100)


def test_an_engagement_older_than_the_memory_of_requests_is_too_late() -> None:
    driver = Driver(rules())
    driver.advance_to(T + 1_000)
    assert reasons(driver.send(engagement(T, event=1))) == ["too_late"]
    assert reasons(driver.send(engagement(T + 1, event=2))) == ["no_request"]


def test_a_late_engagement_of_an_open_request_is_folded() -> None:
    driver = Driver(rules())
    driver.send(impression(T))
    driver.advance_to(T + 50)
    driver.send(engagement(T + 10, event=1))
    assert only(driver.advance_to(T + 100), "samples").events == [1]


def test_a_lowered_threshold_that_is_already_exceeded_closes_a_request_at_its_next_event() -> None:
    driver = Driver(rules(engaged_threshold=4))
    driver.send(impression(T), *(engagement(T + n, event=n) for n in (1, 2, 3)))
    driver.join = Join(rules(engaged_threshold=2), SCHEMAS.get, SCHEMA.limits)
    driver.send(engagement(T + 4, event=4))
    sample = only(driver.advance_to(T + 5), "samples")
    assert (sample.message.close_ms, sample.reason) == (T + 2, "CLOSE_ENGAGED")


# Caps
def test_open_requests_beyond_the_cap_overflow_and_closed_ones_make_room() -> None:
    driver = Driver(rules(max_open_requests=2))
    assert reasons(driver.send(*(impression(T + n, request=f"r{n}") for n in range(3)))) == ["overflow"]
    assert driver.state.counts.num_open == 2
    driver.advance_to(T + 100)
    assert driver.send(impression(T + 101, request="r3")) == []


def test_remembered_requests_beyond_the_cap_overflow() -> None:
    driver = Driver(rules(max_requests=1))
    driver.send(impression(T))
    driver.advance_to(T + 100)
    assert reasons(driver.send(impression(T + 200, request="s"))) == ["overflow"]


def test_a_user_who_scrolls_for_a_whole_window_causes_no_overflow() -> None:
    driver = Driver(rules(window_ms=600_000), "memory")
    shown = [impression(T + 4_000 * n, request=f"r{n}") for n in range(3 * 150)]
    out = []
    for message in shown:
        driver.advance_to(message.header.time_ms - 1)
        out += driver.send(message)
    assert reasons(out) == []


@pytest.mark.parametrize(
    ("cap", "messages"),
    [
        ("max_open_requests", [impression(T), impression(T, request="s")]),
        ("max_requests", [impression(T), impression(T, request="s")]),
        ("max_impressions", [impression(T), impression(T + 1)]),
        ("max_engagements", [engagement(T, event=1), engagement(T, event=2)]),
        ("max_orphans", [engagement(T, event=1), engagement(T, event=2)]),
    ],
)
def test_an_overflow_names_the_setting_that_was_reached_and_its_value(
    cap: str, messages: list[Message]
) -> None:
    out = Driver(rules(**{cap: 1})).send(*messages)
    error = only(out, "dead_letters").message.error
    assert f"{cap} (1)" in error and error.count("max_") == 1


def test_orphans_beyond_the_cap_overflow_and_joining_ones_do_not_count() -> None:
    driver = Driver(rules(max_orphans=2))
    assert driver.send(engagement(T, event=1, request="x"), impression(T), engagement(T, 99, event=2)) == []
    assert driver.send(engagement(T, 1, event=3)) == []
    assert reasons(driver.send(engagement(T, 98, event=4))) == ["overflow"]
    assert reasons(driver.send(engagement(T, event=5, request="y"))) == ["overflow"]


def test_candidates_beyond_the_cap_overflow_with_the_page_that_brings_them() -> None:
    driver = Driver(rules())
    driver.send(impression(T, tuple(range(999))))
    assert reasons(
        driver.send(impression(T + 1, (1, 2_001), ro=None), impression(T + 2, (3_001,), ro=None))
    ) == ["overflow"]
    assert len(only(driver.end(), "samples").items) == 1_000


def test_engagements_that_were_folded_or_corrected_count_for_the_cap() -> None:
    driver = Driver(rules(max_engagements=2))
    driver.send(impression(T), engagement(T + 1, event=1))
    driver.advance_to(T + 100)
    assert driver.send(engagement(T + 101, event=2)) == []
    assert [o.topic for o in driver.advance_to(T + 101)] == ["corrections"]
    assert reasons(driver.send(engagement(T + 102, event=3))) == ["overflow"]


def test_a_dead_letter_has_the_origin_and_the_record() -> None:
    driver = Driver(rules())
    event = engagement(T, event=7)
    driver.send(impression(T, request="other"), event)
    m = only(driver.advance_to(T + 5_000), "dead_letters").message
    assert (m.topic, m.partition, m.offset, m.event_id, m.request_id) == ("engagements", 0, 2, 7, "r")
    assert m.raw[2:] == event.SerializeToString(deterministic=True) and m.raw_bytes == len(m.raw) and m.error
