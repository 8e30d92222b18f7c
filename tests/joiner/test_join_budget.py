"""The byte budget of a request. Whatever the joiner accepts becomes an output that topics, sinks and decoders
accept, and state stays small."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from joiner.config import JoinerConfig
from joiner.join import FIXED_BYTES, candidates_cost, engagement_cost, impression_cost
from joiner.local_engine import LocalEngine
from joiner.local_runner import KafkaSink
from joiner.state import MemoryState, encode
from roostream.runtime.kafka.broker import Broker
from roostream.schema.limits import MAX_MESSAGE_BYTES, RECORD_OVERHEAD_BYTES
from roostream.wire import roo_pb2 as pb
from roostream.wire.decode import Decoder
from roostream.wire.records import Record
from tests.joiner.cases import (
    KINDS,
    SCHEMA,
    DictStore,
    Driver,
    engagement,
    event,
    impression,
    only,
    reasons,
    record,
    rules,
    view_of,
)

T = 1_000


def join_records(records: list[Record]) -> list:
    engine = LocalEngine(JoinerConfig(window_ms=1_000), SCHEMA, {SCHEMA.fingerprint: SCHEMA}.get)
    return [*(o for r in records for o in engine.process(r)), *engine.end_of_input()]


def padded(page: pb.Impression, num_bytes: int) -> pb.Impression:
    """Pad the impression's header to about this many bytes. Only the limit of a record bounds this text."""
    page.header.model_version = "m" * max(num_bytes - page.ByteSize() - 4, 0)
    return page


def growing_pages() -> list[Record]:
    """200 pages, each with all earlier items and 5 more. The largest has 84 kB."""
    return [record(padded(impression(T + n, range(1, 5 * n + 6), ro=None), 420 * n)) for n in range(200)]


def five_large_pages() -> list[Record]:
    return [record(padded(impression(T + n, (n + 1,), ro=None), 960_000)) for n in range(5)]


def two_pages_of_half_the_budget() -> list[Record]:
    return [record(padded(impression(T + n, (n + 1,)), 533_000)) for n in range(2)]


def page_of_the_largest_size() -> list[Record]:
    return [record(padded(impression(T), SCHEMA.limits.max_record_bytes - 8))]


def many_engagements() -> list[Record]:
    actions = [f"{n:060d}" for n in range(50)]
    events = [record(engagement(T + 1, 1, event=n, action=actions[n % 50])) for n in range(1, 12_000)]
    return [record(impression(T)), *events]


def large_engagements() -> list[Record]:
    events = [engagement(T + 1, 1, event=n) for n in range(1, 9)]
    for e in events:
        e.header.model_version = "m" * 900_000
    return [record(impression(T)), *map(record, events)]


@pytest.mark.parametrize(
    "records",
    [
        growing_pages,
        five_large_pages,
        two_pages_of_half_the_budget,
        page_of_the_largest_size,
        many_engagements,
        large_engagements,
    ],
    ids=lambda f: f.__name__,
)
def test_every_accepted_request_fits_the_sink_and_the_decoder(records) -> None:  # type: ignore[no-untyped-def]
    input_records = records()
    outputs = join_records(input_records)
    kinds = Counter((o.topic, o.reason) for o in outputs)
    assert set(kinds) <= {("samples", "CLOSE_WINDOW"), ("dead_letters", "overflow")}
    assert kinds["samples", "CLOSE_WINDOW"] == 1
    KafkaSink(Broker("127.0.0.1:9"), "").write(
        outputs
    )  # the client refuses larger messages before it sends anything
    sample = next(o for o in outputs if o.topic == "samples")
    read = Record("samples", 0, 0, sample.timestamp_ms or 0, sample.key, sample.value)
    batch, rejects = Decoder(SCHEMA, {SCHEMA.fingerprint: SCHEMA}.get).decode([read])
    assert not rejects and batch.num_requests == 1
    shown = [r for r in input_records if r.topic == "impressions"]
    message = view_of(sample).message
    num_parts = len(message.parts) + sum(
        view_of(o).message.topic == "impressions" for o in outputs if o.topic == "dead_letters"
    )
    num_events = len(message.event_ids) + sum(
        view_of(o).message.event_id != 0 for o in outputs if o.topic == "dead_letters"
    )
    assert num_parts == len(shown) and num_events == len(input_records) - len(shown), (
        "every event must be in the sample or in a dead letter"
    )


