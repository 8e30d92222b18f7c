"""The Kafka consumer of programs, over a fake client with scripted polls."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import logging
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from roostream.errors import UnavailableError
from roostream.runtime.kafka import clients
from roostream.runtime.kafka.broker import Broker
from roostream.runtime.kafka.consumer import RecordsGoneError
from roostream.runtime.kafka.kafka_consumer import (
    ConsumerOptions,
    EndOffsetPoller,
    KafkaConsumer,
    PartitionEnd,
)
from tests.runtime.fake_consumer import FakeConsumer, FakeMessage, end

P0, P1, P2 = (("samples", n) for n in range(3))
AT0, AT1, AT2 = (("t.samples", n) for n in range(3))
MERGED = ConsumerOptions(partitions=(P0, P1, P2), prefix="t.", merge_by_time=True)
UNORDERED = dataclasses.replace(MERGED, merge_by_time=False)


class FakeAdmin:
    """An admin client. `answer` is what the broker answers: an end offset, an error, or nothing."""

    def __init__(self, answer: int | Exception | None = 7) -> None:
        self.answer = answer

    def __len__(self) -> int:
        """As in the real client: the number of events that wait for a `poll`."""
        return 0

    def list_offsets(self, request: dict[Any, Any], **options: Any) -> dict[Any, Any]:
        futures: dict[Any, concurrent.futures.Future[Any]] = {
            partition: concurrent.futures.Future() for partition in request
        }
        for future in futures.values():
            if isinstance(self.answer, Exception):
                future.set_exception(self.answer)
            elif self.answer is not None:
                future.set_result(SimpleNamespace(offset=self.answer, timestamp=1000))
        return futures


STALE = KafkaException(KafkaError(KafkaError.FENCED_LEADER_EPOCH))


def reader_of(consumer: FakeConsumer, options: ConsumerOptions = MERGED) -> KafkaConsumer:
    reader = KafkaConsumer(consumer, options)
    reader.seek({})
    return reader


def test_every_partition_is_assigned_at_its_offset_or_from_its_oldest_record() -> None:
    consumer = FakeConsumer(oldest=2)
    reader = KafkaConsumer(consumer, MERGED)
    reader.seek({P0: 7, P1: 2})
    assert consumer.assigned == {AT0: 7, AT1: 2, AT2: 2}
    assert reader.positions() == {P0: 7, P1: 2, P2: 2} and reader.num_lost == 0


def test_records_deleted_while_waiting_are_skipped_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    consumer = FakeConsumer(
        [FakeMessage(AT0, 0, 10)], [FakeMessage(AT0, -1, error=clients.AUTO_OFFSET_RESET)], []
    )
    reader = reader_of(consumer, UNORDERED)
    assert len(reader.poll(9, 0)) == 1
    consumer.oldest = 5
    with caplog.at_level(logging.ERROR):
        reader.poll(9, 0)
        reader.poll(9, 0)
    assert reader.num_lost == 4 and consumer.assigned == {AT0: 5, AT1: 0, AT2: 0}
    assert "offset 1 is gone, the partition has 5 to 100" in caplog.text


def test_skipping_waits_for_an_unavailable_broker() -> None:
    consumer = FakeConsumer([FakeMessage(AT0, -1, error=clients.AUTO_OFFSET_RESET)])
    reader = reader_of(consumer)
    reader.poll(9, 0)
    consumer.error_code = clients.TRANSPORT
    assert reader.poll(9, 0) == []
    consumer.error_code, consumer.oldest = None, 3
    reader.poll(9, 0)
    assert consumer.assigned[AT0] == 3 and reader.num_lost == 3


def test_a_log_truncated_during_reading_is_read_from_its_end(caplog: pytest.LogCaptureFixture) -> None:
    consumer = FakeConsumer(
        [FakeMessage(AT0, -1, error=clients.AUTO_OFFSET_RESET)], [], [FakeMessage(AT0, 20, 5)]
    )
    reader = KafkaConsumer(consumer, UNORDERED)
    reader.seek({P0: 50})
    consumer.newest = 20
    with caplog.at_level(logging.ERROR):
        reader.poll(9, 0)
        reader.poll(9, 0)
    assert "offset 50 is gone, the partition has 0 to 20" in caplog.text and reader.num_lost == 30
    assert [r.offset for r in reader.poll(9, 0)] == [20]


def test_an_offset_that_exists_after_all_is_read() -> None:
    consumer = FakeConsumer(
        [FakeMessage(AT0, -1, error=KafkaError.OFFSET_OUT_OF_RANGE)], [], [FakeMessage(AT0, 50, 5)]
    )
    reader = KafkaConsumer(consumer, UNORDERED)
    reader.seek({P0: 50})
    assert [r.offset for _ in range(3) for r in reader.poll(9, 0)] == [50] and reader.num_lost == 0


@pytest.mark.parametrize("code", [clients.AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE])
def test_a_reader_that_may_not_skip_gets_an_error(code: int) -> None:
    consumer = FakeConsumer([FakeMessage(AT1, -1, error=code)])
    reader = reader_of(consumer, dataclasses.replace(MERGED, skip_lost_records=False))
    with pytest.raises(RecordsGoneError, match=r"t\.samples-1 no longer has offset 0"):
        reader.poll(9, 0)
    consumer.oldest = 3
    with pytest.raises(RecordsGoneError, match="no longer has offset 1: it has 3 to 100"):
        reader.seek({P1: 1})
    with pytest.raises(RecordsGoneError, match="no longer has offset 101"):
        reader.seek({P1: 101})
    reader.seek({})
    assert consumer.assigned[AT1] == 3 and reader.num_lost == 0


@pytest.mark.parametrize(
    ("error_code", "advice"),
    [
        (clients.TRANSPORT, "start it or check the address"),
        (KafkaError.UNKNOWN_TOPIC_OR_PART, "create the topics first"),
        (clients.UNKNOWN_PARTITION, "permission"),  # what a client without any permission gets
    ],
)
def test_a_failed_seek_is_reported_and_changes_nothing(error_code: int, advice: str) -> None:
    consumer = FakeConsumer()
    consumer.error_code = error_code
    reader = KafkaConsumer(consumer, MERGED, what="Kafka at k:1")
    with pytest.raises(UnavailableError, match=rf"Kafka at k:1: t\.samples: .*{advice}"):
        reader.seek({P0: 1})
    assert consumer.assigned == {}


def test_a_reader_whose_permission_was_taken_away_says_so(caplog: pytest.LogCaptureFixture) -> None:
    refusal = KafkaError.TOPIC_AUTHORIZATION_FAILED
    assert reader_of(FakeConsumer([FakeMessage(AT1, 0, error=refusal)])).poll(9, 0) == []
    (message,) = [record.getMessage() for record in caplog.records]
    assert "t.samples-1" in message and "permission" in message


class FailingConsumer(FakeConsumer):
    """Fails requests for offsets while `refusals` is not empty. Each failure gives the last partition of the
    request an error; with `fails_whole_request`, the request raises it, as a client does if no partition has
    an answer."""

    def __init__(self, *refusals: int, fails_whole_request: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.refusals, self.fails_whole_request = list(refusals), fails_whole_request

    def offsets_for_times(self, requested: list[Any], timeout: float) -> list[Any]:
        partitions = super().offsets_for_times(requested, timeout)
        if not self.refusals:
            return list(partitions)
        error = KafkaError(self.refusals.pop())
        if self.fails_whole_request:
            raise KafkaException(error)
        return [*partitions[:-1], SimpleNamespace(topic="t.samples", partition=2, offset=-1, error=error)]


def test_a_partition_without_an_answer_in_time_is_unavailable() -> None:
    with pytest.raises(UnavailableError, match=r"t\.samples"):
        KafkaConsumer(FailingConsumer(clients.TRANSPORT), MERGED).end_offsets()


@pytest.mark.parametrize("fails_whole_request", [False, True])
@pytest.mark.parametrize("code", [KafkaError.UNKNOWN_LEADER_EPOCH, KafkaError.NOT_LEADER_FOR_PARTITION])
def test_a_partition_without_a_leader_is_retried(code: int, fails_whole_request: bool) -> None:
    consumer = FailingConsumer(code, code, fails_whole_request=fails_whole_request, oldest=2, newest=9)
    refusals = consumer.refusals
    assert KafkaConsumer(consumer, MERGED).bounds(P0, P2) == {P0: (2, 9), P2: (2, 9)} and not refusals
    assert consumer.num_metadata_refreshes == 2, (
        "the metadata must be refreshed, because a client caches leaders"
    )
    refusals += [code] * 1000
    with pytest.raises(KafkaException, match=KafkaError(code).str()):
        clients.bounds(consumer, [MERGED.topic_partition(P2)], timeout_s=0.3)  # type: ignore[arg-type]
    assert refusals, "the retries must end"


def test_ends_and_bounds_are_fetched_on_request() -> None:
    reader = KafkaConsumer(FakeConsumer(oldest=2, newest=9), MERGED)
    assert reader.end_offsets() == {P0: 9, P1: 9, P2: 9} and reader.bounds(P0) == {P0: (2, 9)}


def test_a_record_that_arrives_within_the_timeout_is_returned() -> None:
    reader = reader_of(FakeConsumer([], [], [FakeMessage(AT0, 0, 10)]), UNORDERED)
    assert [r.timestamp_ms for r in reader.poll(9, 0.5)] == [10]


@pytest.mark.parametrize("track", [True, False])
def test_end_offsets_are_followed_from_the_start_on_request(track: bool) -> None:
    before = threading.enumerate()
    reader = KafkaConsumer.open(
        Broker("127.0.0.1:1"), "g", dataclasses.replace(MERGED, track_end_offsets=track)
    )
    assert [t.name for t in threading.enumerate() if t not in before] == ["kafka-end-offsets"] * track
    reader.close()


def test_silence_of_a_lagging_partition_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("roostream.runtime.kafka.kafka_consumer._WARN_SILENT_S", 0.0)
    caplog.set_level(logging.INFO)
    consumer = FakeConsumer([FakeMessage(AT0, 0, 10)])
    reader = reader_of(consumer, UNORDERED)
    assert len(reader.poll(9, 0)) == 1 and caplog.text == "", "the partition was never silent"
    for _ in range(3):
        reader.poll(9, 0.01)
    assert caplog.text.count("no records of t.samples") == 1 and "arrive again" not in caplog.text
    consumer.add_batch(FakeMessage(AT0, 1, 11))
    for _ in range(2):
        reader.poll(9, 0)
    assert caplog.text.count("records of t.samples arrive again") == 1


def test_a_record_without_a_value_has_an_empty_one() -> None:
    reader = reader_of(FakeConsumer([FakeMessage(AT1, 0, 30, value=None)]), UNORDERED)
    assert reader.poll(9, 0)[0].value == b""


def test_records_fetched_before_a_seek_are_dropped() -> None:
    consumer = FakeConsumer([FakeMessage(AT0, 3, 1), FakeMessage(AT0, 5, 2), FakeMessage(AT0, 5, 2)])
    reader = KafkaConsumer(consumer, UNORDERED)
    reader.seek({P0: 5})
    assert [r.offset for r in reader.poll(9, 0)] == [5]


def test_a_full_buffer_pauses_its_partition() -> None:
    consumer = FakeConsumer([end(AT2), FakeMessage(AT0, 0, 10), FakeMessage(AT0, 1, 11)], [end(AT1)])
    reader = reader_of(consumer, dataclasses.replace(MERGED, max_buffered=2))
    assert reader.poll(9, 0) == [], "partition 1 has neither a record nor an end yet"
    assert consumer.paused == {AT0}
    assert len(reader.poll(9, 0)) == 2 and consumer.paused == set()


def test_a_seek_resumes_a_paused_partition() -> None:
    consumer = FakeConsumer([FakeMessage(AT0, 0, 10), FakeMessage(AT0, 1, 11)])
    reader = reader_of(consumer, dataclasses.replace(MERGED, max_buffered=2))
    reader.poll(9, 0)
    assert consumer.paused == {AT0}
    reader.seek({})
    assert consumer.paused == set()


def test_a_held_partition_is_not_fetched() -> None:
    consumer = FakeConsumer()
    reader = reader_of(consumer)
    reader.pause({P0, P1})
    assert consumer.paused == {AT0, AT1}
    reader.pause({P1})
    assert consumer.paused == {AT1}
    reader.seek({})
    assert consumer.paused == {AT1}, "a seek must not end a hold"


def test_transaction_markers_do_not_count_as_lag() -> None:
    ends = EndOffsetPoller(FakeAdmin, MERGED)
    reader = KafkaConsumer(
        FakeConsumer([FakeMessage(AT0, 0, 10), end(AT0, 2), end(AT1), end(AT2)]), MERGED, ends
    )
    reader.seek({})
    assert reader.lag() == {}
    reader.poll(9, 0)
    ends.update({P0: PartitionEnd(2, 4, 10)})
    lag = reader.lag()[P0]
    assert (lag.records, lag.high_watermark, lag.position_ms, lag.newest_ms) == (0, 4, 10, 10)
    assert reader.positions()[P0] == 1


def test_a_lag_becomes_unknown_without_news_from_the_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = EndOffsetPoller(FakeAdmin, MERGED)
    reader = KafkaConsumer(
        FakeConsumer([FakeMessage(AT0, 0, 10), end(AT0, 1), end(AT1), end(AT2)]), MERGED, ends
    )
    ends.update({P0: PartitionEnd(1, 1, 10)})
    assert reader.lag()[P0].stable_end == 1
    monkeypatch.setattr("roostream.runtime.kafka.kafka_consumer._END_OFFSETS_VALID_S", 0.0)
    assert reader.lag() == {}, "the broker has not answered since"


def test_an_unavailable_broker_is_awaited() -> None:
    consumer = FakeConsumer([FakeMessage(AT0, 0, error=clients.TRANSPORT)], [FakeMessage(AT0, 0, 10)])
    reader = reader_of(consumer, UNORDERED)
    assert reader.poll(9, 0) == []
    assert len(reader.poll(9, 0)) == 1


def stalled_reader(
    monkeypatch: pytest.MonkeyPatch,
    stalled: FakeConsumer,
    other: FakeConsumer,
    ends: EndOffsetPoller | None = None,
) -> KafkaConsumer:
    """A reader whose client `stalled` would be replaced by `other`. Every poll is a check."""
    monkeypatch.setattr("roostream.runtime.kafka.kafka_consumer._STALLED_S", 0.0)
    reader = KafkaConsumer(stalled, UNORDERED, ends, reopen=lambda: other)
    reader.seek({P0: 5, P1: 5, P2: 5})
    return reader


def test_a_client_that_does_not_deliver_what_the_broker_has_is_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As librdkafka after a restart of the broker: no record, no end, no error."""
    stalled = FakeConsumer([FakeMessage(AT0, 5, 10), end(AT1, 9), end(AT2, 9)], newest=9)
    other = FakeConsumer([FakeMessage(AT0, 6, 20), FakeMessage(AT1, 9, 20)], newest=10)
    reader = stalled_reader(monkeypatch, stalled, other)
    assert [r.offset for r in reader.poll(9, 0)] == [5]
    assert reader.poll(9, 0) == []
    assert stalled.closed and other.assigned == {AT0: 6, AT1: 9, AT2: 9}
    assert "records of t.samples-0 do not arrive" in caplog.text
    assert [r.offset for r in reader.poll(9, 0)] == [6, 9]


