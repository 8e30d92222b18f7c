"""The contract of every record consumer: Kafka's over a real broker, and the one in memory."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import pytest
from confluent_kafka import TopicPartition

from roostream.errors import UnavailableError
from roostream.runtime.kafka import clients
from roostream.runtime.kafka.broker import Broker
from roostream.runtime.kafka.consumer import MemoryConsumer, RecordConsumer, RecordsGoneError
from roostream.runtime.kafka.kafka_consumer import ConsumerOptions, KafkaConsumer
from roostream.runtime.kafka.retention_loss import CommittedOffset, committed_offsets
from roostream.runtime.kafka.topic_admin import TopicAdmin
from roostream.runtime.kafka.topic_watch import TopicWatch
from roostream.runtime.kafka.topics import Partition, TopicSettings, name_of
from roostream.wire.records import Record

ROOT = Path(__file__).resolve().parents[2]
SHOWN, P0, P1 = ("impressions", 0), ("engagements", 0), ("engagements", 1)
ALL = (SHOWN, P0, P1)
_WAIT_S = 30.0

pytestmark = pytest.mark.timeout(400)
KAFKA = pytest.param("kafka", marks=pytest.mark.e2e)


class Log(Protocol):
    """A place to which a test writes records and from which the consumer under test reads."""

    def reader(self, *, skip_lost_records: bool = True) -> RecordConsumer:
        """Create the consumer of a test, before anything is written."""

    def write(self, partition: Partition, *times_ms: int) -> None: ...

    def trim(self, partition: Partition, first: int) -> None:
        """Delete records as retention does: offsets below `first` are gone."""

    def close(self) -> None: ...


class MemoryLog:
    def __init__(self) -> None:
        self.consumer: MemoryConsumer | None = None

    def reader(self, *, skip_lost_records: bool = True) -> RecordConsumer:
        self.consumer = MemoryConsumer(ALL, skip_lost_records=skip_lost_records)
        return self.consumer

    def write(self, partition: Partition, *times_ms: int) -> None:
        assert self.consumer is not None
        first = self.consumer.end_offsets()[partition]
        self.consumer.append(
            [Record(*partition, first + n, t, b"key", b"value") for n, t in enumerate(times_ms)]
        )

    def trim(self, partition: Partition, first: int) -> None:
        assert self.consumer is not None
        self.consumer.trim(partition, first)

    def close(self) -> None: ...


class KafkaLog:
    """Kafka topics with a prefix of their own."""

    _numbers = itertools.count()

    def __init__(self, broker: Broker) -> None:
        self.broker, self.prefix = broker, f"readers{next(self._numbers)}."
        self.client, self.admin = clients.producer(broker), clients.admin(broker)
        TopicAdmin(
            self.admin, self.prefix, 4, TopicSettings(replay=True), ["impressions", "engagements"]
        ).create()
        self.readers: list[KafkaConsumer] = []

    def reader(self, *, skip_lost_records: bool = True) -> KafkaConsumer:
        options = ConsumerOptions(
            partitions=ALL,
            prefix=self.prefix,
            merge_by_time=True,
            skip_lost_records=skip_lost_records,
            track_end_offsets=True,
        )
        self.readers.append(KafkaConsumer.open(self.broker, "readers", options))
        wait_until(lambda: self._has_leader(self.readers[-1]))
        return self.readers[-1]

    def write(self, partition: Partition, *times_ms: int) -> None:
        topic = name_of(self.prefix, partition[0])
        for time_ms in times_ms:
            clients.send(
                self.client, topic, key=b"key", value=b"value", timestamp_ms=time_ms, partition=partition[1]
            )
        assert self.client.flush(20) == 0

    def trim(self, partition: Partition, first: int) -> None:
        topic_partition = TopicPartition(name_of(self.prefix, partition[0]), partition[1], first)
        for future in self.admin.delete_records([topic_partition]).values():
            future.result()

    def close(self) -> None:
        for reader in self.readers:
            reader.close()

    @staticmethod
    def _has_leader(reader: KafkaConsumer) -> bool:
        try:
            return bool(reader.end_offsets())
        except UnavailableError:  # the partitions have no leader yet
            return False


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from infra.options import StackOptions
    from infra.stack import Stack

    options = StackOptions(schema=ROOT / "roostream" / "replay" / "schemas" / "demo.toml")
    with Stack(tmp_path_factory.mktemp("readers"), options) as running:
        running.start(["kafka"])
        running.wait_ready("kafka", timeout_s=180)
        yield running


@pytest.fixture(params=["memory", KAFKA])
def records(request: pytest.FixtureRequest) -> Iterator[Log]:
    log: Log = MemoryLog()
    if request.param == "kafka":
        log = KafkaLog(Broker(request.getfixturevalue("stack").endpoints.kafka))
    yield log
    log.close()


def wait_until(check: Any) -> None:
    until_s = time.monotonic() + _WAIT_S
    while not check():
        assert time.monotonic() < until_s, "the condition did not become true in time"
        time.sleep(0.05)


def lag_of(reader: Any, partition: Partition) -> Any:
    """The lag of a partition. A consumer omits it while Kafka does not report the ends in time."""
    found: dict[Partition, Any] = {}

    def is_known() -> bool:
        found.update(reader.lag())
        return partition in found

    wait_until(is_known)
    return found[partition]


def read(reader: RecordConsumer, count: int, partition: Partition | None = None) -> list[Record]:
    """The next `count` records, from as many polls as needed."""
    out: list[Record] = []

    def is_complete() -> bool:
        out.extend(reader.poll(count - len(out), 0.2, partition))
        return len(out) >= count

    wait_until(is_complete)
    return out


def positions(found: Sequence[Record]) -> list[tuple[Partition, int]]:
    return [((r.topic, r.partition), r.offset) for r in found]


def test_records_of_all_partitions_come_oldest_first_and_whole(records: Log) -> None:
    reader = records.reader()
    records.write(P1, 1_010, 1_030)
    records.write(P0, 1_020)
    records.write(SHOWN, 1_010)
    reader.seek({})
    found = read(reader, 4)
    assert positions(found) == [(SHOWN, 0), (P1, 0), (P0, 0), (P1, 1)]
    assert found[0] == Record("impressions", 0, 0, 1_010, b"key", b"value")
    assert reader.positions() == reader.end_offsets() == {SHOWN: 1, P0: 1, P1: 2}
    wait_until(reader.at_end)


def test_a_seek_continues_exactly_at_the_given_offsets(records: Log) -> None:
    reader = records.reader()
    records.write(P0, 1_000, 1_001, 1_002)
    records.write(P1, 2_000, 2_001)
    reader.seek({})
    read(reader, 3)
    reader.seek({P0: 2, P1: 1})
    assert reader.positions() == {SHOWN: 0, P0: 2, P1: 1}
    assert positions(read(reader, 2)) == [(P0, 2), (P1, 1)]
    assert reader.num_lost == 0


def test_one_partition_can_be_read_alone(records: Log) -> None:
    reader = records.reader()
    records.write(P0, 1_000)
    records.write(P1, 2_000, 2_001)
    reader.seek({})
    assert positions(read(reader, 2, P1)) == [(P1, 0), (P1, 1)]
    assert reader.positions() == {SHOWN: 0, P0: 0, P1: 2}


def test_an_empty_log_gives_an_empty_poll_at_its_end(records: Log) -> None:
    reader = records.reader()
    reader.seek({})
    assert reader.poll(10, 0.05) == []
    wait_until(lambda: reader.poll(10, 0.05) == [] and reader.at_end())
    records.write(P0, 1_000)
    assert len(read(reader, 1)) == 1


def test_lag_is_counted_in_records_and_in_event_time(records: Log) -> None:
    reader = records.reader()
    records.write(P0, 1_000, 1_500, 4_000)
    reader.seek({})
    read(reader, 1)
    wait_until(lambda: lag_of(reader, P0).stable_end == 3)
    found = lag_of(reader, P0)
    assert (found.records, found.event_ms) == (2, 3_000)
    read(reader, 2)
    found = lag_of(reader, P0)
    assert (found.records, found.event_ms) == (0, 0)


def test_records_deleted_before_a_seek_are_counted(records: Log) -> None:
    reader = records.reader()
    records.write(P0, *range(1_000, 1_008))
    records.trim(P0, 5)
    reader.seek({P0: 2})
    assert reader.num_lost == 3 and reader.positions()[P0] == 5
    assert positions(read(reader, 1)) == [(P0, 5)]
    reader.seek({})
    assert reader.num_lost == 3, "records that no seek asked for are not lost"


def test_records_deleted_while_a_partition_is_paused_are_counted(records: Log) -> None:
    reader = records.reader()
    records.write(P0, 1_000)
    reader.seek({})
    read(reader, 1)
    wait_until(lambda: reader.poll(10, 0.05) == [] and reader.at_end())
    reader.pause([P0])
    records.write(P0, *range(1_001, 1_006))
    assert reader.poll(10, 0.3) == []
    records.trim(P0, 4)
    reader.pause([])
    assert positions(read(reader, 2)) == [(P0, 4), (P0, 5)]
    assert reader.num_lost == 3


def test_a_consumer_that_may_not_skip_reports_deleted_records(records: Log) -> None:
    reader = records.reader(skip_lost_records=False)
    records.write(P0, 1_000, 1_001, 1_002)
    records.trim(P0, 2)
    with pytest.raises(RecordsGoneError, match=r"gone|no longer has"):
        reader.seek({P0: 1})
    reader.seek({P0: 2})
    assert positions(read(reader, 1)) == [(P0, 2)] and reader.num_lost == 0


def test_offsets_beyond_the_end_count_as_deleted(records: Log) -> None:
    reader = records.reader(skip_lost_records=False)
    records.write(P0, 1_000)
    with pytest.raises(RecordsGoneError):
        reader.seek({P0: 1_000_000})


def test_a_consumer_that_may_skip_continues_at_the_end_of_a_truncated_log(records: Log) -> None:
    reader = records.reader()
    records.write(P0, 1_000, 1_001)
    reader.seek({P0: 7})
    assert reader.num_lost == 5 and reader.positions()[P0] == 2
    records.write(P0, 1_002)
    assert positions(read(reader, 1)) == [(P0, 2)]


def test_no_record_at_or_beyond_a_limit_is_returned_until_it_moves(records: Log) -> None:
    reader = records.reader()
    records.write(P0, 1_000, 1_010, 1_040)
    records.write(P1, 1_020, 1_030)
    records.write(SHOWN, 1_005, 1_050)
    reader.seek({})
    reader.set_limits({P0: 1, P1: 2})
    assert positions(read(reader, 3)) == [(P0, 0), (P1, 0), (P1, 1)], (
        "no record of impressions-0 may come before its limit is set"
    )
    assert reader.poll(10, 0.2) == [] and (reader.has_more(P0), reader.has_more(P1)) == (False, False)
    reader.set_limits({P0: 3, P1: 3})
    assert positions(read(reader, 1)) == [(SHOWN, 0)]
    assert reader.has_more(P0) is True
    assert reader.has_more(P1) is None
    assert positions(read(reader, 2, P0)) == [(P0, 1), (P0, 2)] and reader.poll(10, 0.2, P0) == []
    reader.set_limits({})
    assert positions(read(reader, 1)) == [(SHOWN, 1)]


@pytest.mark.e2e
def test_records_of_an_open_transaction_are_neither_returned_nor_counted_as_lag(stack: Any) -> None:
    broker = Broker(stack.endpoints.kafka)
    log = KafkaLog(broker)
    reader = log.reader()
    writer = clients.producer(
        broker, transactional_id="readers", delivery_timeout_ms=20_000, transaction_timeout_ms=60_000
    )
    writer.init_transactions(20)
    writer.begin_transaction()
    clients.send(
        writer, name_of(log.prefix, P0[0]), key=None, value=b"v", timestamp_ms=1_000, partition=P0[1]
    )
    assert writer.flush(20) == 0
    reader.seek({})
    wait_until(lambda: reader.poll(10, 0.05) == [] and reader.at_end())

    wait_until(lambda: lag_of(reader, P0).high_watermark == 1)
    found = lag_of(reader, P0)
    assert (found.stable_end, found.records) == (0, 0)
    writer.commit_transaction(20)
    assert len(read(reader, 1)) == 1
    wait_until(lambda: reader.poll(10, 0.05) == [] and reader.at_end())
    wait_until(lambda: lag_of(reader, P0).stable_end == 2)
    assert lag_of(reader, P0).records == 0, "the transaction's marker must not count as lag"
    log.close()


@pytest.mark.e2e
def test_a_killed_broker_is_awaited(stack: Any) -> None:
    log = KafkaLog(Broker(stack.endpoints.kafka))
    reader = log.reader()
    log.write(P0, 1_000)
    reader.seek({})
    read(reader, 1)
    stack.kill("kafka")
    assert reader.poll(10, 0.2) == []
    stack.wait_ready("kafka", timeout_s=180)
    log.write(P0, 2_000)
    assert positions(read(reader, 1)) == [(P0, 1)] and reader.num_lost == 0
    log.close()


@pytest.mark.e2e
def test_topics_are_described_by_a_broker(stack: Any) -> None:
    log = KafkaLog(Broker(stack.endpoints.kafka))
    topics = ("impressions", "engagements")
    wait_until(lambda: bool(topic_ids_if_known(log, topics)))
    ids = topic_ids_if_known(log, topics)
    assert set(ids) == set(topics) and len(set(ids.values())) == 2
    watch = TopicWatch(lambda: clients.admin(log.broker), log.prefix, 3, topics)
    watch.check()
    found = watch.problems()
    assert set(found) == {name_of(log.prefix, topic) for topic in topics}
    assert all("4 partitions" in problem for problem in found.values())
    log.close()


def topic_ids_if_known(log: KafkaLog, topics: tuple[str, ...]) -> dict[str, str]:
    """The ids of the topics; {} while the broker does not know them yet."""
    try:
        return clients.topic_ids(log.broker, log.prefix, topics)
    except UnavailableError:
        return {}


@pytest.mark.e2e
@pytest.mark.slow
def test_end_offsets_are_known_again_within_30_s_of_every_broker_restart(stack: Any) -> None:
    """The same clients live through all restarts with their cached leaders."""
    from roostream.cli.status import StackMonitor

    log = KafkaLog(Broker(stack.endpoints.kafka))
    reader = log.reader()
    reader.seek({})
    nowhere = "127.0.0.1:1"
    monitor = StackMonitor(
        {"kafka": stack.endpoints.kafka, "prefix": "", "flink": nowhere, "controller": nowhere}
    )
    for count in (1, 2):
        wait_until(lambda: bool(monitor.sample({})["topics"]))
        stack.kill("kafka")
        reader.poll(10, 0.2)
        assert monitor.sample({})["topics"] == {}, "the ends must be unknown, not the old numbers"
        stack.wait_ready("kafka", timeout_s=180)
        log.write(P0, 1_000)
        wait_until(lambda count=count: lag_of(reader, P0).stable_end == count)
        wait_until(lambda: bool(monitor.sample({})["topics"]))
        wait_until(lambda count=count: reader.end_offsets()[P0] == count)
    monitor.close()
    log.close()


@pytest.mark.e2e
@pytest.mark.slow
def test_offsets_that_a_broker_lost_and_reused_are_counted_and_read_again(stack: Any) -> None:
    log = KafkaLog(Broker(stack.endpoints.kafka))
    reader = log.reader()
    for time_ms in range(1_000, 1_010):
        log.write(P0, time_ms)  # each record is a batch of its own in the log
    reader.seek({})
    assert len(read(reader, 10)) == 10
    epochs = reader.leader_epochs({P0: 10})
    stack.stop_program("kafka")
    cut_off_log(stack.home.root, name_of(log.prefix, P0[0]), P0[1], keep=6)
    stack.start(["kafka"])
    stack.wait_ready("kafka", timeout_s=180)
    log.write(P0, *range(2_000, 2_008))
    assert positions(read(reader, 8)) == [(P0, offset) for offset in range(6, 14)], (
        "the running consumer must read the new records"
    )
    assert reader.num_lost == 4
    restarted = log.reader()
    restarted.seek({P0: 10}, epochs)
    assert positions(read(restarted, 8)) == [(P0, offset) for offset in range(6, 14)], (
        "a restarted consumer must read the new records"
    )
    assert restarted.num_lost == 4 and restarted.positions()[P0] == 14
    epochs = restarted.leader_epochs({P0: 14})
    stack.kill("kafka")
    stack.wait_ready("kafka", timeout_s=180)
    log.write(P0, 3_000)
    unharmed = log.reader()
    unharmed.seek({P0: 14}, epochs)
    assert positions(read(unharmed, 1)) == [(P0, 14)] and unharmed.num_lost == 0, (
        "a newer epoch without truncation is no loss"
    )
    log.close()


def cut_off_log(root: Path, topic: str, partition: int, *, keep: int) -> None:
    """Keep the first `keep` batches of a stopped broker's log, as after a power loss."""
    folder = next(root.rglob(f"{topic}-{partition}"))
    file = folder / "00000000000000000000.log"
    data, end = file.read_bytes(), 0
    for _ in range(keep):
        end += 12 + int.from_bytes(data[end + 8 : end + 12], "big")
    file.write_bytes(data[:end])
    for later in (*folder.glob("*.snapshot"), *folder.parent.glob(".kafka_cleanshutdown")):
        later.unlink()


@pytest.mark.e2e
def test_committed_offsets_of_a_group_can_be_read_from_outside_of_it(stack: Any) -> None:
    broker = Broker(stack.endpoints.kafka)
    log = KafkaLog(broker)
    log.write(P0, 1_000)
    options = ConsumerOptions(partitions=(P0,), prefix=log.prefix)
    group_consumer = clients.consumer(broker, f"{log.prefix}group")
    for _ in range(3):  # the broker first creates the topic in which groups are stored
        wait_until(lambda: _committed_if_known(group_consumer, options) == {P0: CommittedOffset(0, -1)})
    committer = clients.consumer(broker, f"{log.prefix}group")
    committer.commit(offsets=[TopicPartition(name_of(log.prefix, P0[0]), P0[1], 1)], asynchronous=False)
    assert _committed_if_known(group_consumer, options) == {P0: CommittedOffset(0, 1)}
    committer.close()
    group_consumer.close()
    log.close()


def _committed_if_known(group_consumer: Any, options: ConsumerOptions) -> dict[Partition, CommittedOffset]:
    try:
        return committed_offsets(group_consumer, options)
    except UnavailableError:  # the group has no coordinator yet
        return {}
