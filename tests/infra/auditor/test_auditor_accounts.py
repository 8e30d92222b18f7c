"""The sums of guarantee G1 (docs/architecture.md) over hand-made topics: every lost, invented or repeated
event must show."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.auditor.accounts import Accounts, features_hash
from infra.auditor.ledger import DEAD, FOLDED, SEEN, Ledger
from roostream.schema.ids import key_bytes, sample_id
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.records import Record

T0 = 1_700_000_000_000
KEY = key_bytes(5, 0, "")
_offsets = itertools.count()


def impression(request: str, time_ms: int = T0) -> Record:
    header = pb.Header(request_id=request, user_id=5, time_ms=time_ms)
    value = wire.encode(wire.IMPRESSION, pb.Impression(header=header, item_ids=[1, 2]))
    return Record("impressions", 0, next(_offsets), time_ms, KEY, value)


def engagement(request: str, event: int, time_ms: int = T0 + 10, action: str = "click") -> Record:
    header = pb.Header(request_id=request, user_id=5, time_ms=time_ms)
    value = wire.encode(
        wire.ENGAGEMENT, pb.Engagement(header=header, event_id=event, item_id=1, action=action)
    )
    return Record("engagements", 1, next(_offsets), time_ms, KEY, value)


def sample(
    request: str, events: tuple[int, ...] = (), kind: int = wire.SAMPLE, close_ms: int = T0 + 100
) -> Record:
    message = pb.Sample(
        header=pb.Header(request_id=request, user_id=5, time_ms=T0),
        sample_id=sample_id(KEY, request, events[0] if kind == wire.CORRECTION else None),
        close_reason=pb.CLOSE_WINDOW,
        close_ms=close_ms,
        item_ids=[1, 2],
        event_ids=events,
        event_times=[T0 + 10] * len(events),
    )
    return Record(
        "samples" if kind == wire.SAMPLE else "corrections",
        2,
        next(_offsets),
        close_ms,
        KEY,
        wire.encode(kind, message),
    )


def dead(source: Record, reason: str, event: int = 0) -> Record:
    message = pb.DeadLetter(
        reason=reason, topic=source.topic, partition=source.partition, offset=source.offset, event_id=event
    )
    return Record("dead_letters", 0, next(_offsets), T0 + 200, None, wire.encode(wire.DEAD_LETTER, message))


def prediction(request: str, disposition: pb.Disposition = pb.DISPOSITION_TRAINED) -> Record:
    message = pb.Prediction(sample_id=sample_id(KEY, request), time_ms=T0, disposition=disposition)
    value = wire.encode(wire.PREDICTION, message)
    return Record("predictions", 0, next(_offsets), T0, KEY, value)


def accounts_of(records: list[Record], **settings: int) -> Accounts:
    accounts = Accounts(**settings)  # type: ignore[arg-type]
    for record in records:
        accounts.add(record)
    return accounts


def num_remembered(ledger: Ledger) -> int:
    """The number of ids in memory; some are counted twice."""
    _, arrays = ledger.dump()
    return len(arrays["young_ids"]) + len(arrays["old_ids"])


def complete_traffic() -> list[Record]:
    """Two requests and their records. Event 1 is folded, 2 is corrected (late), 3 is dead because its request
    never came. One event is sent twice, and one record can't be decoded."""
    a, b, late = impression("a"), impression("b"), impression("a", T0 + 500)
    orphan_event = engagement("nowhere", 3)
    undecodable = Record("engagements", 3, next(_offsets), T0, KEY, b"\xff\xff\xff")
    return [
        *(a, b, late, orphan_event, undecodable),
        *(engagement("a", 1), engagement("a", 1), engagement("b", 2)),
        *(sample("a", (1,)), sample("b"), sample("b", (2,), wire.CORRECTION)),
        *(dead(orphan_event, "no_request", 3), dead(undecodable, "undecodable"), dead(late, "after_close")),
        *(prediction("a"), prediction("b")),
    ]