def test_the_sink_refuses_records_above_the_limit() -> None:
    """This shows that the test above would fail without the budget."""
    from confluent_kafka import KafkaException

    large = only(join_records([record(impression(T))]), "samples")
    output = join_records([record(impression(T))])[0]._replace(value=bytes(MAX_MESSAGE_BYTES))
    assert large.topic == "samples"
    with pytest.raises(KafkaException, match="MSG_SIZE_TOO_LARGE"):
        KafkaSink(Broker("127.0.0.1:9"), "").write([output])
    KafkaSink(Broker("127.0.0.1:9"), "").write(
        [output._replace(value=bytes(MAX_MESSAGE_BYTES - RECORD_OVERHEAD_BYTES))]
    )


def test_no_sample_is_larger_than_the_cost_of_its_events() -> None:
    rng = random.Random(5)
    for n in range(40):
        driver = Driver(rules(), "memory")
        cost, shown = FIXED_BYTES, set[int]()
        for page in range(rng.randrange(1, 6)):
            items = rng.sample(range(1, 60), rng.randrange(0, 30))
            served = {
                "scores": [0.5] * (4 * len(items)),
                "positions": range(len(items)),
                "propensities": [0.5] * len(items),
            }
            message = impression(T + page, items, **{k: v for k, v in served.items() if rng.random() < 0.5})  # type: ignore[arg-type]
            driver.send(message)
            cost += impression_cost(event(message))  # type: ignore[arg-type]
            shown |= set(items)
            for i in range(rng.randrange(9)):
                acted = engagement(
                    T + 9, rng.randrange(1, 60), event=100 * page + i + 1, action=rng.choice(["a", "b" * 64])
                )
                driver.send(acted)
                cost += engagement_cost(event(acted))  # type: ignore[arg-type]
        cost += candidates_cost(len(shown), 4)
        assert driver.state.requests["r"].num_bytes + FIXED_BYTES == cost, n
        sample = next(o for o in driver.end() if o.topic == "samples")
        message = view_of(sample).message
        prediction = pb.Prediction(
            item_ids=message.item_ids,
            labels=message.labels,
            scores=message.labels,
            served_scores=message.labels,
        )
        assert len(sample.value) <= cost and prediction.ByteSize() <= cost


def cost_of_first_page(page: pb.Impression) -> int:
    """What this page takes from the budget as the first page of its request."""
    return impression_cost(event(page)) + candidates_cost(len(page.item_ids), 4)  # type: ignore[arg-type]


def test_a_page_or_engagement_that_exceeds_the_budget_overflows_and_the_rest_is_joined() -> None:
    driver = Driver(rules())
    first, page, click = impression(T), impression(T + 1, (3,), ro=None), engagement(T + 2, event=1)
    cost = cost_of_first_page(first) + engagement_cost(event(click))  # type: ignore[arg-type]
    driver.join.max_request_bytes = cost
    assert reasons(driver.send(first, click, page, engagement(T + 3, event=2))) == ["overflow", "overflow"]
    sample = only(driver.advance_to(T + 100), "samples")
    assert sample.items == [1, 2] and sample.events == [1]
    assert driver.send(engagement(T + 150, event=3)) == [], "folded engagements must free their budget"


def test_waiting_engagements_count_until_they_time_out() -> None:
    driver = Driver(rules(orphan_timeout_ms=10))
    driver.join.max_request_bytes = cost_of_first_page(impression(T))  # type: ignore[arg-type]
    driver.send(engagement(T, event=1))
    assert reasons(driver.send(impression(T))) == ["overflow"]
    assert reasons(driver.advance_to(T + 10)) == ["no_request"]
    assert driver.send(impression(T + 11)) == []
    assert driver.state.requests["r"].num_bytes == driver.join.max_request_bytes


def test_the_budget_counts_pending_events_in_every_phase() -> None:
    driver = Driver(rules())
    acted = [engagement(t, event=n) for n, t in enumerate((T + 5, T + 500, T + 1_500, T + 2_500), 1)]
    costs = [engagement_cost(event(e)) for e in acted]  # type: ignore[arg-type]
    page_cost = cost_of_first_page(impression(T))  # type: ignore[arg-type]
    driver.send(impression(T), *acted)
    used_bytes = [driver.state.requests["r"].num_bytes]
    for watermark_ms in (T + 100, T + 500, T + 1_100, T + 1_500, T + 2_100):
        driver.advance_to(watermark_ms)
        used_bytes.append(driver.state.requests["r"].num_bytes)
    assert used_bytes == [
        page_cost + sum(costs),
        sum(costs[1:]),
        sum(costs[2:]),
        sum(costs[2:]),
        costs[3],
        costs[3],
    ]


