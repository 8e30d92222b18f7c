"""What serving reads from Redis to complete a request: one round trip, a short wait, and no waiting at all while it is away."""

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
_REST_S = 0.5  # after a failure Redis is left alone for so long, so that an outage costs one wait, not one a request


class Hydrator:
    """Thread-safe. No connection is made before the first read."""

    def __init__(self, redis_url: str, prefix: str, schema: Schema, *, clock: Clock | None = None) -> None:
        """Raises ConfigError if `redis_url` isn't one."""
        self.schema, self.url = schema, redis_url
        self._clock = clock or SystemClock()
        self._store = FeatureStore(redis_client.client(redis_url, timeout_s=_TIMEOUT_S), redis_url, prefix)
        self._rest_until_s = 0.0

    def read(
        self,
        user_id: int,
        item_ids: Sequence[int] | np.ndarray,
        time_ms: int,
        fields: EntityFields = NO_FIELDS,
    ) -> OnlineValues:
        """(RO, NRO) as `Counters.read` gives them.

        Raises:
            UnavailableError: Redis is away, or was within the last half second.
            CheckpointError: it holds states of another version.
        """
        now_s = self._clock.monotonic_s()
        if now_s < self._rest_until_s:
            raise UnavailableError(f"Redis at {self.url} did not answer a moment ago; trying again soon")
        counters = Counters(self.schema)
        try:
            self._store.load(counters, counters.keys(user_id, item_ids, time_ms, fields))
        except UnavailableError:
            self._rest_until_s = now_s + _REST_S
            raise
        return counters.read(user_id, item_ids, time_ms, fields)