def test_outcomes_add_up_despite_repeated_records() -> None:
    story = [record for name in "abc" for record in (impression(name), sample(name))]
    predictions = [
        prediction("a"),
        prediction("b", pb.DISPOSITION_NEGATIVE),
        prediction("c", pb.DISPOSITION_FROZEN),
    ]
    accounts = accounts_of([*story, *predictions, prediction("b", pb.DISPOSITION_NEGATIVE)])
    sums = accounts.sums()
    assert sums.predicted_by == {"trained": 1, "negative": 1, "frozen": 1} and sums.predicted == 3
    reloaded = Accounts()
    reloaded.load(*accounts.dump())
    assert reloaded.sums().predicted_by == sums.predicted_by
    numbers, arrays = accounts.dump()
    del numbers["_dispositions"]
    reloaded.load(numbers, arrays)
    assert reloaded.sums().predicted_by == {"other": 3}, "older files do not have the dispositions"


def test_every_event_has_one_outcome() -> None:
    sums = accounts_of(complete_traffic()).sums(ended=True)
    assert (sums.requests, sums.samples, sums.candidates) == (2, 2, 4)
    assert (sums.engagements, sums.folded, sums.corrected, sums.dead_engagements, sums.pending) == (
        3,
        1,
        1,
        1,
        0,
    )
    assert sums.engagements == sums.folded + sums.corrected + sums.dead_engagements + sums.pending
    assert sums.duplicates == 1 and sums.corrections == 1 and sums.predicted == 2
    assert sums.dead_letters == {"no_request": 1, "undecodable": 1, "after_close": 1}
    assert sums.closed_by == {"window": 2} and sums.actions == {"click": 3}
    num_read = accounts_of(complete_traffic()).num_records
    assert num_read == {
        "impressions": 3,
        "engagements": 5,
        "samples": 2,
        "corrections": 1,
        "dead_letters": 3,
        "predictions": 2,
    }
    assert sums.accounted and sums.unread == sums.unknown == 0


def test_the_topics_may_be_read_in_any_order_relative_to_each_other() -> None:
    story = complete_traffic()
    expected = accounts_of(story).sums(ended=True)
    for seed in range(15):
        shuffled = list(story)
        random.Random(seed).shuffle(shuffled)
        accounts = accounts_of(shuffled)
        assert accounts.sums(ended=True) == expected
        assert not accounts.untrained


def reading_orders(story: Sequence[Record], seeds: int = 12) -> list[list[Record]]:
    """The records in several orders: topic after topic, forwards and backwards, and mixed. Each partition
    keeps its order."""
    parts: dict[tuple[str, int], list[Record]] = {}
    for record in story:
        parts.setdefault((record.topic, record.partition), []).append(record)
    orders = [list(itertools.chain(*parts.values())), list(itertools.chain(*reversed(parts.values())))]
    for seed in range(seeds):
        rng, remaining = random.Random(seed), [list(part) for part in parts.values()]
        mixed = []
        while remaining := [part for part in remaining if part]:
            mixed.append(rng.choice(remaining).pop(0))
        orders.append(mixed)
    return orders


def refused_input(kind: str) -> Record:
    """An input record for which the joiner writes a dead letter."""
    valid = engagement("a", 9)
    match kind:
        case "engagement":
            return valid
        case "engagement without an id":
            return engagement("a", 0)
        case "impression":
            return impression("refused")
        case "impression of another key":
            return impression("a")._replace(key=b"another")
        case "garbage":
            return valid._replace(value=b"\xff\xff\xff")
        case "nothing":
            return valid._replace(value=b"")
        case "half a heartbeat":
            return valid._replace(value=b"\x06\x01\xff\xff")
        case _:
            return valid._replace(value=sample("a").value)  # a sample on an event topic


REFUSED = (
    *("engagement", "engagement without an id", "impression", "impression of another key"),
    *("garbage", "nothing", "half a heartbeat", "another type"),
)


