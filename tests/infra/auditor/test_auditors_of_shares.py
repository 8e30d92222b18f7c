"""Several auditors: each counts its partitions, and only all parts together give the sums of a deployment."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from infra.auditor import audit_file, sums
from infra.auditor.accounts import Share
from infra.auditor.auditor import Auditor, partitions_of_share
from infra.auditor.config import AuditorConfig
from infra.options import StackOptions
from roostream.errors import ConfigError
from roostream.runtime.clock import FakeClock
from roostream.runtime.kafka.broker import Broker
from roostream.runtime.kafka.consumer import MemoryConsumer
from roostream.runtime.kafka.partitioner import partition_of
from roostream.runtime.kafka.topics import DEAD_LETTERS
from roostream.runtime.metrics_collector import MetricsCollector
from roostream.runtime.scrape import ScrapedMetrics, parse
from roostream.schema.ids import key_bytes, sample_id
from roostream.wire import records as wire
from roostream.wire import roo_pb2 as pb
from roostream.wire.records import Record

PARTITIONS = 4
T0 = 1_700_000_000_000
TOPICS = {"x.impressions": "id 1"}
SETTLE_MS = 15_000


class TopicWriter:
    """Writes what users, the joiner and a worker write. Every record goes to the partition of its key."""

    def __init__(self, partitions: int = PARTITIONS) -> None:
        self.partitions = partitions
        self.records: list[Record] = []
        self.ends: dict[tuple[str, int], int] = {}
        self._num_events = 0

    def write(
        self, topic: str, key: bytes, time_ms: int, value: bytes, partition: int | None = None
    ) -> Record:
        if partition is None:
            partition = 0 if topic == DEAD_LETTERS else partition_of(key, self.partitions)
        offset = self.ends.get((topic, partition), 0)
        self.ends[topic, partition] = offset + 1
        self.records.append(Record(topic, partition, offset, time_ms, key, value))
        return self.records[-1]

    def dead_letter(self, source: Record, reason: str) -> None:
        letter = pb.DeadLetter(
            reason=reason, topic=source.topic, partition=source.partition, offset=source.offset
        )
        self.write(DEAD_LETTERS, b"", source.timestamp_ms + 100, wire.encode(wire.DEAD_LETTER, letter))

    def request(self, user: int, time_ms: int, *, kind: str = "", partition: int | None = None) -> None:
        """Write a request with two clicks, its sample and its prediction. `kind` says what goes wrong."""
        key, name = key_bytes(user, 0, ""), f"{user}-{time_ms}"
        header = pb.Header(request_id=name, user_id=user, time_ms=time_ms)
        impression_value = wire.encode(wire.IMPRESSION, pb.Impression(header=header, item_ids=[1, 2]))
        impression = self.write("impressions", key, time_ms, impression_value, partition)
        clicks = []
        for _ in range(2):
            self._num_events += 1
            click = pb.Engagement(header=header, event_id=self._num_events, item_id=1, action="click")
            value = wire.encode(wire.ENGAGEMENT, click)
            clicks.append(self.write("engagements", key, time_ms, value, partition))
        if kind == "duplicate":
            self.write("engagements", key, time_ms, clicks[0].value)
        if kind == "refused":
            for record in (impression, *clicks):
                self.dead_letter(record, "bad_shape")
            return
        if kind == "lost":
            return
        sample = pb.Sample(
            header=header,
            sample_id=sample_id(key, name),
            close_reason=pb.CLOSE_WINDOW,
            close_ms=time_ms + 10_000,
            item_ids=[1, 2],
            event_ids=range(self._num_events - 1, self._num_events + 1),
            event_times=[time_ms, time_ms],
        )
        joined = self.write("samples", key, time_ms + 10_000, wire.encode(wire.SAMPLE, sample))
        if kind == "untrained":
            self.dead_letter(joined, "non_finite")
            return
        prediction_ = pb.Prediction(
            sample_id=sample.sample_id, time_ms=time_ms, partition=joined.partition, offset=joined.offset
        )
        value = wire.encode(wire.PREDICTION, prediction_)
        self.write("predictions", b"\1" * 8, time_ms + 11_000, value, joined.partition)


def traffic(count: int, kinds: tuple[str, ...]) -> TopicWriter:
    topics, rng = TopicWriter(), random.Random(7)
    for n in range(count):
        topics.request(rng.randrange(1, 40), T0 + 1000 * n, kind=rng.choice(kinds))
    return topics


GOOD = ("", "", "", "duplicate", "refused", "untrained")


def auditor(topics: TopicWriter, share: Share, home: Path | None = None) -> Auditor:
    share_partitions = partitions_of_share(share, topics.partitions)
    records = [r for r in topics.records if (r.topic, r.partition) in share_partitions]
    created = Auditor(
        Broker("nowhere:1"),
        "x.",
        num_partitions=topics.partitions,
        settle_ms=SETTLE_MS,
        clock=FakeClock(),
        share=share,
    )
    saved = audit_file.read(home, TOPICS, share) if home is not None else None
    created.open_with(MemoryConsumer(share_partitions, records), saved)
    while created.poll():
        pass
    return created


def scraped(auditor_: Auditor) -> ScrapedMetrics:
    """The metrics that the auditor's program exports, as scraped and parsed."""
    registry = CollectorRegistry()
    values = sums.metrics_of(auditor_.sums(), auditor_.is_current(), auditor_.behind(), *auditor_.share)
    registry.register(MetricsCollector(lambda: values, sums.METRICS))
    return parse(generate_latest(registry).decode())