def test_a_client_whose_ends_another_one_asks_for_is_replaced_too(monkeypatch: pytest.MonkeyPatch) -> None:
    stalled, ends = FakeConsumer(newest=9), EndOffsetPoller(FakeAdmin, UNORDERED)
    reader = stalled_reader(monkeypatch, stalled, FakeConsumer([FakeMessage(AT0, 5, 20)]), ends)
    stalled.error_code = clients.TRANSPORT
    ends.update({p: PartitionEnd(5, 5, 0) for p in (P0, P1, P2)})
    for _ in range(3):
        assert reader.poll(9, 0) == []
    ends.update({P0: PartitionEnd(6, 6, 20)})
    reader.poll(9, 0)
    reader.poll(9, 0)
    assert stalled.closed and [r.offset for r in reader.poll(9, 0)] == [5]


def test_a_client_at_the_end_or_paused_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    consumer = FakeConsumer([end(AT1, 9), end(AT2, 9)], newest=9)
    reader = stalled_reader(monkeypatch, consumer, FakeConsumer())
    reader.pause({P0})
    for _ in range(5):
        reader.poll(9, 0)
    assert not consumer.closed


@pytest.mark.parametrize("asks", ["seek", "poll"])
def test_a_client_that_cannot_reach_the_broker_is_replaced(
    monkeypatch: pytest.MonkeyPatch, asks: str
) -> None:
    """As librdkafka after all of its connections were lost: it connects to no broker again."""
    lost, other = FakeConsumer(newest=9), FakeConsumer([FakeMessage(AT0, 5, 20)], newest=9)
    reader = stalled_reader(monkeypatch, lost, other)
    lost.error_code = clients.TRANSPORT
    if asks == "seek":
        with pytest.raises(UnavailableError):
            reader.seek({P0: 7, P1: 7, P2: 7})
    else:
        assert reader.poll(9, 0) == []
    assert lost.closed and other.assigned == {AT0: 5, AT1: 5, AT2: 5}, "as before, since nothing was sought"
    assert [r.offset for r in reader.poll(9, 0)] == [5]