@pytest.mark.parametrize(("kind", "reason"), [*zip(REFUSED, itertools.cycle(wire.REASONS))])
def test_a_dead_letter_settles_its_record_in_any_reading_order(kind: str, reason: str) -> None:
    source = refused_input(kind)
    story = [impression("a"), source, engagement("a", 1), sample("a", (1,)), dead(source, reason)]
    expected = accounts_of(story).sums(ended=True)
    assert expected.accounted and expected.pending == expected.pending_requests == expected.unread == 0
    assert expected.dead_letters == {reason: 1}
    assert expected.dead_engagements == (kind == "engagement") and expected.dead_requests == kind.startswith(
        "impression"
    )
    for order in reading_orders(story):
        assert accounts_of(order).sums(ended=True) == expected


@pytest.mark.parametrize("kind", [w for w in REFUSED if w != "half a heartbeat"])
def test_a_lost_event_without_a_dead_letter_is_missed(kind: str) -> None:
    sums = accounts_of([impression("a"), refused_input(kind), sample("a")]).sums(ended=True)
    assert not sums.accounted and sums.pending + sums.pending_requests + sums.unread == 1


def test_a_heartbeat_that_can_not_be_read_needs_no_dead_letter() -> None:
    """Flink drops it, the local engine writes one: either way no event is lost."""
    assert accounts_of([refused_input("half a heartbeat")]).sums(ended=True).accounted
    assert accounts_of([refused_input("half a heartbeat")]).sums().unreadable == {"engagements": 1}


def test_a_dead_letter_of_another_position_settles_nothing() -> None:
    event = engagement("a", 1)
    for wrong in (
        event._replace(offset=event.offset + 1),
        event._replace(partition=0),
        event._replace(topic="impressions"),
    ):
        assert accounts_of([event, dead(wrong, "no_request", 1)]).sums().pending == 1
    nowhere = (
        event._replace(topic="x.engagements"),
        event._replace(partition=1 << 20),
        event._replace(offset=-1),
    )
    assert accounts_of([dead(source, "too_late") for source in nowhere]).sums().unreadable == {
        "dead_letters": 3
    }


def test_dead_letters_of_corrections_are_counted_once_by_reason_and_are_readable() -> None:
    late = sample("a", (1,), wire.CORRECTION)
    story = [impression("a"), engagement("a", 1), sample("a"), late, prediction("a")]
    letters = [dead(late, "bad_shape"), dead(late, "bad_shape")]  # from the archiver and from the trainer
    for order in (story + letters, letters + story):
        sums = accounts_of(order).sums(ended=True)
        assert sums.dead_letters == {"bad_shape": 1} and sums.unreadable == {} and sums.accounted


def test_rejects_of_the_trainer_are_counted_by_reason() -> None:
    valid_sample, garbage = sample("a"), sample("b")._replace(value=b"\x03\x01\xff")
    story = [
        impression("a"),
        valid_sample,
        garbage,
        dead(valid_sample, "non_finite"),
        dead(garbage, "undecodable"),
    ]
    for order in reading_orders(story):
        accounts = accounts_of(order)
        sums = accounts.sums(ended=True)
        assert sums.untrained_by == {"non_finite": 1, "undecodable": 1}
        assert sums.accounted and sums.unread == sums.unpredicted == 0 and not accounts.untrained
    late = accounts_of(
        [impression("a"), valid_sample, garbage, sample("c", close_ms=T0 + 10**9)], settle_ms=1000
    ).sums()
    assert late.unread == 1 and late.overdue == 0, "samples that the trainer has not read yet are not overdue"


def test_unknown_reasons_of_other_versions_do_not_stop_the_audit() -> None:
    message = wire.decode(sample("a", (1, 2)).value)[1]
    assert isinstance(message, pb.Sample)
    message.close_reason = 77  # type: ignore[assignment]
    del message.event_times[:]
    newer_sample = sample("a")._replace(value=wire.encode(wire.SAMPLE, message))
    sums = accounts_of(
        [
            impression("a"),
            engagement("a", 1),
            engagement("a", 2),
            newer_sample,
            dead(newer_sample, "of a newer build"),
        ]
    ).sums()
    assert sums.closed_by == {"other": 1} and sums.folded == 2 and sums.dead_letters == {"other": 1}