def parts_of(topics: TopicWriter, number: int) -> dict[str, ScrapedMetrics]:
    return {
        f"auditor-{index}" if index else "auditor": scraped(auditor(topics, Share(index, number)))
        for index in range(number)
    }


def combined_sums(topics: TopicWriter, number: int) -> dict[str, Any]:
    return sums.of_programs(parts_of(topics, number))


@pytest.mark.parametrize("number", [2, 4])
def test_the_parts_add_up_to_the_sums_of_one_auditor(number: int) -> None:
    topics = traffic(400, GOOD)
    single, combined = combined_sums(topics, 1), combined_sums(topics, number)
    assert combined == single and single["state"] == "yes"
    assert (
        single["requests"] == 400
        and single["duplicates"]
        and single["dead_requests"]
        and single["untrained_by"]
    )
    assert single["unpredicted"] == 0 and not single["misplaced"]


@pytest.mark.parametrize("number", [1, 2, 4])
def test_a_lost_request_is_found_by_its_auditor(number: int) -> None:
    topics = traffic(300, GOOD)
    topics.request(5, T0 + 300_000, kind="lost")
    for n in range(301, 400):
        topics.request(n, T0 + 1000 * n)
    found = combined_sums(topics, number)
    assert found["state"] == "no" and found["overdue"] == 3, "the request and its two clicks must be overdue"


def test_a_missing_part_makes_everything_unknown() -> None:
    parts = parts_of(traffic(50, GOOD), 2)
    for missing in list(parts):
        found = sums.of_programs({**parts, missing: ScrapedMetrics()})
        assert found["state"] == "unknown" and found["accounted"] is None
        assert {found[name] for name in ("requests", "samples", "engagements", "overdue", "behind")} == {None}
    assert sums.of_programs({})["state"] == "unknown"
    twice = sums.of_programs({"auditor": parts["auditor"], "auditor-1": parts["auditor"]})
    assert twice["state"] == "unknown", "the same part twice is not complete"
    single = parts_of(traffic(50, GOOD), 1)["auditor"]
    assert sums.of_programs({**parts, "auditor": single})["requests"] is None, (
        "parts with different numbers of auditors do not add up"
    )


def test_the_sums_are_partial_while_one_auditor_is_still_reading() -> None:
    topics = traffic(50, GOOD)
    parts = parts_of(topics, 2)
    behind = Auditor(Broker("nowhere:1"), "x.", clock=FakeClock(), share=Share(1, 2))
    behind.open_with(MemoryConsumer(partitions_of_share(Share(1, 2), PARTITIONS)))
    reading = sums.metrics_of(behind.sums(), False, 3, 1, 2)
    registry = CollectorRegistry()
    registry.register(MetricsCollector(lambda: reading, sums.METRICS))
    parts["auditor-1"] = parse(generate_latest(registry).decode())
    assert sums.of_programs(parts)["state"] == "reading"


