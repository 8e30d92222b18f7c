"""Redis clients with time limits and one kind of error. Redis holds only data that can be rebuilt from the
topics."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from roostream.errors import ConfigError, UnavailableError

_CLUSTER_ERRORS = ("MOVED", "ASK", "CROSSSLOT", "CLUSTERDOWN")


def client(url: str, *, timeout_s: float) -> redis.Redis:
    """A client that connects on first use. Every call ends within about `timeout_s`, without a retry.
    Thread-safe; values are bytes. With rediss:// the server's certificate must match the host name.
    A call that the server refuses closes its connection, because after a failover a server that has become a
    replica keeps its connections, while `url` leads to another one.

    Raises:
        ConfigError: `url` is not a Redis URL.
    """
    checked = {"ssl_check_hostname": True} if url.startswith("rediss:") else {}
    try:
        return redis.Redis.from_url(
            url,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            lib_name=None,  # else CLIENT SETINFO, which an access rule can name only from Redis 7.2 on
            lib_version=None,
            retry=Retry(NoBackoff(), 0),
            retry_on_error=[redis.ResponseError],  # only closes the connection: there are 0 retries
            **checked,
        )
    except ValueError as error:
        raise ConfigError(f"expected redis://host:port/0, got {url!r}: {error}") from None


@contextmanager
def redis_errors(url: str) -> Iterator[None]:
    """Converts Redis errors of the body into UnavailableError. Whether the last call took effect is then
    unknown."""
    try:
        yield
    except redis.RedisError as error:
        text = f"Redis at {url} failed: {str(error).rstrip('.')}{_advice(url, error)}"
        raise UnavailableError(text) from None


def _advice(url: str, error: redis.RedisError) -> str:
    """What to do about a full Redis or a cluster, and what to check if one side may use TLS and the other
    does not."""
    if str(error).startswith(_CLUSTER_ERRORS):
        return "; use a Redis that is not in cluster mode"
    if isinstance(error, redis.OutOfMemoryError) or "-OOM " in str(error):  # the latter from a script
        return "; raise its maxmemory, or free some memory"
    if url.startswith("rediss:") and isinstance(error, redis.TimeoutError):
        return "; if this port is without TLS, the address is redis://…"
    if url.startswith("redis:") and "reset by peer" in str(error):
        return "; if this port expects TLS, the address is rediss://…"
    return ""
