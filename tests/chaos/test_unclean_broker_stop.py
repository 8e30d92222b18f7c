"""A broker that lost the newest records of its topics, as after a power failure before its disk had them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from confluent_kafka import TopicPartition

from infra.stack import Stack
from roostream.runtime.kafka import clients
from roostream.runtime.kafka.broker import Broker
from roostream.runtime.kafka.topics import DEFAULT_PARTITIONS, IMPRESSIONS, TOPICS, name_of
from tests.chaos.readings import bad_readings, monitor_of, status_of
from tests.e2e.loop_stack import applied, quick_options, rank, wait_until

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]

_LOST_SHARE = 0.3
_CUT = (*TOPICS, "__transaction_state", "__consumer_offsets")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("unclean"), quick_options()) as running:
        running.start(["all", "simulate"])
        running.wait_ready("serving", timeout_s=240)
        wait_until("a commit with trained samples", lambda: applied(running) > 150, 240)
        yield running


def lose_newest_records(stack: Stack) -> None:
    """Cut off the end of each partition's log while no broker runs. Without the marker of a clean shutdown
    the broker recovers up to the last complete batch."""
    data = stack.home.root / "kafka"
    (data / ".kafka_cleanshutdown").unlink()
    (data / "recovery-point-offset-checkpoint").unlink()
    for topic in _CUT:
        for folder in data.glob(f"{topic}-[0-9]*"):
            log = max(folder.glob("*.log"))
            size = log.stat().st_size
            with log.open("r+b") as file:
                file.truncate(int(size * (1 - _LOST_SHARE)))
            for derived in (*folder.glob("*.index"), *folder.glob("*.timeindex"), *folder.glob("*.snapshot")):
                derived.unlink()


def stop_kafka_uncleanly(stack: Stack) -> None:
    stack.stop_program("kafka")
    lose_newest_records(stack)
    stack.start(["kafka"])
    stack.wait_ready("kafka", timeout_s=180)


def num_impressions(stack: Stack) -> list[int]:
    """The end offset of each partition of the impressions."""
    consumer = clients.consumer(Broker(stack.endpoints.kafka), "test")
    try:
        name = name_of(stack.prefix, IMPRESSIONS)
        topic_partitions = (TopicPartition(name, p) for p in range(DEFAULT_PARTITIONS))
        return [
            consumer.get_watermark_offsets(topic_partition, timeout=10.0)[1]
            for topic_partition in topic_partitions
        ]
    finally:
        consumer.close()


def test_lost_records_are_counted_and_every_program_continues(stack: Stack) -> None:
    """Producers whose records the broker lost are replaced, and no program ends because of it."""
    monitor = monitor_of(stack)

    def bad() -> list[str]:
        return bad_readings(stack, monitor)

    try:
        before = applied(stack)
        stop_kafka_uncleanly(stack)
        wait_until("a commit of new samples", lambda: applied(stack) > before + 50, 180, bad)
        wait_until("good readings", lambda: not bad(), 60, bad)
        lost = status_of(stack, monitor)["lost_records"]
        assert min(lost["worker"], lost["features"], lost["archiver"]) > 0, lost
        assert rank(stack, [1, 2, 3])["model_version"]
        restarts = {name: n for name in stack.programs if (n := stack.restarts(name))}
        assert not restarts
        logs = {name: stack.log_path(name).read_text() for name in stack.programs}
        assert not [name for name, text in logs.items() if "a defect of Roostream" in text]
    finally:
        monitor.close()


def test_a_restarted_feature_updater_detects_that_its_offsets_were_reused(
    stack: Stack,
) -> None:
    """During its absence, the broker lost records and gave their offsets to new ones."""
    monitor = monitor_of(stack)
    try:
        stack.stop_program("features")
        before = num_impressions(stack)
        stop_kafka_uncleanly(stack)
        wait_until(
            "more records than before",
            lambda: all(now > past for now, past in zip(num_impressions(stack), before, strict=True)),
            300,
        )
        stack.start(["features"])
        stack.wait_ready("features", timeout_s=60)
        wait_until(
            "lost records", lambda: (status_of(stack, monitor)["lost_records"]["features"] or 0) > 0, 60
        )
        wait_until("good readings", lambda: not bad_readings(stack, monitor), 60)
    finally:
        monitor.close()
