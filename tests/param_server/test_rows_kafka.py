"""The rows topic on a real broker: deltas, an outage, and the barrier after a kill."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from param_server.client import Client
from param_server.key_value_store import MemoryKeyValueStore
from param_server.publish import Message, Publisher
from param_server.rows_topic import KafkaRows
from param_server.server import Shard
from roostream.errors import UnavailableError
from roostream.runtime.backoff import Backoff
from roostream.runtime.clock import SystemClock
from roostream.runtime.kafka.broker import Broker
from roostream.runtime.kafka.consumer import RecordsGoneError
from roostream.wire import records as wire
from tests.param_server.shard_support import (
    ITEM,
    NEVER_STOP,
    commit,
    gradients_of,
    lookup_of,
    make_shard,
    started_shard,
    transport_to,
)
from tests.trainer.memory_store import MemoryStore

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    infra_stack, infra_options = pytest.importorskip("infra.stack"), pytest.importorskip("infra.options")
    home: Path = tmp_path_factory.mktemp("home")
    schema = Path(__file__).resolve().parents[2] / "roostream" / "replay" / "schemas" / "demo.toml"
    with infra_stack.Stack(home, infra_options.StackOptions(schema=schema)) as stack:
        stack.start(["kafka"])
        stack.wait_ready("kafka", timeout_s=60)
        yield stack


@pytest.fixture
def topic(stack: object) -> Iterator[KafkaRows]:
    topic = KafkaRows(Broker(stack.endpoints.kafka), "")  # type: ignore[attr-defined]
    backoff = Backoff(what="the leaders of rows", timeout_s=30)
    for partition in range(4):
        while True:
            try:
                topic.bounds(partition, NEVER_STOP)
                break
            except UnavailableError as error:
                backoff.wait(error)
    yield topic
    topic.close()


def push(shard: Shard, incarnation: int, *ids: int) -> None:
    client = Client(shard.identity.schema, [transport_to(shard)], worker=0)
    client.set_incarnation(incarnation)
    lookup = lookup_of({ITEM: ids})
    client.push(lookup, gradients_of(lookup, 1.0), step=0, time_ms=0)


def values(topic: KafkaRows, partition: int, start: int = 0) -> list[bytes]:
    return list(topic.read(partition, start, topic.bounds(partition, NEVER_STOP)[1], NEVER_STOP))


def test_messages_are_delivered_in_order_and_read_back(topic: KafkaRows) -> None:
    before = topic.bounds(1, NEVER_STOP)[1]
    offsets = topic.deliver(
        [Message(1, 1, b"a"), Message(5, 1, b"b"), Message(2, 2, b"other partition"), Message(1, 1, b"c")],
        NEVER_STOP,
    )
    assert [offsets[0], offsets[1], offsets[3]] == [before, before + 1, before + 2]
    assert values(topic, 1, before) == [b"a", b"b", b"c"]
    assert topic.deliver([], NEVER_STOP) == []


def test_an_offset_beyond_the_topic_counts_as_deleted(topic: KafkaRows) -> None:
    with pytest.raises(RecordsGoneError):
        list(topic.read(3, 1_000_000, 1_000_001, NEVER_STOP))


def test_a_successor_withdraws_uncommitted_rows(topic: KafkaRows) -> None:
    blobs, store = MemoryKeyValueStore(), MemoryStore()
    shard = started_shard(blobs=blobs, store=store)
    publisher = Publisher(shard, topic, SystemClock())
    push(shard, 1, 1, 2)
    publisher.turn(NEVER_STOP)
    name = commit(shard, store, 1)
    shard.restore(2, name)
    publisher.turn(NEVER_STOP)
    push(shard, 2, 2, 3)
    publisher.turn(NEVER_STOP)
    restarted = make_shard(blobs, store)
    restarted.restore(3, name)
    Publisher(restarted, topic, SystemClock()).turn(NEVER_STOP)
    found = [
        wire.decode(v)[1] for p in range(4) for v in values(topic, p) if wire.kind_of(v) == wire.ROW_DELTA
    ]
    last = [d for d in found if d.incarnation == 3]  # type: ignore[attr-defined]
    assert {i: d.num_tombstones for d in last for i in d.ids} == {2: 0, 3: 1}  # type: ignore[attr-defined]


def test_rows_are_published_after_a_killed_broker_is_back(stack: object, topic: KafkaRows) -> None:
    shard = started_shard()
    publisher = Publisher(shard, topic, SystemClock(), interval_ms=50)
    publisher.turn(NEVER_STOP)
    before = publisher.num_keys
    stop = threading.Event()
    thread = threading.Thread(target=publisher.run, args=(stop,))
    thread.start()
    stack.kill("kafka")  # type: ignore[attr-defined]
    push(shard, 1, 7)
    stack.wait_ready("kafka", timeout_s=60)  # type: ignore[attr-defined]
    for _ in range(600):
        if publisher.num_keys > before or stop.wait(0.1):
            break
    stop.set()
    thread.join(10)
    assert publisher.num_keys == before + 1 and not thread.is_alive()
