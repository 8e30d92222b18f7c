"""The sender from the feature log to Kafka: at-least-once delivery in order, and no record blocks later
ones."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roostream.runtime.backoff import Backoff
from roostream.runtime.clock import FakeClock
from roostream.runtime.kafka.clients import ProducerFailedError
from serving.feature_log import sender as log_sender
from serving.feature_log.format import LogRecord
from serving.feature_log.log import FeatureLog
from serving.feature_log.sender import LogSender, Outcome
from serving.heartbeat import InflightWatermark
from tests.serving.serving_fakes import FakeSink


def record(i: int) -> LogRecord:
    return LogRecord("impressions", -1, i, b"userkey!", bytes([i]))


@pytest.fixture
def feature_log(tmp_path: Path) -> Iterator[FeatureLog]:
    log = FeatureLog.open(tmp_path / "log", segment_bytes=4096, max_bytes=1 << 20)
    yield log
    log.close()


def make_sender(log: FeatureLog, sinks: list[FakeSink]) -> LogSender:
    return LogSender(log, lambda: sinks.pop(0), Backoff(what="Kafka", clock=FakeClock()))


def test_records_are_delivered_in_order_and_the_cursor_follows(feature_log: FeatureLog) -> None:
    delivered: list[LogRecord] = []
    sender = make_sender(feature_log, [FakeSink(delivered)])
    for i in range(200):
        feature_log.append(record(i))
    assert not sender.idle
    sender.step()
    assert sender.idle and delivered == [record(i) for i in range(200)]
    assert feature_log.cursor == feature_log.end and sender.num_sent == 200
    assert len(list(feature_log.directory.glob("*.seg"))) == 1


def test_the_cursor_stays_behind_the_first_record_that_is_not_acknowledged(feature_log: FeatureLog) -> None:
    delivered: list[LogRecord] = []
    sink = FakeSink(delivered, lambda r: None if r.timestamp_ms == 3 else "delivered")
    sender = make_sender(feature_log, [sink])
    for i in range(10):
        feature_log.append(record(i))
    sender.step()
    assert feature_log.cursor.sequence == 3 and len(delivered) == 9
    sink.plan = lambda _: "delivered"
    sender.step()
    assert feature_log.cursor.sequence == 10


def test_a_failed_delivery_repeats_all_records_after_the_cursor(feature_log: FeatureLog) -> None:
    delivered: list[LogRecord] = []
    failing = FakeSink(delivered, lambda r: "failed" if r.timestamp_ms == 3 else "delivered")
    sender = make_sender(feature_log, [failing, FakeSink(delivered)])
    for i in range(6):
        feature_log.append(record(i))
    sender.step()
    assert failing.closed and feature_log.cursor.sequence == 3
    sender.step()
    assert sender.idle
    assert [r.timestamp_ms for r in delivered] == [0, 1, 2, 4, 5, 3, 4, 5], (
        "records 4 and 5 are sent twice: delivery is at least once"
    )


def test_records_that_a_replaced_producer_drops_do_not_count_as_failures_of_the_next_one(
    feature_log: FeatureLog,
) -> None:
    delivered: list[LogRecord] = []
    outcomes: dict[int, Outcome | None] = {0: "failed", 1: None}  # record 1 is in flight
    failing = FakeSink(delivered, lambda r: outcomes[r.timestamp_ms])
    slow = FakeSink(delivered, lambda _: None)
    sender = make_sender(feature_log, [failing, slow])
    for i in range(2):
        feature_log.append(record(i))
    sender.step()
    assert failing.closed
    sender.step()
    assert not slow.closed, "it has not failed; Kafka is slow"
    slow.plan = lambda _: "delivered"
    sender.step()
    assert sender.idle


@pytest.mark.parametrize("method", ["send", "poll"])
def test_a_producer_that_failed_is_replaced_and_all_records_after_the_cursor_are_sent_again(
    feature_log: FeatureLog, method: str
) -> None:
    delivered: list[LogRecord] = []
    failing = FakeSink(delivered, lambda r: "delivered" if r.timestamp_ms < 3 else None)
    sender = make_sender(feature_log, [failing, FakeSink(delivered)])
    for i in range(6):
        feature_log.append(record(i))
    sender.step()
    assert feature_log.cursor.sequence == 3

    def fail(*_: object) -> None:
        raise ProducerFailedError("a fault of the test")

    setattr(failing, method, fail)
    feature_log.append(record(6))
    sender.step()
    assert failing.closed and feature_log.cursor.sequence == 3
    sender.step()
    assert sender.idle and [r.timestamp_ms for r in delivered] == [0, 1, 2, 3, 4, 5, 6]


def test_a_record_that_kafka_rejects_is_counted_and_skipped_alone(
    feature_log: FeatureLog, caplog: pytest.LogCaptureFixture
) -> None:
    delivered: list[LogRecord] = []
    sinks = [
        FakeSink(delivered, lambda r: "refused" if r.timestamp_ms in (2, 4) else "delivered")
        for _ in range(4)
    ]
    sender = make_sender(feature_log, sinks)
    for i in range(6):
        feature_log.append(record(i))
    for _ in range(12):
        sender.step()
    feature_log.append(record(6))
    sender.step()
    assert [r.timestamp_ms for r in delivered] == [0, 1, 3, 5, 6], (
        "other records of a refused batch are delivered"
    )
    assert sender.num_refused == 2 and sender.idle
    assert "record 2 of the feature log" in caplog.text


@pytest.mark.parametrize(
    ("age_ms", "is_skipped"), [(0, False), (600_000, False), (600_001, True), (-1, True)]
)
def test_records_of_the_last_minutes_wait_for_a_broker_whose_clock_is_behind(
    feature_log: FeatureLog, age_ms: int, is_skipped: bool
) -> None:
    delivered: list[LogRecord] = []
    clock, is_behind = FakeClock(), True

    def plan(_: LogRecord) -> Outcome:
        return "refused_time" if is_behind else "delivered"

    backoff = Backoff(what="Kafka", first_s=0.0, max_s=0.0, clock=clock)
    sender = LogSender(feature_log, lambda: FakeSink(delivered, plan), backoff)
    records = [
        LogRecord("impressions", -1, clock.now_ms() - age_ms, b"userkey!", b"%d" % n) for n in range(3)
    ]
    for record in records:
        feature_log.append(record)
    for _ in range(12):
        sender.step()
    assert sender.num_refused == (3 if is_skipped else 0)
    is_behind = False
    for _ in range(12):
        sender.step()
    assert delivered == ([] if is_skipped else records) and sender.idle


def test_a_record_from_the_future_does_not_hold_up_those_of_its_batch(feature_log: FeatureLog) -> None:
    delivered: list[LogRecord] = []
    clock = FakeClock()
    good, wrong = (
        LogRecord("impressions", -1, clock.now_ms() + ahead_ms, b"userkey!", b"v")
        for ahead_ms in (0, 86_400_000)
    )

    class Batches(FakeSink):
        """Refuses all that is queued if one record is from the future, as a broker does."""

        def poll(self, timeout_s: float) -> None:
            is_refused = any(record == wrong for record, _ in self.queue)
            self.plan = lambda _: "refused_time" if is_refused else "delivered"
            super().poll(timeout_s)

    watermark = InflightWatermark(clock)
    clock.jump(86_400_000)
    watermark.close(watermark.open())
    clock.jump(-86_400_000)
    backoff = Backoff(what="Kafka", clock=clock)
    sender = LogSender(
        feature_log, lambda: Batches(delivered), backoff, on_future_time=watermark.follow_clock
    )
    for record in (good, wrong, good):
        feature_log.append(record)
    for _ in range(12):
        sender.step()
    assert delivered == [good, good] and sender.num_refused == 1 and sender.idle
    assert watermark.open() == clock.now_ms(), "the clock was ahead, so later events have its time now"


def test_a_record_in_flight_is_not_skipped_when_kafka_rejects_a_later_one(feature_log: FeatureLog) -> None:
    delivered: list[LogRecord] = []
    is_slow = True

    def plan(record: LogRecord) -> Outcome | None:
        if record.timestamp_ms == 2 and is_slow:
            return None
        return "refused" if record.timestamp_ms in (1, 3) else "delivered"

    sender = make_sender(feature_log, [FakeSink(delivered, plan) for _ in range(5)])
    for i in range(3):
        feature_log.append(record(i))
    for _ in range(6):
        sender.step()
    feature_log.append(record(3))
    for _ in range(6):
        sender.step()
    is_slow = False
    for _ in range(12):
        sender.step()
    assert [r.timestamp_ms for r in delivered] == [0, 2], "only the rejected records are skipped"
    assert sender.num_refused == 2 and sender.idle


def test_a_restart_continues_at_the_cursor(tmp_path: Path) -> None:
    delivered: list[LogRecord] = []
    log = FeatureLog.open(tmp_path, segment_bytes=4096, max_bytes=1 << 20)
    sender = make_sender(log, [FakeSink(delivered, lambda r: None if r.timestamp_ms >= 5 else "delivered")])
    for i in range(10):
        log.append(record(i))
    sender.step()
    log.close()
    again = FeatureLog.open(tmp_path, segment_bytes=4096, max_bytes=1 << 20)
    sender = make_sender(again, [FakeSink(delivered)])
    sender.step()
    assert [r.timestamp_ms for r in delivered] == list(range(10))
    again.close()


def test_records_wait_on_disk_while_kafka_is_unavailable(
    feature_log: FeatureLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_sender, "MAX_PENDING_RECORDS", 20)
    monkeypatch.setattr(log_sender, "READ_BYTES", 500)
    sink = FakeSink([], lambda _: None)
    sender = make_sender(feature_log, [sink])
    for i in range(200):
        feature_log.append(record(i))
    for _ in range(50):
        sender.step()
    assert 20 <= len(sink.queue) <= 30
    sink.plan = lambda _: "delivered"
    for _ in range(50):
        sender.step()
    assert sender.idle


def test_draining_stops_at_its_timeout_and_reports_the_rest(feature_log: FeatureLog) -> None:
    clock = FakeClock()
    sink = FakeSink([], lambda _: clock.advance(0.1))
    sender = make_sender(feature_log, [sink])
    feature_log.append(record(1))
    assert sender.drain(2.0, clock.monotonic_s) == 1
    sink.plan = lambda _: "delivered"
    assert sender.drain(2.0, clock.monotonic_s) == 0
    sender.close()
    assert sink.closed


def test_draining_survives_an_outage_that_is_shorter_than_its_timeout(feature_log: FeatureLog) -> None:
    clock = FakeClock()
    end_of_outage_s = clock.monotonic_s() + 60

    def unavailable_for_a_minute(_: LogRecord) -> Outcome | None:
        clock.advance(0.1)
        return "delivered" if clock.monotonic_s() >= end_of_outage_s else None

    delivered: list[LogRecord] = []
    sender = make_sender(feature_log, [FakeSink(delivered, unavailable_for_a_minute)])
    for i in range(5):
        feature_log.append(record(i))
    assert sender.drain(100.0, clock.monotonic_s) == 0
    assert sorted(delivered) == [record(i) for i in range(5)]


def test_draining_tries_again_after_failures_of_kafka(feature_log: FeatureLog) -> None:
    clock = FakeClock()
    delivered: list[LogRecord] = []

    def failing(_: LogRecord) -> Outcome | None:
        clock.advance(3.0)
        return "failed"

    sender = make_sender(feature_log, [*(FakeSink([], failing) for _ in range(9)), FakeSink(delivered)])
    feature_log.append(record(1))
    assert sender.drain(100.0, clock.monotonic_s) == 0 and delivered == [record(1)]


def test_draining_does_not_wait_for_heartbeats_alone(feature_log: FeatureLog) -> None:
    clock = FakeClock()
    begin_s = clock.monotonic_s()
    sender = make_sender(feature_log, [FakeSink([], lambda _: clock.advance(0.1))])
    for partition in range(3):
        feature_log.append(LogRecord("impressions", partition, 1, b"", b"heartbeat"))
    assert sender.drain(100.0, clock.monotonic_s) == 0
    assert clock.monotonic_s() - begin_s <= log_sender.STUCK_S + 1.0
    assert feature_log.backlog_records == 3, "the next start sends them"


def test_the_sender_thread_stops_while_kafka_is_unavailable(feature_log: FeatureLog) -> None:
    stop = threading.Event()
    sender = LogSender(
        feature_log, lambda: FakeSink([], lambda _: "failed"), Backoff(what="Kafka", first_s=0.01)
    )
    thread = threading.Thread(target=sender.run, args=(stop,))
    feature_log.append(record(1))
    thread.start()
    stop.set()
    thread.join(5)
    assert not thread.is_alive()


possible_outcomes = st.sampled_from(["delivered", "delivered", "failed", "refused", None])


@settings(max_examples=60)
@given(st.lists(st.lists(possible_outcomes, min_size=3, max_size=3), min_size=1, max_size=12))
def test_every_record_is_delivered_or_counted_as_rejected(
    tmp_path_factory: pytest.TempPathFactory, plans: list[list[Outcome | None]]
) -> None:
    """Each record has a list of outcomes, one per attempt; after that, it is delivered."""
    log = FeatureLog.open(tmp_path_factory.mktemp("log"), segment_bytes=4096, max_bytes=1 << 20)
    for i in range(len(plans)):
        log.append(record(i))
    attempts = [0] * len(plans)

    def plan(r: LogRecord) -> Outcome | None:
        attempt = attempts[r.timestamp_ms]
        attempts[r.timestamp_ms] += 1
        outcomes = plans[r.timestamp_ms]
        return outcomes[attempt] if attempt < len(outcomes) else "delivered"

    delivered: list[LogRecord] = []
    sender = LogSender(log, lambda: FakeSink(delivered, plan), Backoff(what="Kafka", clock=FakeClock()))
    for _ in range(400):
        sender.step()
        if sender.idle:
            break
    assert sender.idle
    missing = set(range(len(plans))) - {r.timestamp_ms for r in delivered}
    assert len(missing) <= sender.num_refused
    log.close()
