"""A producer with a fatal error is replaced by its user, whichever call reports the error."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from param_server.publish import Message
from param_server.rows_topic import KafkaRows
from roostream.errors import UnavailableError
from roostream.runtime.clock import FakeClock
from roostream.runtime.kafka import clients
from roostream.runtime.kafka.broker import Broker
from roostream.warehouse.archiver_program import KafkaDeadLetters
from roostream.warehouse.config import ArchiverConfig
from roostream.wire.records import Record

BROKER = Broker("127.0.0.1:1")


class DeliveredMessage:
    def offset(self) -> int:
        return 7


class Producer:
    """A producer that delivers at once. If `error` is set, the calls named in `reports` raise it."""

    def __init__(self, error: KafkaException | None = None, reports: tuple[str, ...] = ()) -> None:
        self.error, self.reports = error, reports
        self.num_produced = 0

    def produce(
        self, topic: str, *, on_delivery: Callable[[Any, DeliveredMessage], None] | None = None, **_: Any
    ) -> None:
        self._raise("produce")
        self.num_produced += 1
        if on_delivery and not self.error:
            on_delivery(None, DeliveredMessage())

    def poll(self, timeout_s: float) -> int:
        self._raise("poll")
        return 0

    def flush(self, timeout_s: float) -> int:
        self._raise("flush")
        return 0

    def _raise(self, name: str) -> None:
        if self.error and name in self.reports:
            raise self.error


def fatal() -> KafkaException:
    """The error with which librdkafka first reports that the broker lost acknowledged records."""
    return KafkaException(
        KafkaError(KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER, "ProduceRequest for rows [0]", fatal=True)
    )


def already_fatal() -> KafkaException:
    """The error of every later call on a producer that has failed."""
    return KafkaException(KafkaError(KafkaError._FATAL))  # noqa: SLF001


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Producer]:
    """The producers that the next calls of `clients.producer` return, in order. The list empties as they are
    opened."""
    producers: list[Producer] = []
    monkeypatch.setattr(clients, "producer", lambda broker: producers.pop(0))
    return producers


@pytest.mark.parametrize(
    ("error", "call"), [(fatal(), "poll"), (already_fatal(), "produce"), (fatal(), "flush")]
)
def test_only_fatal_errors_say_that_the_producer_failed(error: KafkaException, call: str) -> None:
    def use(producer: Producer) -> None:
        clients.send(producer, "rows", key=b"k", value=b"v", timestamp_ms=1)  # type: ignore[arg-type]
        clients.flush(producer, 0.1)  # type: ignore[arg-type]

    with pytest.raises(clients.ProducerFailedError, match="lost records"):
        use(Producer(error, (call,)))
    with pytest.raises(KafkaException):
        use(Producer(KafkaException(KafkaError(KafkaError.MSG_SIZE_TOO_LARGE)), (call,)))


@pytest.mark.parametrize("call", ["produce", "poll"])
def test_rows_are_published_by_another_producer(opened: list[Producer], call: str) -> None:
    opened += [Producer(fatal(), (call,)), Producer()]
    topic = KafkaRows(BROKER, "", FakeClock())
    with pytest.raises(UnavailableError):
        topic.deliver([Message(0, 3, b"delta")], threading.Event())
    assert topic.deliver([Message(0, 3, b"delta")], threading.Event()) == [7]


def test_dead_letters_of_the_archiver_are_sent_by_another_producer(opened: list[Producer]) -> None:
    second = Producer()
    opened += [Producer(fatal(), ("flush",)), second]
    config = ArchiverConfig(bootstrap="127.0.0.1:1", schema="s", store="s", warehouse="w")
    letters = KafkaDeadLetters(config, FakeClock())
    letter_records = [(Record("samples", 0, 5, 1, b"k", b"bad"), "undecodable", "why")]
    with pytest.raises(UnavailableError):
        letters.send(letter_records)  # type: ignore[arg-type]
    letters.send(letter_records)  # type: ignore[arg-type]
    assert second.num_produced == 1 and not opened


def test_a_dead_letter_of_the_archiver_that_kafka_refuses_is_sent_again(opened: list[Producer]) -> None:
    """Its time is this machine's, and Kafka refuses it if this clock is far ahead."""

    class RefusesFirst(Producer):
        def produce(self, topic: str, *, on_delivery: Callable[..., None] | None = None, **_: Any) -> None:
            self.num_produced += 1
            refused = KafkaError(KafkaError.INVALID_TIMESTAMP) if self.num_produced == 1 else None
            if on_delivery:
                on_delivery(refused, DeliveredMessage())

    opened += [RefusesFirst()]
    config = ArchiverConfig(bootstrap="127.0.0.1:1", schema="s", store="s", warehouse="w")
    letters = KafkaDeadLetters(config, FakeClock())
    letter_records = [(Record("samples", 0, 5, 1, b"k", b"bad"), "undecodable", "why")]
    with pytest.raises(UnavailableError, match="clock"):
        letters.send(letter_records)  # type: ignore[arg-type]
    letters.send(letter_records)  # type: ignore[arg-type]


def test_a_client_without_threads_is_no_wrong_setting() -> None:
    code = """
import os, resource
from roostream.errors import UnavailableError
from roostream.runtime.kafka import clients
from roostream.runtime.kafka.broker import Broker

used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 20), -1))  # less than the stack of a thread
try:
    clients.producer(Broker("127.0.0.1:1"))
except UnavailableError as error:
    print(error, flush=True)
os._exit(0)
"""
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert "limit of threads" in found.stdout, found.stderr
