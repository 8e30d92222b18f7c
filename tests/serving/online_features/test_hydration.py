"""Hydration: serving reads the features that the updater wrote, and an unavailable Redis costs one short
wait."""

from __future__ import annotations

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from roostream.errors import CheckpointError, ConfigError, UnavailableError
from roostream.runtime import redis_client
from roostream.runtime.clock import FakeClock
from roostream.schema.schema import Schema
from serving.online_features.hydration import Hydrator
from serving.online_features.store import FeatureStore
from serving.online_features.updater import FeatureMetrics, FeatureUpdater
from tests.serving.online_features.feature_cases import (
    T0,
    MemoryEvents,
    RedisServer,
    engagement,
    impression,
    patient_hydrator,
    records_of,
)

BIG = (1 << 64) - 5


@pytest.fixture
def redis(redis: RedisServer) -> RedisServer:
    """A Redis with features of a few events."""
    store = FeatureStore(redis_client.client(redis.url, timeout_s=2.0), redis.url, "x.")
    events = [impression(BIG, [7, BIG], T0), engagement(BIG, BIG, T0 + 1000)]
    updater = FeatureUpdater(
        Schema(), store, MemoryEvents(records_of(events)), "c", FeatureMetrics(CollectorRegistry())
    )
    updater.open()
    updater.step(0)
    return redis


def test_a_request_reads_features_that_the_updater_wrote(redis: RedisServer) -> None:
    hydrator = patient_hydrator(redis, Schema())
    ids = np.array([7, BIG, 9], dtype=np.uint64).view(np.int64)
    ro, nro = hydrator.read(BIG, ids, T0 + 2000)
    assert ro["history"]["ids"] == [BIG - (1 << 64)] and ro["gap_s"] == 2.0
    assert nro["user_views"].tolist() == [1, 1, 0] and nro["user_clicks"].tolist() == [0, 1, 0]
    assert hydrator.read(BIG - (1 << 64), ids.tolist(), T0 + 2000)[0] == ro


def test_unknown_users_and_empty_requests_are_valid(redis: RedisServer) -> None:
    hydrator = patient_hydrator(redis, Schema())
    ro, nro = hydrator.read(0, [], T0)
    assert "history" not in ro and len(nro["views_1h"]) == 0
    assert hydrator.read(12345, [7], T0)[0]["history_len"] == 0.0


def test_a_failed_read_suspends_redis_reads_for_a_while(redis: RedisServer) -> None:
    clock = FakeClock()
    hydrator = Hydrator(redis.url, "x.", Schema(), clock=clock, timeout_s=5.0)
    redis.stop()
    with pytest.raises(UnavailableError):
        hydrator.read(BIG, [7, 8], T0)
    redis.start()
    with pytest.raises(UnavailableError, match="retrying soon"):
        hydrator.read(BIG, [7], T0)
    clock.advance(0.6)
    assert hydrator.read(BIG, [7], T0)[1]["user_views"].tolist() == [0.0]


def test_states_of_another_version_are_refused(redis: RedisServer) -> None:
    store = FeatureStore(redis_client.client(redis.url, timeout_s=2.0), redis.url, "x.")
    store.connection.set(store.key("user", 3), b"\x09")
    with pytest.raises(CheckpointError, match="expected an entity's state of version 2"):
        patient_hydrator(redis, Schema()).read(3, [7], T0)


def test_an_invalid_redis_address_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected redis://host:port/0, got 'localhost'"):
        Hydrator("localhost", "", Schema())
