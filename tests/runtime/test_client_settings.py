"""Settings of Kafka clients on which the guarantees rest. Tests over brokers in memory would not notice a
change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roostream.errors import ConfigError, UnavailableError
from roostream.runtime.kafka import clients
from roostream.runtime.kafka.broker import Broker, KafkaSecurity
from tests.certificates import Authority


@pytest.fixture
def client_settings(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """Client class → the settings with which it was constructed."""
    settings_by_client: dict[str, dict[str, Any]] = {}
    for name in ("Consumer", "Producer", "AdminClient"):
        monkeypatch.setattr(
            clients, name, lambda settings, name=name: settings_by_client.setdefault(name, settings)
        )
    return settings_by_client


def test_a_producer_is_idempotent_and_waits_for_all_replicas(
    client_settings: dict[str, dict[str, Any]],
) -> None:
    clients.producer(Broker("h:1"))
    settings = client_settings["Producer"]
    assert settings["enable.idempotence"] is True and settings["acks"] == "all"
    assert settings["partitioner"] == "murmur2_random", (
        "Java's producers and ours must choose the same partition for a key"
    )
    assert settings["delivery.timeout.ms"] >= 1_000_000_000, (
        "the producer must wait for an unavailable broker and drop nothing"
    )


def test_a_consumer_sees_committed_transactions_only_and_keeps_no_offsets(
    client_settings: dict[str, dict[str, Any]],
) -> None:
    clients.consumer(Broker("h:1"), "group", auto_offset_reset="error", enable_partition_eof=True)
    settings = client_settings["Consumer"]
    assert settings["isolation.level"] == "read_committed"
    assert settings["enable.auto.commit"] is False and settings["enable.auto.offset.store"] is False
    assert settings["auto.offset.reset"] == "error" and settings["enable.partition.eof"] is True, (
        "the arguments of the caller must be used"
    )


@pytest.mark.parametrize("between", ["other key", "no key"])
def test_files_that_are_being_replaced_are_no_wrong_settings(between: str, tmp_path: Path) -> None:
    """A program opens further clients after an outage, at which certificates are renewed too. A wrong setting
    would end it, or put training on hold until an operator ends that."""
    authority = Authority(tmp_path, "ours")
    certificate, key = authority.issue("worker")
    broker = Broker("127.0.0.1:1", KafkaSecurity(protocol="SSL", certificate=certificate, key=key))
    creates = (clients.admin, clients.producer, lambda broker: clients.consumer(broker, "g"))
    old, new = Path(key).read_bytes(), Path(authority.issue("other")[1]).read_bytes()
    Path(key).write_bytes(new)
    for create in creates:
        with pytest.raises(ConfigError):
            create(broker)
    Path(key).write_bytes(old)
    clients.admin(broker)
    Path(key).unlink()
    if between == "other key":
        Path(key).write_bytes(new)
    for create in creates:
        with pytest.raises(UnavailableError, match=r"kafka_security.*worker\.key|key values mismatch"):
            create(broker)
    Path(key).write_bytes(old)
    for create in creates:
        create(broker)