@given(
    topic=st.sampled_from(
        ("impressions", "engagements", "samples", "corrections", "dead_letters", "predictions")
    ),
    which=st.integers(0, 15),
    position=st.integers(0, 60),
    value=st.binary(max_size=3),
)
def test_no_content_of_a_record_raises_an_error(topic: str, which: int, position: int, value: bytes) -> None:
    source = (story := complete_traffic())[which]
    position = min(position, len(source.value))
    damaged = source._replace(
        topic=topic, value=source.value[:position] + value + source.value[position + len(value) :]
    )
    assert accounts_of([*story, damaged]).sums().engagements >= 2


def test_accounts_restored_from_a_dump_continue_equally() -> None:
    story = [
        *complete_traffic(),
        impression("open"),
        engagement("open", 40),
        sample("early", (41,)),
        sample("c"),
    ]
    story += [
        refused_input("garbage"),
        sample("d")._replace(value=b""),
        dead(engagement("later", 50), "too_late"),
    ]
    for cut in range(len(story) + 1):
        first, second = accounts_of(story[:cut], horizon_ms=10_000), Accounts(horizon_ms=10_000)
        numbers, arrays = first.dump()
        second.load(json.loads(json.dumps(numbers)), arrays)
        for record in story[cut:]:
            first.add(record)
            second.add(record)
        assert second.sums() == first.sums() and second.dump()[0] == first.dump()[0]
        assert second.untrained == first.untrained


def test_records_older_than_the_audit_are_excluded_on_both_sides() -> None:
    old, new = T0 - 1000, T0
    orphaned = sample("deleted", (7,))
    message = wire.decode(orphaned.value)[1]
    assert isinstance(message, pb.Sample)
    message.header.time_ms, message.event_times[0] = old, old
    story = [
        impression("a", old),
        engagement("a", 1, old),
        orphaned._replace(value=wire.encode(wire.SAMPLE, message)),
    ]
    story += [impression("b", new), engagement("b", 2), sample("b", (2,))]
    accounts = Accounts(since_ms=new)
    for record in story:
        accounts.add(record)
    sums = accounts.sums(ended=True)
    assert sums.accounted and (sums.requests, sums.samples, sums.engagements, sums.since_ms) == (1, 1, 1, new)


def test_memory_is_bounded_by_the_horizon_and_sums_continue() -> None:
    accounts = Accounts(horizon_ms=10_000, settle_ms=1000)
    for n in range(500):
        at = T0 + n * 1000
        for record in story_of(n, at):
            accounts.add(record)
    sums = accounts.sums()
    assert (sums.requests, sums.samples, sums.engagements, sums.folded, sums.predicted) == (
        500,
        500,
        500,
        500,
        500,
    )
    assert sums.accounted and sums.dead_letters == {"too_late": 500}
    assert all(num_remembered(ledger) < 60 for ledger in accounts.ledgers.values())
    for record in story_of(3, T0 + 3000):
        if record.topic not in ("impressions", "engagements"):
            accounts.add(record._replace(offset=record.offset + 10**6))
    after_repetition = accounts.sums()
    assert (
        after_repetition.stale >= 2
        and (after_repetition.samples, after_repetition.folded, after_repetition.unknown) == (500, 500, 0)
        and after_repetition.accounted
    )


def story_of(n: int, at: int) -> list[Record]:
    """The records of one request with a click, an undecodable engagement, and their outcomes."""
    header = pb.Header(request_id=f"r{n}", user_id=5, time_ms=at)
    message = pb.Sample(
        header=header,
        sample_id=sample_id(KEY, f"r{n}"),
        close_ms=at + 100,
        event_ids=[n + 1],
        event_times=[at + 10],
    )
    prediction = pb.Prediction(sample_id=message.sample_id, time_ms=at)
    late = Record("engagements", 0, n, at + 1, KEY, b"\xff")
    return [
        impression(f"r{n}", at),
        engagement(f"r{n}", n + 1, at + 10),
        late,
        Record("samples", 2, n, at + 100, KEY, wire.encode(wire.SAMPLE, message)),
        dead(late, "too_late")._replace(timestamp_ms=at + 150),
        Record("predictions", 0, n, at, KEY, wire.encode(wire.PREDICTION, prediction)),
    ]


