"""Reads the online features of a request from Redis: one round trip with a short timeout, and none during an
outage."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from roostream.errors import UnavailableError
from roostream.online.counters import Counters
from roostream.online.entity_fields import NO_FIELDS, EntityFields
from roostream.online.read_counters import OnlineValues
from roostream.runtime import redis_client
from roostream.runtime.clock import Clock, SystemClock
from roostream.schema.schema import Schema
from serving.online_features.store import FeatureStore

_TIMEOUT_S = 0.05
_PAUSE_S = 0.5  # after a failure, so that an outage costs one timeout, not one a request


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
    ) -> None:
        """Raises ConfigError: `redis_url` is no Redis URL."""
        self.schema, self.url = schema, redis_url
        self._clock = clock or SystemClock()
        self._store = FeatureStore(redis_client.client(redis_url, timeout_s=timeout_s), redis_url, prefix)
        self._paused_until_s = 0.0

    def read(
        self,
        user_id: int,
        item_ids: Sequence[int] | np.ndarray,
        time_ms: int,
        fields: EntityFields = NO_FIELDS,
    ) -> OnlineValues:
        """(RO, NRO) as `Counters.read` returns them.

        Raises:
            UnavailableError: Redis is away, or was within the last 0.5 s.
            CheckpointError: it has states of another version.
        """
        now_s = self._clock.monotonic_s()
        if now_s < self._paused_until_s:
            raise UnavailableError(
                f"Redis at {self.url} did not answer within the last {_PAUSE_S} s; retrying soon"
            )
        counters = Counters(self.schema)
        try:
            self._store.load(counters, counters.keys(user_id, item_ids, time_ms, fields))
        except UnavailableError:
            self._paused_until_s = now_s + _PAUSE_S
            raise
        return counters.read(user_id, item_ids, time_ms, fields)
