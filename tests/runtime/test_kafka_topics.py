"""Waiting for topics, and refusing topics with another number of partitions, over a fake admin client."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from concurrent.futures import Future
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from roostream.errors import ConfigError, UnavailableError
from roostream.runtime.kafka import clients
from roostream.runtime.kafka.broker import Broker
from roostream.runtime.kafka.topics import DEAD_LETTERS, ROWS, SAMPLES


class FakeAdmin:
    """Answers `describe_topics`. The first `num_failures` calls fail with `error`."""

    def __init__(self, partitions: dict[str, int], num_failures: int, error: int) -> None:
        self.partitions, self.num_failures, self.error = partitions, num_failures, error

    def poll(self, timeout_s: float) -> None: ...

    def describe_topics(self, topics: Any, **_: Any) -> dict[str, Future[Any]]:
        if self.num_failures:
            self.num_failures -= 1
            raise KafkaException(KafkaError(self.error, "away"))
        out = {}
        for name, number in self.partitions.items():
            found: Future[Any] = Future()
            found.set_result(
                type("Described", (), {"partitions": [None] * number, "topic_id": f"id-of-{name}"})()
            )
            out[name] = found
        return out


def fake_broker(
    monkeypatch: pytest.MonkeyPatch,
    partitions: dict[str, int],
    num_failures: int = 0,
    error: int = clients.TRANSPORT,
) -> Broker:
    monkeypatch.setattr(clients, "admin", lambda broker: FakeAdmin(partitions, num_failures, error))
    return Broker("k:1")


def test_topics_are_awaited_and_returned_with_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = fake_broker(monkeypatch, {"p.samples": 8, "p.dead_letters": 1}, num_failures=1)
    found = clients.wait_for_topics(broker, "p.", (SAMPLES, DEAD_LETTERS), 8)
    assert found == {"p.samples": "id-of-p.samples", "p.dead_letters": "id-of-p.dead_letters"}


def test_a_missing_topic_is_named_with_what_creates_it_but_is_no_warning_at_first(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    broker = fake_broker(monkeypatch, {"rows": 8}, num_failures=1, error=KafkaError.UNKNOWN_TOPIC_OR_PART)
    clients.wait_for_topics(broker, "", (ROWS,), 8)
    waiting, recovered = caplog.records
    assert waiting.levelno == logging.INFO and recovered.levelno == logging.INFO
    assert "waiting for topics rows at k:1: " in waiting.message
    assert "`roostream topics create`" in waiting.message


def test_topic_ids_are_returned_by_short_names(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = fake_broker(monkeypatch, {"p.samples": 8, "p.dead_letters": 1})
    found = clients.topic_ids(broker, "p.", (SAMPLES, DEAD_LETTERS))
    assert found == {SAMPLES: "id-of-p.samples", DEAD_LETTERS: "id-of-p.dead_letters"}
    broker = fake_broker(monkeypatch, {"p.samples": 8}, num_failures=1)
    with pytest.raises(UnavailableError):
        clients.topic_ids(broker, "p.", (SAMPLES,))


@pytest.mark.parametrize("num_partitions", [4, 16])
def test_topics_with_another_number_of_partitions_are_refused(
    monkeypatch: pytest.MonkeyPatch, num_partitions: int
) -> None:
    broker = fake_broker(monkeypatch, {"rows": num_partitions})
    with pytest.raises(
        ConfigError,
        match=f"expected 8 partitions, got {num_partitions}",
    ):
        clients.wait_for_topics(broker, "", (ROWS,), 8)
    with pytest.raises(ConfigError):
        clients.check_topics(broker, "", (ROWS,), 8, threading.Event())


def test_a_background_check_ends_with_its_program(monkeypatch: pytest.MonkeyPatch) -> None:
    broker, stop = fake_broker(monkeypatch, {"rows": 8}, num_failures=10**6), threading.Event()
    stop.set()
    with pytest.raises(UnavailableError):
        clients.wait_for_topics(broker, "", (ROWS,), 8, stop)
    clients.check_topics(broker, "", (ROWS,), 8, stop)
    assert stop.is_set()


def test_a_failed_request_keeps_no_client_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client has threads and sockets, and the garbage collector runs rarely: no reference cycle may keep
    it."""
    clients_seen: list[weakref.ref[FakeAdmin]] = []

    class UnavailableAdmin(FakeAdmin):
        def describe_topics(self, topics: Any, **_: Any) -> dict[str, Future[Any]]:
            failed: Future[Any] = Future()
            failed.set_exception(KafkaException(KafkaError(clients.TRANSPORT, "away")))
            return {"p.samples": failed}

    def open_admin(broker: Broker) -> FakeAdmin:
        client = UnavailableAdmin({}, 0, clients.TRANSPORT)
        clients_seen.append(weakref.ref(client))
        return client

    monkeypatch.setattr(clients, "admin", open_admin)
    gc.disable()
    try:
        with pytest.raises(UnavailableError, match="away"):
            clients.topic_ids(Broker("k:1"), "p.", (SAMPLES,))
        assert [seen() for seen in clients_seen] == [None]
    finally:
        gc.enable()
