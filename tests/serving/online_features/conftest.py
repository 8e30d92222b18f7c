"""Fixtures with a real Redis server, one for all tests of a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from redis import Redis

from tests.serving.online_features.feature_cases import RedisServer, find_redis


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    if find_redis() is None:
        pytest.skip("no redis-server on PATH nor in the environment: run `make setup`")
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


@pytest.fixture
def redis(redis_server: RedisServer) -> RedisServer:
    """A running, empty Redis."""
    if redis_server.is_running:
        with Redis.from_url(redis_server.url) as client:
            client.flushall()
    else:
        redis_server.start()
    return redis_server
