"""Heartbeats of serving: their event time is never later than that of a request that is still open."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from roostream.runtime.clock import FakeClock
from roostream.wire import records as wire
from serving import heartbeat
from serving.build import producer_name
from serving.feature_log.format import LogRecord
from serving.feature_log.log import FeatureLog
from serving.heartbeat import InflightWatermark

NOW_MS = 1_700_000_000_000


@pytest.fixture
def feature_log(tmp_path: Path) -> Iterator[FeatureLog]:
    log = FeatureLog.open(tmp_path / "log", segment_bytes=4096, max_bytes=8192)
    yield log
    log.close()


def logged_records(log: FeatureLog) -> list[LogRecord]:
    return [e.record for e in log.read(log.cursor, 1 << 20) if e.record is not None]


def test_the_producer_name_survives_a_restart(tmp_path: Path) -> None:
    name = producer_name(tmp_path / "a")
    assert name == producer_name(tmp_path / "b" / ".." / "a") != producer_name(tmp_path / "b")


def test_every_partition_of_both_event_topics_gets_a_heartbeat(feature_log: FeatureLog) -> None:
    clock = FakeClock(5000)
    heartbeat.beat(feature_log, InflightWatermark(clock), "serving-1", 4)
    records = logged_records(feature_log)
    assert [(r.topic, r.partition) for r in records] == [
        *(("impressions", p) for p in range(4)),
        *(("engagements", p) for p in range(4)),
    ]
    kind, message = wire.decode(records[0].value)
    assert kind == wire.HEARTBEAT and records[0].timestamp_ms == 5000 and records[0].key == b""
    assert message.time_ms == 5000 and message.producer == "serving-1"  # type: ignore[attr-defined]


def test_a_heartbeat_is_not_newer_than_the_oldest_open_request(feature_log: FeatureLog) -> None:
    clock = FakeClock(5000)
    watermark = InflightWatermark(clock)
    first = watermark.open()
    clock.advance(0.5)
    second = watermark.open()
    assert (first, second) == (5000, 5500)
    clock.advance(0.5)
    assert watermark.horizon_ms() == 5000
    watermark.close(first)
    assert watermark.horizon_ms() == 5500
    watermark.close(second)
    assert watermark.horizon_ms() == 6000


def test_a_clock_that_goes_back_repeats_the_last_time(feature_log: FeatureLog) -> None:
    clock = FakeClock(5000)
    watermark = InflightWatermark(clock)
    watermark.close(watermark.open())
    clock.jump(-3000)
    stamp = watermark.open()
    assert stamp == 5000 and watermark.horizon_ms() == 5000
    watermark.close(stamp)
    assert watermark.horizon_ms() == 5000


def test_a_clock_that_was_ahead_is_followed_back_once_kafka_refuses_its_time(feature_log: FeatureLog) -> None:
    clock = FakeClock(NOW_MS)
    watermark = InflightWatermark(clock)
    clock.jump(86_400_000)
    ahead = watermark.open()
    clock.jump(-86_400_000)
    watermark.follow_clock()
    stamp = watermark.open()
    assert stamp == NOW_MS
    watermark.close(stamp)
    assert watermark.horizon_ms() == NOW_MS, "a request that is open since then does not move event time"
    watermark.close(ahead)
    assert watermark.horizon_ms() == NOW_MS


def test_a_full_log_pauses_heartbeats_and_is_logged_once(
    feature_log: FeatureLog, caplog: pytest.LogCaptureFixture
) -> None:
    class LimitedClock(FakeClock):
        """A fake clock that stops the loop after some rounds."""

        rounds_left = 40

        def sleep(self, seconds: float, stop: threading.Event | None = None) -> bool:
            self.rounds_left -= 1
            if not self.rounds_left and stop is not None:
                stop.set()
            return super().sleep(seconds, stop)

    heartbeat.run(
        partial(heartbeat.beat, feature_log, InflightWatermark(LimitedClock()), "serving-1", 4),
        1000,
        LimitedClock(),
        threading.Event(),
    )
    assert caplog.text.count("heartbeats are paused") == 1
    assert feature_log.end.sequence > 8
