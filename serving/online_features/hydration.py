"""Reads the online features of requests from Redis: one round trip for all requests of a pass, and
none during an outage or while Redis is slow.

The thread that scores waits for the read. So a slow Redis would make requests queue: after SLOW_READS slow
reads in a row, nothing is read for a while and answers are degraded, as in an outage. Then one read tries
again.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from roostream.errors import RoostreamError, UnavailableError
from roostream.online.counters import Keys, StateKeys, StateReader
from roostream.online.entity_fields import NO_FIELDS, EntityFields
from roostream.online.read_counters import OnlineValues
from roostream.runtime import redis_client
from roostream.runtime.clock import Clock, SystemClock
from roostream.runtime.log_rate_limit import LogRateLimit
from roostream.schema.schema import Schema
from serving.online_features.store import FeatureStore, UpdaterStates

log = logging.getLogger("roostream.serving.features")

_TIMEOUT_S = 0.05
SLOW_S = 0.02  # a read that takes longer is slow
SLOW_READS = 3
_PAUSE_S = 0.5  # after a failure, so that an outage costs one timeout, not one a request


class HydrationRequest(NamedTuple):
    """The arguments of `StateReader.keys`."""

    user_id: int
    item_ids: Sequence[int] | np.ndarray
    time_ms: int
    fields: EntityFields = NO_FIELDS


Hydrated: TypeAlias = OnlineValues | RoostreamError


class Hydrator:
    """Thread-safe. Connects at the first read."""

    def __init__(
        self,
        redis_url: str,
        prefix: str,
        schema: Schema,
        *,
        clock: Clock | None = None,
        timeout_s: float = _TIMEOUT_S,
        store: FeatureStore | None = None,
    ) -> None:
        """`store` replaces the one at `redis_url`. Raises ConfigError: `redis_url` is no Redis URL."""
        self.url, self._reader = redis_url, StateReader(schema)
        self._clock = clock or SystemClock()
        self._store = store or FeatureStore(
            redis_client.client(redis_url, timeout_s=timeout_s), redis_url, prefix
        )
        self._paused_until_s = 0.0
        self._pause_reason = ""
        self._num_slow = 0  # slow reads in a row
        self._log_rate_limit = LogRateLimit(self._clock.monotonic_s)

    def read(
        self,
        user_id: int,
        item_ids: Sequence[int] | np.ndarray,
        time_ms: int,
        fields: EntityFields = NO_FIELDS,
    ) -> OnlineValues:
        """(RO, NRO) as `StateReader.read` returns them.

        Raises:
            UnavailableError: Redis is away or slow, or was within the last 0.5 s.
            CheckpointError: it has states of another version, or damaged ones.
        """
        (hydrated,) = self.read_all([HydrationRequest(user_id, item_ids, time_ms, fields)])
        if isinstance(hydrated, RoostreamError):
            raise hydrated
        return hydrated

    def read_all(self, requests: Sequence[HydrationRequest]) -> list[Hydrated]:
        """For each request what `read` returns or raises, in one round trip."""
        keys = [self._reader.keys(*request) for request in requests]
        try:
            states = self._read_states([request_keys.stored for request_keys in keys])
        except RoostreamError as error:
            self._warn_of_damage(error)
            return [error] * len(requests)
        return [self._read_one(*request) for request in zip(keys, states, strict=True)]

    def _read_one(self, keys: StateKeys, states: UpdaterStates) -> Hydrated:
        try:
            return self._reader.read(keys, states)
        except RoostreamError as error:
            self._warn_of_damage(error)
            return error

    def _warn_of_damage(self, error: RoostreamError) -> None:
        """Log an error that does not pass by itself."""
        if not isinstance(error, UnavailableError):
            self._log_rate_limit.warning(log, "damage", "answers lack online features: %s", error)

    def _read_states(self, keys: Sequence[Keys]) -> list[UpdaterStates]:
        begin_s = self._clock.monotonic_s()
        if begin_s < self._paused_until_s:
            raise UnavailableError(f"Redis at {self.url} {self._pause_reason}; retrying soon")
        try:
            states = self._store.read(keys)
        except UnavailableError:
            self._pause(f"did not answer within the last {_PAUSE_S} s")
            raise
        took_s = self._clock.monotonic_s() - begin_s
        self._num_slow = self._num_slow + 1 if took_s > SLOW_S else 0
        if self._num_slow >= SLOW_READS:
            if self._num_slow == SLOW_READS:
                log.warning(
                    "Redis at %s is slow: %d reads in a row took more than %.0f ms, the last one %.0f ms; "
                    "answers are degraded until it is faster",
                    self.url,
                    SLOW_READS,
                    SLOW_S * 1000,
                    took_s * 1000,
                )
            self._pause(f"took {took_s * 1000:.0f} ms for a read")
        return states

    def _pause(self, reason: str) -> None:
        self._pause_reason = reason
        self._paused_until_s = self._clock.monotonic_s() + _PAUSE_S