def test_opening_does_not_connect_and_closing_is_idempotent() -> None:
    reader = KafkaConsumer.open(
        Broker("127.0.0.1:1"), "g", dataclasses.replace(MERGED, track_end_offsets=True)
    )
    reader.close()
    reader.close()
    assert reader.lag() == {}
    consumer = FakeConsumer([])
    reader = reader_of(consumer)
    reader.close()
    reader.close()
    assert consumer.closed


def test_a_bound_before_a_transaction_marker_is_reached() -> None:
    consumer = FakeConsumer([FakeMessage(AT0, 0, 10), FakeMessage(AT0, 1, 20)], [end(AT0, 3)], [])
    reader = KafkaConsumer(consumer, dataclasses.replace(MERGED, partitions=(P0,)))
    reader.seek({})
    reader.set_limits({P0: 3})
    assert [r.offset for r in reader.poll(9, 0)] == [0, 1]
    assert reader.has_more(P0) is None, "offset 2 may hold a record or a marker"
    assert reader.poll(9, 0) == []
    assert reader.has_more(P0) is False and reader.positions() == {P0: 2}


@pytest.mark.parametrize(
    "answer", [STALE, None, ValueError("a defect")], ids=["stale leader epoch", "no answer", "a defect"]
)
def test_end_offsets_are_known_again_after_a_client_failed(
    answer: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a restart of the broker a client keeps failing, because it has cached the partitions' leaders.
    While its certificate is replaced, no new client can be made."""

    def open_admin() -> Any:
        admin = next(admins_to_open)
        if isinstance(admin, UnavailableError):
            raise admin
        return admin

    monkeypatch.setattr("roostream.runtime.kafka.kafka_consumer._ANSWER_TIMEOUT_S", 0.01)
    monkeypatch.setattr("roostream.runtime.kafka.kafka_consumer._END_OFFSETS_EVERY_S", 0.01)
    opened = [FakeAdmin(answer), FakeAdmin(answer), FakeAdmin()]
    admins_to_open = iter([opened[0], UnavailableError("key values mismatch"), *opened[1:]])
    ends = EndOffsetPoller(open_admin, MERGED)
    ends.start()
    until_s = time.monotonic() + 5
    while not ends.ends and time.monotonic() < until_s:
        time.sleep(0.01)
    assert ends.ends == {p: PartitionEnd(7, 7, 1000, 7) for p in MERGED.partitions}
    opened[-1].answer = 8
    while ends.ends[P0].last_stable != 8 and time.monotonic() < until_s:
        time.sleep(0.01)
    ends.stop()
    assert ends.ends[P0].last_stable == 8, "a working client must be kept"


def test_a_consumer_that_cannot_be_opened_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A restore repeats it until Kafka's certificate is in order again."""

    def refuse(*_: object, **__: object) -> None:
        raise UnavailableError("key values mismatch")

    monkeypatch.setattr(clients, "consumer", refuse)
    monkeypatch.setattr(clients, "admin", refuse)
    before = threading.active_count()
    for _ in range(3):
        with pytest.raises(UnavailableError):
            KafkaConsumer.open(Broker("k:1"), "g", dataclasses.replace(MERGED, track_end_offsets=True))
    assert threading.active_count() == before


def test_a_log_cut_off_below_the_offset_is_read_again_from_the_cut(caplog: pytest.LogCaptureFixture) -> None:
    """The broker lost offsets 6 to 9 and gave them to other records before the consumer noticed."""
    consumer = FakeConsumer([FakeMessage(AT0, n, n, epoch=2) for n in range(10)])
    reader = reader_of(consumer, UNORDERED)
    assert len(reader.poll(8, 0)) == 8 and reader.leader_epochs({P0: 8, P1: 3}) == {P0: 2}
    consumer.add_batch(FakeMessage(AT0, -1, error=truncation(6)))
    consumer.add_batch()
    consumer.add_batch(*(FakeMessage(AT0, n, 100 + n, epoch=4) for n in (6, 7)))
    with caplog.at_level(logging.ERROR):
        records = [r for _ in range(6) for r in reader.poll(9, 0)]
    assert [r.timestamp_ms for r in records] == [8, 9, 106, 107]
    assert consumer.assigned[AT0] == 6 and reader.num_lost == 4 and reader.positions()[P0] == 8
    assert "offset 10 is gone, the partition has 0 to 6" in caplog.text and "uncleanly" in caplog.text
    assert reader.leader_epochs({P0: 6}) == {P0: 2} and reader.leader_epochs({P0: 8}) == {P0: 4}


def test_a_restart_also_notices_that_offsets_were_used_again() -> None:
    consumer = FakeConsumer([FakeMessage(AT0, -1, error=truncation(6))], [])
    reader = KafkaConsumer(consumer, UNORDERED)
    reader.seek({P0: 10, P1: 4}, {P0: 2})
    assert consumer.assigned == {AT0: 10, AT1: 4, AT2: 0} and consumer.leader_epochs == {AT0: 2}
    reader.poll(9, 0)
    reader.poll(9, 0)
    assert consumer.assigned[AT0] == 6 and reader.num_lost == 4 and reader.positions()[P0] == 6
    assert consumer.leader_epochs == {}, "the epoch of the record before the cut is not known"


def truncation(end: int) -> KafkaError:
    return KafkaError(
        clients.AUTO_OFFSET_RESET,
        f"Partition log truncation detected at offset 10 (leader epoch 2): broker end offset is {end} "
        "(offset leader epoch 2). Reset to INVALID.",
    )
