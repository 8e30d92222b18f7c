"""Settings of Kafka clients on which the guarantees rest. Tests over brokers in memory would not notice a
change."""

from __future__ import annotations

from typing import Any

import pytest

from roostream.runtime.kafka import clients
from roostream.runtime.kafka.broker import Broker


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
