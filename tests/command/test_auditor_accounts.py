"""G1's sums on hand-made topics: whatever is lost, invented or doubled must show."""

from __future__ import annotations

import itertools
import random

from command.accounts import DEAD, FOLDED, SEEN, Accounts, Ledger
from roo import roo_pb2 as pb
from roo import wire
from roo.ids import key_bytes, sample_id
from roo.wire import Record

T0 = 1_700_000_000_000
KEY = key_bytes(5, 0, "")
_offsets = itertools.count()


def impression(request: str, time_ms: int = T0) -> Record:
    header = pb.Header(request_id=request, user_id=5, time_ms=time_ms)
    value = wire.encode(wire.IMPRESSION, pb.Impression(header=header, item_ids=[1, 2]))
    return Record("impressions", 0, next(_offsets), time_ms, KEY, value)


def engagement(request: str, event: int, time_ms: int = T0 + 10, action: str = "click") -> Record:
    header = pb.Header(request_id=request, user_id=5, time_ms=time_ms)
    value = wire.encode(wire.ENGAGEMENT, pb.Engagement(header=header, event_id=event, item_id=1, action=action))
    return Record("engagements", 1, next(_offsets), time_ms, KEY, value)


def sample(request: str, events: tuple[int, ...] = (), kind: int = wire.SAMPLE, close_ms: int = T0 + 100) -> Record:
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
        "samples" if kind == wire.SAMPLE else "corrections", 2, next(_offsets), close_ms, KEY, wire.encode(kind, message)
    )


def dead(source: Record, reason: str, event: int = 0) -> Record:
    message = pb.DeadLetter(reason=reason, topic=source.topic, partition=source.partition, offset=source.offset, event_id=event)
    return Record("dead_letters", 0, next(_offsets), T0 + 200, None, wire.encode(wire.DEAD_LETTER, message))


def prediction(request: str) -> Record:
    value = wire.encode(wire.PREDICTION, pb.Prediction(sample_id=sample_id(KEY, request), time_ms=T0))
    return Record("predictions", 0, next(_offsets), T0, KEY, value)


def accounts_of(records: list[Record], **settings: int) -> Accounts:
    accounts = Accounts(**settings)  # type: ignore[arg-type]
    for record in records:
        accounts.add(record)
    return accounts


def whole_story() -> list[Record]:
    """Two requests; events: 1 folded, 2 corrected (late), 3 dead (its request never came), 1 sent twice, one of rubbish."""
    a, b, late = impression("a"), impression("b"), impression("a", T0 + 500)
    orphan = engagement("nowhere", 3)
    rubbish = Record("engagements", 3, next(_offsets), T0, KEY, b"\xff\xff\xff")
    return [
        *(a, b, late, orphan, rubbish),
        *(engagement("a", 1), engagement("a", 1), engagement("b", 2)),
        *(sample("a", (1,)), sample("b"), sample("b", (2,), wire.CORRECTION)),
        *(dead(orphan, "no_request", 3), dead(rubbish, "undecodable"), dead(late, "after_close")),
        *(prediction("a"), prediction("b")),
    ]


def test_every_event_ends_in_one_place() -> None:
    sums = accounts_of(whole_story()).sums(ended=True)
    assert (sums.requests, sums.samples, sums.candidates) == (2, 2, 4)
    assert (sums.engagements, sums.folded, sums.corrected, sums.dead_engagements, sums.pending) == (3, 1, 1, 1, 0)
    assert sums.engagements == sums.folded + sums.corrected + sums.dead_engagements + sums.pending
    assert sums.duplicates == 1 and sums.corrections == 1 and sums.predicted == 2
    assert sums.dead_letters == {"no_request": 1, "undecodable": 1, "after_close": 1}
    assert sums.closed_by == {"window": 2} and sums.actions == {"click": 3}
    assert sums.accounted and sums.unread == sums.unknown == 0


def test_the_topics_may_be_read_in_any_order_relative_to_each_other() -> None:
    story = whole_story()
    expected = accounts_of(story).sums(ended=True)
    for seed in range(40):
        shuffled = list(story)
        random.Random(seed).shuffle(shuffled)
        accounts = accounts_of(shuffled)
        assert accounts.sums(ended=True) == expected
        assert not accounts.untrained


def test_what_is_emitted_again_counts_once() -> None:
    story = whole_story()
    again = [r._replace(offset=next(_offsets)) for r in story if r.topic not in ("impressions", "engagements")]
    accounts = accounts_of([*story, *again])
    assert accounts.sums(ended=True) == accounts_of(story).sums(ended=True)
    assert accounts.features_digest == accounts_of(story).features_digest


def test_a_lost_event_is_found() -> None:
    for k, record in enumerate(story := whole_story()):
        if record.topic in ("samples", "corrections", "dead_letters") and b"after_close" not in record.value:
            sums = accounts_of(story[:k] + story[k + 1 :]).sums(ended=True)
            assert not sums.accounted, record.topic


def test_an_invented_event_is_found() -> None:
    sums = accounts_of([impression("a"), sample("a", (77,))]).sums(ended=True)
    assert sums.unknown == 1 and not sums.accounted


def test_folded_comes_before_corrected_before_dead() -> None:
    e = engagement("a", 1)
    sums = accounts_of([impression("a"), e, dead(e, "too_late", 1), sample("a", (1,), wire.CORRECTION)]).sums()
    assert (sums.corrected, sums.dead_engagements) == (1, 0)
    sums = accounts_of([impression("a"), e, dead(e, "too_late", 1), sample("a", (1,), wire.CORRECTION), sample("a", (1,))]).sums()
    assert (sums.folded, sums.corrected, sums.dead_engagements) == (1, 0, 0)


def test_an_open_request_may_wait_but_not_for_ever() -> None:
    records = [impression("a"), engagement("a", 1), impression("b", T0 + 5000), sample("b", close_ms=T0 + 6000)]
    patient, strict = accounts_of(records, settle_ms=7000).sums(), accounts_of(records, settle_ms=1000).sums()
    assert patient.accounted and patient.pending == patient.pending_requests == 1
    assert strict.overdue == 2 and not strict.accounted


def test_the_digest_follows_every_byte_of_the_features_and_no_order() -> None:
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


def test_a_ledger_forgets_the_settled_and_keeps_the_waiting() -> None:
    ledger = Ledger((FOLDED, DEAD), horizon_ms=1000)
    ledger.mark(1, SEEN, 1)
    ledger.mark(1, FOLDED, 1)
    ledger.mark(2, SEEN, 1)
    for k in range(10):
        ledger.mark(100 + k, SEEN | FOLDED, 600 * k)
    assert ledger.bits(1) == 0 and ledger.bits(2) == SEEN
    assert ledger.counts[FOLDED] == 11
    ledger.mark(2, DEAD, 6000)
    assert ledger.counts[DEAD] == 1 and not ledger.pending
