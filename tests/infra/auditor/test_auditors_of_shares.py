"""Several auditors: each counts its partitions, and only all parts together are the sums of a deployment."""

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


class Site:
    """Writes what users, the joiner and a worker write; every record in the partition of its key."""

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

    def dead_letter(self, of: Record, reason: str) -> None:
        letter = pb.DeadLetter(reason=reason, topic=of.topic, partition=of.partition, offset=of.offset)
        self.write(DEAD_LETTERS, b"", of.timestamp_ms + 100, wire.encode(wire.DEAD_LETTER, letter))

    def request(self, user: int, time_ms: int, *, kind: str = "", partition: int | None = None) -> None:
        """A request with two clicks, its sample and its prediction. `kind`: what goes wrong."""
        key, name = key_bytes(user, 0, ""), f"{user}-{time_ms}"
        header = pb.Header(request_id=name, user_id=user, time_ms=time_ms)
        shown = wire.encode(wire.IMPRESSION, pb.Impression(header=header, item_ids=[1, 2]))
        impression = self.write("impressions", key, time_ms, shown, partition)
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
        trained = pb.Prediction(
            sample_id=sample.sample_id, time_ms=time_ms, partition=joined.partition, offset=joined.offset
        )
        value = wire.encode(wire.PREDICTION, trained)
        self.write("predictions", b"\1" * 8, time_ms + 11_000, value, joined.partition)


def traffic(count: int, kinds: tuple[str, ...]) -> Site:
    site, rng = Site(), random.Random(7)
    for n in range(count):
        site.request(rng.randrange(1, 40), T0 + 1000 * n, kind=rng.choice(kinds))
    return site


GOOD = ("", "", "", "duplicate", "refused", "untrained")


def auditor(site: Site, share: Share, home: Path | None = None) -> Auditor:
    of_share = partitions_of_share(share, site.partitions)
    records = [r for r in site.records if (r.topic, r.partition) in of_share]
    out = Auditor(
        Broker("nowhere:1"),
        "x.",
        num_partitions=site.partitions,
        settle_ms=SETTLE_MS,
        clock=FakeClock(),
        share=share,
    )
    saved = audit_file.read(home, TOPICS, share) if home is not None else None
    out.open_with(MemoryConsumer(of_share, records), saved)
    while out.poll():
        pass
    return out


def scraped(one: Auditor) -> ScrapedMetrics:
    """What the auditor's program exports, once scraped."""
    registry = CollectorRegistry()
    values = sums.metrics_of(one.sums(), one.is_current(), one.behind(), *one.share)
    registry.register(MetricsCollector(lambda: values, sums.METRICS))
    return parse(generate_latest(registry).decode())


def parts_of(site: Site, number: int) -> dict[str, ScrapedMetrics]:
    return {
        f"auditor-{index}" if index else "auditor": scraped(auditor(site, Share(index, number)))
        for index in range(number)
    }


def whole(site: Site, number: int) -> dict[str, Any]:
    return sums.of_programs(parts_of(site, number))


@pytest.mark.parametrize("number", [2, 4])
def test_the_parts_add_up_to_the_sums_of_one_auditor(number: int) -> None:
    site = traffic(400, GOOD)
    alone, together = whole(site, 1), whole(site, number)
    assert together == alone and alone["state"] == "yes"
    assert (
        alone["requests"] == 400 and alone["duplicates"] and alone["dead_requests"] and alone["untrained_by"]
    )
    assert alone["unpredicted"] == 0 and not alone["misplaced"]


@pytest.mark.parametrize("number", [1, 2, 4])
def test_a_lost_request_is_found_by_its_auditor(number: int) -> None:
    site = traffic(300, GOOD)
    site.request(5, T0 + 300_000, kind="lost")
    for n in range(301, 400):
        site.request(n, T0 + 1000 * n)
    found = whole(site, number)
    assert found["state"] == "no" and found["overdue"] == 3, "the request and its clicks"


def test_a_missing_part_makes_everything_unknown() -> None:
    parts = parts_of(traffic(50, GOOD), 2)
    for missing in list(parts):
        found = sums.of_programs({**parts, missing: ScrapedMetrics()})
        assert found["state"] == "unknown" and found["accounted"] is None
        assert {found[name] for name in ("requests", "samples", "engagements", "overdue", "behind")} == {None}
    assert sums.of_programs({})["state"] == "unknown"
    twice = sums.of_programs({"auditor": parts["auditor"], "auditor-1": parts["auditor"]})
    assert twice["state"] == "unknown", "a part that is there twice is no whole"
    one = parts_of(traffic(50, GOOD), 1)["auditor"]
    assert sums.of_programs({**parts, "auditor": one})["requests"] is None, "the number is being changed"