@pytest.mark.parametrize(("at", "wrong_ms"), [(0, T0 + 10**9), (2500, 1 << 50)])
def test_a_few_times_from_the_far_future_neither_stop_eviction_nor_hide_losses(
    at: int, wrong_ms: int
) -> None:
    """This holds wherever the wrong times are, also at the first records and when a retry writes them
    again."""
    accounts = Accounts(horizon_ms=10_000, settle_ms=1000)
    wrong = [engagement("far", 10**9, wrong_ms), impression("far", wrong_ms)]
    wrong += [r._replace(offset=next(_offsets)) for r in wrong]
    story = [*itertools.chain(*(story_of(n, T0 + n * 1000) for n in range(500)))]
    lost = [impression("lost", T0 + 100_000), engagement("lost", 10**9 + 1, T0 + 100_000)]
    for record in (
        [*story[:at], *wrong, *story[at:600], *lost, *story[600:]]
        if at < 600
        else [*story[:600], *lost, *story[600:at], *wrong, *story[at:]]
    ):
        accounts.add(record)
    sums = accounts.sums()
    assert all(num_remembered(ledger) < 60 for ledger in accounts.ledgers.values())
    assert (sums.samples, sums.folded, sums.predicted) == (500, 500, 500)
    assert (sums.overdue, sums.late, sums.pending, sums.pending_requests) == (2, 0, 1, 1), (
        "only the lost events are overdue; those from the far future may wait"
    )


def test_lost_events_stay_counted_after_they_are_forgotten() -> None:
    accounts = Accounts(horizon_ms=10_000, settle_ms=1000)
    accounts.add(impression("lost", T0))
    accounts.add(engagement("lost", 10**9, T0))
    for n in range(100):
        for record in story_of(n, T0 + n * 1000):
            accounts.add(record)
    sums = accounts.sums()
    assert (sums.pending, sums.pending_requests, sums.overdue, sums.accounted) == (0, 0, 2, False)


def test_an_outage_of_the_joiner_is_no_loss_however_long_it_lasts() -> None:
    accounts, story = (
        Accounts(horizon_ms=10_000, settle_ms=1000),
        [story_of(n, T0 + n * 1000) for n in range(100)],
    )
    for record in itertools.chain(*story):
        if record.topic in ("impressions", "engagements"):
            accounts.add(record)
    sums = accounts.sums()
    assert sums.accounted and accounts.num_waiting == 300 and 290 < sums.late < 300, (
        "nothing is lost, but most events must count as late"
    )
    for record in itertools.chain(*story):
        if record.topic not in ("impressions", "engagements"):
            accounts.add(record)
    sums = accounts.sums(ended=True)
    assert sums.accounted and (sums.samples, sums.folded, accounts.num_waiting) == (100, 100, 0)


def test_a_lost_event_is_found() -> None:
    for k, record in enumerate(story := complete_traffic()):
        if record.topic in ("samples", "corrections", "dead_letters") and b"after_close" not in record.value:
            sums = accounts_of(story[:k] + story[k + 1 :]).sums(ended=True)
            assert not sums.accounted, record.topic


def test_an_invented_event_is_found() -> None:
    sums = accounts_of([impression("a"), sample("a", (77,))]).sums(ended=True)
    assert sums.unknown == 1 and not sums.accounted