def test_another_number_of_auditors_reads_the_topics_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    topics = traffic(200, GOOD)
    expected = combined_sums(topics, 1)
    previous = Share(0, 1)
    for number in (1, 2, 4, 2, 1):
        parts = {}
        for index in range(number):
            home, share = tmp_path / str(index), Share(index, number)
            auditor_ = auditor(topics, share, home)
            audit_file.write(home, auditor_.saved(TOPICS))
            parts[f"auditor-{index}"] = scraped(auditor_)
        assert sums.of_programs(parts) == expected, number
        assert (f"auditor 0 of {previous.num_auditors}; as auditor 0 of {number}" in caplog.text) == (
            number != previous.num_auditors
        )
        previous = Share(0, number)
        caplog.clear()


def test_a_part_continues_from_its_file(tmp_path: Path) -> None:
    topics = traffic(100, GOOD)
    for index in range(2):
        audit_file.write(tmp_path / str(index), auditor(topics, Share(index, 2)).saved(TOPICS))
    for n in range(100, 200):
        topics.request(n, T0 + 1000 * n)
    parts = [auditor(topics, Share(index, 2), tmp_path / str(index)) for index in range(2)]
    assert sum(sum(p.accounts.num_records.values()) for p in parts) < 2 * len(topics.records)
    assert sums.of_programs({f"auditor-{n}": scraped(p) for n, p in enumerate(parts)}) == combined_sums(
        topics, 1
    )


def test_added_partitions_move_no_key_to_another_auditor() -> None:
    """The same users send requests before and after the growth."""
    topics = traffic(200, GOOD)
    topics.partitions = 2 * PARTITIONS
    for n in range(200, 400):
        topics.request(n % 40 + 1, T0 + 1000 * n)
    single = combined_sums(topics, 1)
    assert (
        single["state"] == "yes" and combined_sums(topics, 2) == single and combined_sums(topics, 4) == single
    )


def test_events_of_another_partitioner_make_the_sums_of_several_auditors_unknown() -> None:
    topics = traffic(100, ("",))
    for user in range(1, 9):
        key = key_bytes(user, 0, "")
        topics.request(user, T0 + 200_000 + user, partition=(partition_of(key, PARTITIONS) + 1) % PARTITIONS)
    for n in range(300, 400):
        topics.request(n, T0 + 1000 * n)
    assert combined_sums(topics, 1)["state"] == "yes"
    found = combined_sums(topics, 2)
    assert found["state"] == "unknown" and found["misplaced"] == {"impressions": 8, "engagements": 16}


def test_an_event_with_a_wrong_key_is_settled_in_its_own_partition() -> None:
    topics = traffic(50, ("",))
    for partition in range(PARTITIONS):
        header = pb.Header(request_id=f"w{partition}", user_id=5, time_ms=T0 + 60_000)
        impression_value = wire.encode(wire.IMPRESSION, pb.Impression(header=header))
        record = topics.write("impressions", b"wrong" + bytes(3), T0 + 60_000, impression_value, partition)
        topics.dead_letter(record, "bad_shape")
    for n in range(100, 200):
        topics.request(n, T0 + 1000 * n)
    assert combined_sums(topics, 2)["state"] == combined_sums(topics, 1)["state"] == "yes"
    assert not combined_sums(topics, 4)["misplaced"]


def test_predictions_in_another_partition_are_reported_as_misplaced() -> None:
    topics = traffic(20, ("",))
    written, topics.records = topics.records, []
    topics.ends.clear()
    for r in written:
        partition = (r.partition + 1) % PARTITIONS if r.topic == "predictions" else r.partition
        topics.write(r.topic, r.key or b"", r.timestamp_ms, r.value, partition)
    found = combined_sums(topics, 2)
    assert found["misplaced"] == {"predictions": 20} and found["unpredicted"] == 20
    assert found["state"] != "unknown", "the sums of inputs and samples must still be known"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_auditors": 3}, "a divisor of partitions = 4"),
        ({"num_auditors": 8}, "a divisor of partitions = 4"),
        ({"num_auditors": 2, "index": 2}, "less than num_auditors = 2"),
    ],
)
def test_a_number_of_auditors_that_does_not_divide_the_partitions_is_refused(
    settings: dict[str, int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        AuditorConfig(bootstrap="127.0.0.1:1", home="h", partitions=4, **settings)  # type: ignore[arg-type]


def test_a_stack_starts_as_many_auditors_as_its_options_say() -> None:
    with pytest.raises(ConfigError, match="num_auditors"):
        StackOptions(num_auditors=3)
    assert StackOptions(num_auditors=2).num_auditors == 2