def test_one_auditor_that_is_reading_makes_the_whole_partial() -> None:
    site = traffic(50, GOOD)
    parts = parts_of(site, 2)
    late = Auditor(Broker("nowhere:1"), "x.", clock=FakeClock(), share=Share(1, 2))
    late.open_with(MemoryConsumer(partitions_of_share(Share(1, 2), PARTITIONS)))
    reading = sums.metrics_of(late.sums(), False, 3, 1, 2)
    registry = CollectorRegistry()
    registry.register(MetricsCollector(lambda: reading, sums.METRICS))
    parts["auditor-1"] = parse(generate_latest(registry).decode())
    assert sums.of_programs(parts)["state"] == "reading"


def test_another_number_of_auditors_reads_the_topics_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    site = traffic(200, GOOD)
    expected = whole(site, 1)
    previous = Share(0, 1)
    for number in (1, 2, 4, 2, 1):
        parts = {}
        for index in range(number):
            home, share = tmp_path / str(index), Share(index, number)
            one = auditor(site, share, home)
            audit_file.write(home, one.saved(TOPICS))
            parts[f"auditor-{index}"] = scraped(one)
        assert sums.of_programs(parts) == expected, number
        assert (f"auditor 0 of {previous.num_auditors}; as auditor 0 of {number}" in caplog.text) == (
            number != previous.num_auditors
        )
        previous = Share(0, number)
        caplog.clear()


def test_a_part_continues_from_its_file(tmp_path: Path) -> None:
    site = traffic(100, GOOD)
    for index in range(2):
        audit_file.write(tmp_path / str(index), auditor(site, Share(index, 2)).saved(TOPICS))
    for n in range(100, 200):
        site.request(n, T0 + 1000 * n)
    parts = [auditor(site, Share(index, 2), tmp_path / str(index)) for index in range(2)]
    assert sum(sum(p.accounts.num_records.values()) for p in parts) < 2 * len(site.records)
    assert sums.of_programs({f"auditor-{n}": scraped(p) for n, p in enumerate(parts)}) == whole(site, 1)


def test_added_partitions_move_no_key_to_another_auditor() -> None:
    """Requests before and after the growth, by the same users."""
    site = traffic(200, GOOD)
    site.partitions = 2 * PARTITIONS
    for n in range(200, 400):
        site.request(n % 40 + 1, T0 + 1000 * n)
    alone = whole(site, 1)
    assert alone["state"] == "yes" and whole(site, 2) == alone and whole(site, 4) == alone


def test_events_of_another_partitioner_make_the_sums_unknown_and_are_no_loss_of_one_auditor() -> None:
    site = traffic(100, ("",))
    for user in range(1, 9):
        key = key_bytes(user, 0, "")
        site.request(user, T0 + 200_000 + user, partition=(partition_of(key, PARTITIONS) + 1) % PARTITIONS)
    for n in range(300, 400):
        site.request(n, T0 + 1000 * n)
    assert whole(site, 1)["state"] == "yes"
    found = whole(site, 2)
    assert found["state"] == "unknown" and found["misplaced"] == {"impressions": 8, "engagements": 16}


def test_an_event_with_a_wrong_key_is_a_dead_letter_of_its_own_partition() -> None:
    site = traffic(50, ("",))
    for partition in range(PARTITIONS):
        header = pb.Header(request_id=f"w{partition}", user_id=5, time_ms=T0 + 60_000)
        shown = wire.encode(wire.IMPRESSION, pb.Impression(header=header))
        record = site.write("impressions", b"wrong" + bytes(3), T0 + 60_000, shown, partition)
        site.dead_letter(record, "bad_shape")
    for n in range(100, 200):
        site.request(n, T0 + 1000 * n)
    assert whole(site, 2)["state"] == whole(site, 1)["state"] == "yes"
    assert not whole(site, 4)["misplaced"]


def test_predictions_of_older_workers_are_named_and_do_not_count_for_another_sample() -> None:
    site = traffic(20, ("",))
    written, site.records = site.records, []
    site.ends.clear()
    for r in written:
        moved = (r.partition + 1) % PARTITIONS if r.topic == "predictions" else r.partition
        site.write(r.topic, r.key or b"", r.timestamp_ms, r.value, moved)
    found = whole(site, 2)
    assert found["misplaced"] == {"predictions": 20} and found["unpredicted"] == 20
    assert found["state"] != "unknown", "inputs and samples still add up"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_auditors": 3}, "a divisor of partitions = 4"),
        ({"num_auditors": 8}, "a divisor of partitions = 4"),
        ({"num_auditors": 2, "index": 2}, "less than num_auditors = 2"),
    ],
)
def test_a_number_that_does_not_share_the_partitions_is_refused(
    settings: dict[str, int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        AuditorConfig(bootstrap="127.0.0.1:1", home="h", partitions=4, **settings)  # type: ignore[arg-type]


def test_a_stack_starts_as_many_auditors_as_its_options_say() -> None:
    with pytest.raises(ConfigError, match="num_auditors"):
        StackOptions(num_auditors=3)
    assert StackOptions(num_auditors=2).num_auditors == 2
