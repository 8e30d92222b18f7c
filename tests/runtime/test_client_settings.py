"""What our Kafka clients are told: promises rest on these, and a broker in memory wouldn't notice."""

from __future__ import annotations

from typing import Any

import pytest

from roostream.runtime.kafka import clients
from roostream.runtime.kafka.broker import Broker


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """Client → the settings that it was made with."""
    found: dict[str, dict[str, Any]] = {}
    for name in ("Consumer", "Producer", "AdminClient"):
        monkeypatch.setattr(clients, name, lambda settings, name=name: found.setdefault(name, settings))
    return found


def test_a_producer_repeats_and_reorders_nothing_and_waits_for_all_replicas(
    told: dict[str, dict[str, Any]],
) -> None:
    clients.producer(Broker("h:1"))
    settings = told["Producer"]
    assert settings["enable.idempotence"] is True and settings["acks"] == "all"
    assert settings["partitioner"] == "murmur2_random", "Java's and ours deal keys out alike"
    assert settings["delivery.timeout.ms"] >= 1_000_000_000, (
        "a broker that is away is waited for, nothing is dropped"
    )


def test_a_consumer_sees_committed_transactions_only_and_keeps_no_offsets(
    told: dict[str, dict[str, Any]],
) -> None:
    clients.consumer(Broker("h:1"), "group", auto_offset_reset="error", enable_partition_eof=True)
    settings = told["Consumer"]
    assert settings["isolation.level"] == "read_committed"
    assert settings["enable.auto.commit"] is False and settings["enable.auto.offset.store"] is False
    assert settings["auto.offset.reset"] == "error" and settings["enable.partition.eof"] is True, (
        "as the caller says"
    )
