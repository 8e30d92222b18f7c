"""For any order of arrival without late events, the joiner's outputs equal those of the offline oracle."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from joiner.join import Join
from joiner.rules import Rules, close_time
from joiner.state import NEVER, OPEN, WAITING, Engagement, MemoryState, SeenEngagement
from roostream.schema.ids import sample_id
from roostream.wire import roo_pb2 as pb
from tests.joiner.cases import (
    KEY,
    KINDS,
    OTHER_SCHEMA,
    SCHEMA,
    SCHEMAS,
    Driver,
    engagement,
    features_of,
    impression,
    rules,
    view_of,
)
from tests.joiner.oracle import Result, join_all

Message = pb.Impression | pb.Engagement
REQUESTS, ITEMS = ("a", "b", "c"), (1, 2, 3, 4)
SPAN_MS = 400

impressions = st.builds(
    lambda request, time, items, ro, session, tag, schema: impression(
        1 + time, items, request=request, ro=ro, session=session, tag=tag, schema=schema
    ),
    st.sampled_from(REQUESTS),
    st.integers(0, SPAN_MS // 2),
    st.lists(st.sampled_from(ITEMS), max_size=4),
    st.sampled_from([None, 1.0, 2.0]),
    st.sampled_from([4, 5]),
    st.sampled_from([0.0, 50.0]),
    st.sampled_from([SCHEMA, SCHEMA, SCHEMA, OTHER_SCHEMA]),
)
engagements = st.tuples(
    st.sampled_from((*REQUESTS, "never shown")),
    st.integers(0, SPAN_MS),
    st.sampled_from((*ITEMS, 9)),
    st.sampled_from(["click", "dwell", "buy"]),
    st.integers(0, 3),
)
rule_sets = st.fixed_dictionaries(
    {
        "window_ms": st.sampled_from([20, 100]),
        "early_close_ms": st.sampled_from([0, 0, 1, 15]),
        "next_request": st.sampled_from(["off", "session", "user"]),
        "linger_ms": st.sampled_from([0, 7]),
        "engaged_threshold": st.sampled_from([0, 1, 2]),
        "terminal_actions": st.sampled_from([(), ("buy",)]),
        "engaged_min_wait_ms": st.sampled_from([0, 15]),
        "orphan_timeout_ms": st.sampled_from([0, 10]),
        "late_horizon_ms": st.sampled_from([0, 100, 150]),
        "correction_horizon_ms": st.sampled_from([0, 0, 30]),
    }
)

changing_rules = st.builds(
    lambda settings, horizon_ms: {**settings, "late_horizon_ms": horizon_ms},
    rule_sets,
    st.sampled_from([100, 200, 400]),  # each is half of another, so that due times coincide
)


@st.composite
def traffic(draw: Any) -> list[Message]:
    """Distinct events and copies of some. An event id always has the same bytes."""
    messages: list[Message] = list(draw(st.lists(impressions, max_size=6)))
    for event_id, (request, time, item, action, value) in enumerate(
        draw(st.lists(engagements, max_size=8)), 1
    ):
        messages.append(
            engagement(1 + time, item, event=event_id, request=request, action=action, value=value)
        )
    copies = draw(st.lists(st.sampled_from(messages), max_size=4)) if messages else []
    return messages + copies


def arrive(data: Any, messages: list[Message], with_rules: Rules) -> Driver:
    """Send the messages in a random order. Random watermarks stay behind the messages still to come."""
    driver = Driver(with_rules, data.draw(st.sampled_from(KINDS)))
    order = data.draw(st.permutations(messages))
    for n, message in enumerate(order):
        limit = min(m.header.time_ms for m in order[n:]) - 1
        if limit > driver.watermark_ms:
            low = max(driver.watermark_ms, 0)
            driver.advance_to(data.draw(st.integers(low, limit)) if limit >= low else limit)
        driver.send(message)
        check_counts(driver)
    driver.end()
    check_counts(driver)
    return driver


def check_counts(driver: Driver) -> None:
    """Counters that are updated with each event equal counts over the whole state."""
    state = driver.state
    head, requests = state.counts, state.requests
    by_phase = Counter(request.phase for request in requests.values())
    assert driver.num_requests == [by_phase[phase] for phase in range(4)]
    for request_id, request in requests.items():
        events = [e for e in state.engagement_list(request_id, request)] if request.newest_event else []
        pending = {e.event_id: e for e in events if isinstance(e, Engagement)}
        assert request.num_pending == len(pending)
        assert request.num_events == sum(not (isinstance(e, SeenEngagement) and e.forgotten) for e in events)
        if request.phase in (WAITING, OPEN):
            assert request.num_orphans == sum(pending[event_id].row < 0 for event_id in request.waiting)
    for scope_id, scope in state.scopes.items():
        members = {request_id: r for request_id, r in requests.items() if r.scope == scope_id}
        assert scope.open == sorted(
            (r.time_ms, request_id) for request_id, r in members.items() if r.phase == OPEN
        )
        assert [*memoryview(scope.times).cast("q")] == sorted(r.time_ms for r in members.values())
    before_close = [r for r in requests.values() if r.phase in (WAITING, OPEN)]
    assert head.num_orphans == sum(r.num_orphans for r in before_close)
    assert head.num_open == sum(r.phase == OPEN for r in before_close)
    assert head.num_requests == len(requests)


def as_oracle_result(driver: Driver) -> Result:
    """The driver's outputs in the form of the oracle's result."""
    result = Result({}, {}, Counter())
    for output in driver.outputs:
        m = view_of(output).message
        if output.topic == "samples":
            assert m.header.request_id not in result.samples, "a request must have one sample"
            assert m.sample_id == sample_id(KEY, m.header.request_id) and output.timestamp_ms == m.close_ms
            result.samples[m.header.request_id] = _sample(m, view_of(output))
        elif output.topic == "corrections":
            assert m.event_ids[0] not in result.corrections, "an event must have one correction"
            assert m.sample_id == sample_id(KEY, m.header.request_id, m.event_ids[0])
            assert m.untrainable == (not m.parts)
            assert output.timestamp_ms == max(m.close_ms, m.event_times[0]), "what partitions are merged by"
            result.corrections[m.event_ids[0]] = {
                "request": m.header.request_id,
                "item": m.item_ids[m.event_candidates[0]],
                "before": view_of(output).labels_before,
                "after": view_of(output).labels,
                "ro": m.ro if m.HasField("ro") else None,
                "features": features_of(m),
            }
        else:
            result.dead[(m.event_id or m.raw[2:], m.reason)] += 1
    return result


def _sample(m: Any, view: Any) -> dict[str, Any]:
    columns = zip(
        m.event_ids, m.event_candidates, m.event_actions, m.event_values, m.event_times, strict=True
    )
    return {
        "close": (m.close_ms, pb.CloseReason.Name(m.close_reason)),
        "header": m.header.SerializeToString(deterministic=True),
        "ro": m.ro if m.HasField("ro") else None,
        "features": features_of(m),
        "labels": view.labels,
        "events": [(i, m.item_ids[c], m.actions[a], v, t) for i, c, a, v, t in columns],
        "num_duplicates": m.num_duplicates,
    }


def check_due(driver: Driver, with_rules: Rules) -> None:
    """Every open request is due when the rules, applied to all stored requests, say that it closes. Requests
    that arrived behind the watermark are skipped, because they close no other request."""
    requests = [r for r in driver.state.requests.values() if r.phase != WAITING]
    for request in requests:
        if request.phase == OPEN and not request.late:
            later = [
                r.time_ms
                for r in requests
                if r.scope == request.scope is not None and r.time_ms > request.time_ms
            ]
            planned = structs.replace(request, next_ms=min(later, default=NEVER))
            assert request.due_ms == close_time(with_rules, planned)[0]


@settings(max_examples=80)
@given(traffic(), rule_sets, st.data())
def test_every_open_request_is_due_at_its_close_after_every_call(
    messages: list[Message], settings_: dict, data: Any
) -> None:
    driver = Driver(with_rules := rules(**settings_), "memory")
    watermark_ms = 0
    for message in data.draw(st.permutations(messages)):
        watermark_ms += data.draw(st.sampled_from([0, 0, 10, 60]))
        driver.advance_to(watermark_ms)
        check_due(driver, with_rules)
        driver.send(message)
        check_due(driver, with_rules)


@settings(max_examples=250)
@given(traffic(), rule_sets, st.data())
def test_every_order_of_arrival_equals_the_oracle(
    messages: list[Message], settings_: dict, data: Any
) -> None:
    with_rules = rules(**settings_)
    expected, found = (
        join_all(messages, with_rules, SCHEMAS),
        as_oracle_result(arrive(data, messages, with_rules)),
    )
    assert found.samples == expected.samples
    assert found.corrections == expected.corrections
    assert found.dead == expected.dead


@settings(max_examples=60)
@given(traffic(), rule_sets, st.data())
def test_all_kinds_of_state_give_the_same_outputs(
    messages: list[Message], settings_: dict, data: Any
) -> None:
    order = data.draw(st.permutations(messages))
    watermarks_ms = sorted(
        data.draw(st.lists(st.integers(0, 3 * SPAN_MS), min_size=len(order), max_size=len(order)))
    )
    drivers = [Driver(rules(**settings_), kind) for kind in KINDS]
    for message, watermark_ms in zip(
        order, watermarks_ms, strict=True
    ):  # events behind the watermark too: the join accepts any order
        written = [(d.advance_to(watermark_ms), d.send(message)) for d in drivers]
        assert written[0] == written[1] == written[2]
        assert drivers[0].state == drivers[1].state == drivers[2].state
    ends = [d.end() for d in drivers]
    assert ends[0] == ends[1] == ends[2]
    assert all(d.state == MemoryState() for d in drivers), "no state may be left after the end of input"


@settings(max_examples=80)
@given(traffic(), rule_sets, st.data())
def test_g1_every_event_is_accounted_for_at_every_step_even_late(
    messages: list[Message], settings_: dict, data: Any
) -> None:
    """Distinct engagements = folded + corrected + dead letters + pending, and a request ends in one sample or
    only in dead letters (guarantee G1, docs/architecture.md). Pages arrive within the late horizon of the
    close, because a forgotten request id counts as a new request."""
    driver, arrived_ids = Driver(rules(**{**settings_, "late_horizon_ms": SPAN_MS})), set()
    watermark_ms = 0
    for message in data.draw(st.permutations(messages)):
        watermark_ms += data.draw(st.integers(0, 60))
        driver.advance_to(watermark_ms)
        driver.send(message)
        if isinstance(message, pb.Engagement):
            arrived_ids.add(message.event_id)
        assert _ended(driver) | _pending(driver) == arrived_ids
    driver.end()
    assert _ended(driver) == arrived_ids
    shown = {m.header.request_id for m in messages if isinstance(m, pb.Impression)}
    sampled = Counter(view_of(o).message.header.request_id for o in driver.outputs if o.topic == "samples")
    dead = {view_of(o).message.request_id for o in driver.outputs if o.topic == "dead_letters"}
    assert all(n == 1 for n in sampled.values())
    assert shown <= set(sampled) | dead and set(sampled) <= shown


@settings(max_examples=80)
@given(traffic(), st.lists(changing_rules, min_size=2, max_size=3), st.data())
def test_changed_rules_after_a_restore_leave_no_state_and_lose_no_event(
    messages: list[Message], rule_changes: list[dict], data: Any
) -> None:
    driver, arrived_ids, watermark_ms = (
        Driver(rules(**rule_changes[0]), data.draw(st.sampled_from(KINDS))),
        set(),
        0,
    )
    order = data.draw(st.permutations(messages))
    changes = {data.draw(st.integers(0, len(order))): rules(**changed) for changed in rule_changes[1:]}
    for n, message in enumerate(order):
        if n in changes:
            driver.join = Join(changes[n], SCHEMAS.get, SCHEMA.limits)
        watermark_ms += data.draw(st.integers(0, 200))
        driver.advance_to(watermark_ms)
        driver.send(message)
        check_counts(driver)
        if isinstance(message, pb.Engagement):
            arrived_ids.add(message.event_id)
        assert _ended(driver) | _pending(driver) == arrived_ids
    if len(order) in changes:
        driver.join = Join(changes[len(order)], SCHEMAS.get, SCHEMA.limits)
    driver.advance_to(watermark_ms + 5 * SPAN_MS)
    driver.end()
    assert driver.state == MemoryState(), "no state may be left after the end of input"
    assert _ended(driver) == arrived_ids
    shown = {m.header.request_id for m in messages if isinstance(m, pb.Impression)}
    sampled = {view_of(o).message.header.request_id for o in driver.outputs if o.topic == "samples"}
    dead = {view_of(o).message.request_id for o in driver.outputs if o.topic == "dead_letters"}
    assert shown <= sampled | dead and sampled <= shown


def _ended(driver: Driver) -> set[int]:
    ids: set[int] = set()
    for output in driver.outputs:
        m = view_of(output).message
        ids |= {m.event_id} - {0} if output.topic == "dead_letters" else set(m.event_ids)
    return ids


def _pending(driver: Driver) -> set[int]:
    return {
        e.event_id
        for engagements_by_id in driver.state.engagements.values()
        for e in engagements_by_id.values()
        if isinstance(e, Engagement)
    }


@settings(max_examples=60)
@given(traffic(), rule_sets, st.data())
def test_duplicates_change_nothing_but_their_count(
    messages: list[Message], settings_: dict, data: Any
) -> None:
    distinct = list({m.SerializeToString(deterministic=True): m for m in messages}.values())
    once, twice = (as_oracle_result(arrive(data, m, rules(**settings_))) for m in (distinct, distinct * 2))
    for result in (once, twice):
        for sample in result.samples.values():
            del sample["num_duplicates"]
    assert once == twice