def test_an_event_counts_for_its_first_outcome() -> None:
    e = engagement("a", 1)
    sums = accounts_of(
        [impression("a"), e, dead(e, "too_late", 1), sample("a", (1,), wire.CORRECTION)]
    ).sums()
    assert (sums.corrected, sums.dead_engagements) == (1, 0)
    sums = accounts_of(
        [impression("a"), e, dead(e, "too_late", 1), sample("a", (1,), wire.CORRECTION), sample("a", (1,))]
    ).sums()
    assert (sums.folded, sums.corrected, sums.dead_engagements) == (1, 0, 0)


def test_an_open_request_may_wait_for_a_limited_time() -> None:
    records = [
        impression("a"),
        engagement("a", 1),
        impression("b", T0 + 5000),
        sample("b", close_ms=T0 + 6000),
    ]
    patient, strict = accounts_of(records, settle_ms=7000).sums(), accounts_of(records, settle_ms=1000).sums()
    assert patient.accounted and patient.pending == patient.pending_requests == 1 and patient.late == 0
    assert strict.late == 2
    assert strict.overdue == 2 and not strict.accounted


def test_the_digest_depends_on_the_features_and_not_on_the_order() -> None:
    one, two = sample("a"), sample("b")
    assert accounts_of([one, two]).features_digest == accounts_of([two, one]).features_digest != 0
    message = wire.decode(one.value)[1]
    assert isinstance(message, pb.Sample)
    changed = pb.Sample.FromString(message.SerializeToString())
    changed.ro = b"\x01"
    other = one._replace(value=wire.encode(wire.SAMPLE, changed))
    assert accounts_of([other, two]).features_digest != accounts_of([one, two]).features_digest


def test_a_sample_below_the_manifest_without_a_prediction_is_found() -> None:
    first, second = sample("a"), sample("b")
    accounts = accounts_of([first, second, prediction("a")])
    assert accounts.untrained_below({2: second.offset}) == 0
    assert accounts.untrained_below({2: second.offset + 1}) == 1


def test_a_ledger_drops_settled_ids_and_keeps_pending_ones() -> None:
    ledger = Ledger((FOLDED, DEAD), horizon_ms=1000)
    ledger.mark(1, SEEN, 1)
    ledger.mark(1, FOLDED, 1)
    ledger.mark(2, SEEN, 1)
    for k in range(10):
        ledger.mark(100 + k, SEEN | FOLDED, 600 * k)
        ledger.rotate(600 * k)
    assert ledger.bits(1) == 0 and ledger.bits(2) == SEEN
    assert ledger.counts[FOLDED] == 11
    ledger.mark(2, DEAD, 6000)
    assert ledger.counts[DEAD] == 1 and not ledger.pending


def test_predictions_later_than_the_horizon_still_count() -> None:
    """The samples were settled and dropped long ago, but they still wait for their predictions."""
    accounts, story = (
        Accounts(horizon_ms=10_000, settle_ms=1000),
        [story_of(n, T0 + n * 1000) for n in range(100)],
    )
    for record in itertools.chain(*story):
        if record.topic != "predictions":
            accounts.add(record)
    assert accounts.sums().unpredicted == len(accounts.untrained) == 100
    for _ in range(2):
        for record in itertools.chain(*story):
            if record.topic == "predictions":
                accounts.add(record)
    sums = accounts.sums()
    assert (sums.predicted, sums.unpredicted, accounts.untrained) == (100, 0, {})


def test_the_digest_of_a_known_sample_never_changes() -> None:
    message = pb.Sample(
        sample_id=77, item_ids=[1, 2, 1 << 63], ro=b"ro", parts=[pb.Part(nro=b"nro", num_rows=3)]
    )
    assert features_hash(message) == 2625583684336085169
    record = sample("a")._replace(value=wire.encode(wire.SAMPLE, message))
    assert accounts_of([record, record]).features_digest == features_hash(message)


def test_a_ledger_rotates_early_when_it_holds_too_many_ids() -> None:
    ledger = Ledger((FOLDED,), horizon_ms=10**9, max_ids=50)
    for n in range(1, 1000):
        ledger.mark(n, SEEN | FOLDED, n)
        ledger.rotate(n)
    assert num_remembered(ledger) <= 100 and ledger.counts[FOLDED] == 999