def test_impressions_of_a_request_have_a_cap_and_copies_do_not_count() -> None:
    driver = Driver(rules(max_impressions=2))
    pages = [impression(T + n) for n in range(3)]
    assert driver.send(pages[0], pages[0], pages[1], pages[1]) == []
    assert reasons(driver.send(pages[2])) == ["overflow"]
    assert only(driver.end(), "samples").message.num_duplicates == 4


def test_repeated_impressions_after_the_close_are_recognized_up_to_the_limit() -> None:
    driver = Driver(rules(max_impressions=1))
    late = [impression(T + 1 + n) for n in range(3)]
    driver.send(impression(T))
    driver.advance_to(T + 100)
    for page in late:
        assert reasons(driver.send(page)) == ["after_close"]
    assert driver.send(late[0]) == [], "as many late impressions are remembered as a request may have"
    assert reasons(driver.send(late[1])) == ["after_close"], (
        "beyond the cap, a copy is refused as a new impression is"
    )


def test_engagements_that_wait_for_an_item_shown_too_late_have_the_cap_of_orphans() -> None:
    driver = Driver(rules(orphan_timeout_ms=10, max_orphans=2))
    driver.send(impression(T), impression(T + 50, (3,), ro=None))
    waiting = [engagement(T + 20, 3, event=n) for n in range(1, 4)]
    assert reasons(driver.send(*waiting)) == ["overflow"]
    assert driver.send(engagement(T + 45, 3, event=4)) == [], (
        "engagements that join must not count for the cap"
    )
    assert driver.state.counts.num_orphans == 0, "an engagement of a shown item is no orphan"


def test_an_oversized_output_becomes_a_dead_letter_of_each_event() -> None:
    driver = Driver(rules(correction_horizon_ms=1_000))
    driver.join.max_sample_bytes = 100
    driver.send(impression(T), impression(T + 1, (3,)), engagement(T + 2, event=1))
    outputs = driver.advance_to(T + 100)
    assert [(o.topic, o.reason) for o in outputs] == [("dead_letters", "oversized")] * 3
    assert sorted(view_of(o).message.event_id for o in outputs) == [0, 0, 1]
    driver.send(engagement(T + 150, event=2))
    assert [(o.topic, o.reason) for o in driver.advance_to(T + 150)] == [("dead_letters", "oversized")]


class ByteCountingStore(DictStore):
    """A store that counts the bytes read and written."""

    num_bytes = 0

    def get(self, key: str, default: object = None) -> bytes | None:  # type: ignore[override]
        found = super().get(key)
        self.num_bytes += len(found or b"")
        return found

    def put(self, key: str, value: bytes) -> None:
        self.num_bytes += len(value)
        super().put(key, value)


def bytes_touched(driver: Driver, messages: list) -> int:
    driver.store = store = ByteCountingStore(driver.store)
    driver.send(*messages)
    return store.num_bytes


@pytest.mark.parametrize("kind", ["join", "after the close", "copies of the impression"])
def test_four_times_the_events_of_a_request_cost_four_times_as_much(kind: str) -> None:
    """The cost is the bytes of state read and written, without the work at the close."""

    def cost(n: int) -> int:
        driver = Driver(rules(engaged_threshold=3))
        driver.send(impression(T))
        if "after" in kind:
            driver.advance_to(T + 100)
        if "copies" in kind:
            return bytes_touched(driver, [impression(T)] * n)
        time_ms = T + 200 if "after" in kind else T + 50
        return bytes_touched(driver, [engagement(time_ms + i, 1, event=i + 1) for i in range(n)])

    assert cost(240) < 6 * cost(60)


@pytest.mark.parametrize("kind", KINDS)
def test_refused_engagements_of_a_request_id_that_is_always_in_use_leave_no_state(kind: str) -> None:
    """A client that writes the same request id into all events, and shows nothing."""
    driver, sizes = Driver(rules(), kind), []
    for n in range(300):
        driver.advance_to(T + 60 * n)
        order = (2, 1) if n % 3 else (1, 2)  # the later one may arrive first
        driver.send(*(engagement(T + 60 * n + 20 * i, event=2 * n + i, request="null") for i in order))
        sizes.append(len(encode(driver.state)))
    assert max(sizes) < 2 * max(sizes[:10])
    assert reasons(driver.outputs) == ["no_request"] * len(driver.outputs) and len(driver.outputs) > 500
    driver.send(impression(T + 60 * 300, request="null"))
    driver.end()
    assert driver.state == MemoryState()
    dead = [view_of(o).message.event_id for o in driver.outputs if o.topic == "dead_letters"]
    joined = only(driver.outputs, "samples").message.event_ids
    assert sorted((*dead, *joined)) == [*range(1, 601)]
