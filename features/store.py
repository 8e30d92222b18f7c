"""Online features in Redis: keys, values, and the one script that writes.

    <prefix>features:at             hash: topic:partition → next offset, and `cluster` → Kafka's cluster id
    <prefix>features:i:<8 bytes>    an item's state, <prefix>features:u:<8 bytes> a user's (roo/counter_state.py)

A commit writes the states that a batch of records gave together with the offsets behind it, if the offsets that it started
from are still there. So a restart, a second updater or an emptied Redis can neither lose an event nor count it twice.

Memory: an item's state is 113 bytes, a user's at most 21 + 24 a click of its history + 40 for each of 512 items (21.7 kB with the
default history), and what has had no event for 30 days is forgotten. So it ends at about 24 kB for each user of a month.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import redis

from roo.counters import Counters, as_int64
from roo.schema import Schema
from runtime.kafka.topics import DEFAULT_PARTITIONS, EVENTS, Partition, Progress, all_partitions
from runtime.redis_client import told

_KEEP_S = 30 * 86_400  # an item or user without events for so long is forgotten; memory stays bounded
_COMMIT = """
local n = tonumber(ARGV[1])
for i = 2, 3 * n + 1, 3 do
  if (redis.call('HGET', KEYS[1], ARGV[i]) or '') ~= ARGV[i + 1] then return 0 end
end
for i = 2, 3 * n + 1, 3 do
  if ARGV[i + 2] ~= '' then redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 2]) end
end
for k = 2, #KEYS do redis.call('SET', KEYS[k], ARGV[3 * n + k], 'EX', ARGV[#ARGV]) end
return 1
"""


class FeatureStore:
    """Raises UnavailableError while Redis is away. Thread-safe, but commits are one program's (`FeatureUpdater`)."""

    def __init__(self, connection: redis.Redis, url: str, prefix: str, num_partitions: int = DEFAULT_PARTITIONS) -> None:
        self.connection, self.url = connection, url
        self.partitions = all_partitions(EVENTS, num_partitions)
        self._prefix = f"{prefix}features:".encode()
        self._commit: Any = connection.register_script(_COMMIT)

    def offsets(self, cluster: str) -> Progress:
        """Next offsets; what another Kafka cluster's events gave is deleted first, since its offsets mean nothing here."""
        with told(self.url):
            found = self.connection.hgetall(self._prefix + b"at")
            if found.pop(b"cluster", None) != cluster.encode():
                for key in self.connection.scan_iter(match=_literal(self._prefix) + b"*", count=1000):
                    self.connection.unlink(key)
                self.connection.hset(self._prefix + b"at", "cluster", cluster)
                return {}
        pairs = ((field.decode().rsplit(":", 1), int(value)) for field, value in found.items())
        return {(topic, int(partition)): offset for (topic, partition), offset in pairs}

    def load(self, schema: Schema, item_ids: Sequence[int] | np.ndarray, user_ids: Sequence[int]) -> Counters:
        """Counters with the states of these items and users, in one round trip. CheckpointError for foreign bytes."""
        keys = [self.item_key(i) for i in as_int64(item_ids).tolist()] + [self.user_key(u) for u in user_ids]
        with told(self.url):
            values = self.connection.mget(keys) if keys else []
        counters = Counters(schema)
        counters.load_items(item_ids, values[: len(item_ids)])
        for user_id, value in zip(user_ids, values[len(item_ids) :], strict=True):
            counters.load_user(user_id, value)
        return counters

    def commit(
        self, before: Mapping[Partition, int], after: Mapping[Partition, int], states: Mapping[bytes, bytes], cluster: str
    ) -> bool:
        """Store `states` and the offsets `after`, if the stored ones are `before` (a partition that it lacks: none is stored).

        False: they aren't; nothing was written, and offsets and states must be read again. **If it raises:** all of it was
        written or nothing; the offsets tell.
        """
        moves: list[Any] = ["cluster", cluster, ""]
        for partition in self.partitions:
            moves += [f"{partition[0]}:{partition[1]}", before.get(partition, ""), after.get(partition, "")]
        with told(self.url):
            keys = [self._prefix + b"at", *states]
            return bool(self._commit(keys=keys, args=[len(self.partitions) + 1, *moves, *states.values(), _KEEP_S]))

    def item_key(self, item_id: int) -> bytes:
        return self._prefix + b"i:" + item_id.to_bytes(8, "little", signed=item_id < 0)

    def user_key(self, user_id: int) -> bytes:
        return self._prefix + b"u:" + user_id.to_bytes(8, "little", signed=user_id < 0)


def _literal(prefix: bytes) -> bytes:
    """Redis' glob characters escaped."""
    return b"".join(b"\\" + bytes((c,)) if c in b"*?[]^-\\" else bytes((c,)) for c in prefix)
