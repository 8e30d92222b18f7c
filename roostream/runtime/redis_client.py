"""Redis with our settings: bounded waits, and one kind of error. Holds only what can be rebuilt from the topics."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import redis

from roostream.errors import ConfigError, UnavailableError
from roostream.runtime.backoff import Backoff


def client(url: str, *, timeout_s: float) -> redis.Redis:
    """Connects on first use; every call ends within about `timeout_s`, without a second try. Thread-safe; values are bytes. Of
    rediss:// the certificate has to be of the host that is named.

    Raises:
        ConfigError: `url` is not a Redis URL.
    """
    checked = {"ssl_check_hostname": True} if url.startswith("rediss:") else {}
    try:
        return redis.Redis.from_url(
            url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s, **checked
        )
    except ValueError as error:
        raise ConfigError(f"expected redis://host:port/0, got {url!r}: {error}") from None


@contextmanager
def told(url: str) -> Iterator[None]:
    """Redis' errors in the body as UnavailableError: whether the last call acted is unknown."""
    try:
        yield
    except redis.RedisError as error:
        raise UnavailableError(f"Redis at {url} can't be used: {error}") from None


def wait_for_redis(
    connection: redis.Redis, url: str, stop: threading.Event | None = None, *, backoff: Backoff | None = None
) -> None:
    """Block until Redis answers.

    Raises:
        UnavailableError: the time limit of `backoff` passed, or `stop` was set.
    """
    (backoff or Backoff(what=f"Redis at {url}")).until(connection.ping, (redis.RedisError,), stop)
