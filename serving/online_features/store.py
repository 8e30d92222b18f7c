"""Online features in Redis: keys, values, and the one script that writes.

    <prefix>features:at             hash: topic:partition → next offset, and `cluster` → Kafka's cluster id
    <prefix>features:i:<8 bytes>    an item's state, <prefix>features:u:<8 bytes> a user's; of another entity `e<4 bytes of its
                                    name>`, of the fields of a list that was shown `l` (roo/online/)

A commit writes the states that a batch of records gave together with the offsets behind it, if the offsets that it started
from are still there. So a restart, a second updater or an emptied Redis can neither lose an event nor count it twice.

Memory, with the counters that every schema has: an item's state is 171 bytes, a user's at most 25 kB (16 a click of its history,
48 for each of 512 items), and what has had no event for 30 days is forgotten, the fields of a list after two. A counter that
the schema declares adds what docs/schema.md says; no state is larger than 256 KiB.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import redis

from roostream.online.counters import LISTS, Counters, Keys
from roostream.runtime.kafka.topics import DEFAULT_PARTITIONS, EVENTS, Partition, Progress, all_partitions
from roostream.runtime.redis_client import redis_errors
from roostream.schema.ids import table_id

_KEEP_S = 30 * 86_400  # an entity without events for so long is forgotten; memory stays bounded
_KEEP_LIST_S = 2 * 86_400  # beyond a day of event time no engagement counts by its list's fields
_SHORT = {"item": b"i:", "user": b"u:", LISTS: b"l:"}
_COMMIT = """
local n = tonumber(ARGV[1])
for i = 2, 3 * n + 1, 3 do
  if (redis.call('HGET', KEYS[1], ARGV[i]) or '') ~= ARGV[i + 1] then return 0 end
end
for i = 2, 3 * n + 1, 3 do
  if ARGV[i + 2] ~= '' then redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 2]) end
end
local m = #KEYS - 1
for k = 1, m do redis.call('SET', KEYS[k + 1], ARGV[3 * n + 1 + k], 'EX', ARGV[3 * n + 1 + m + k]) end
return 1
"""


class FeatureStore:
    """Raises UnavailableError while Redis is away. Thread-safe, but commits are one program's (`FeatureUpdater`)."""

    def __init__(
        self, connection: redis.Redis, url: str, prefix: str, num_partitions: int = DEFAULT_PARTITIONS
    ) -> None:
        self.connection, self.url = connection, url
        self.partitions = all_partitions(EVENTS, num_partitions)
        self._prefix = f"{prefix}features:".encode()
        self._commit: Any = connection.register_script(_COMMIT)

    def offsets(self, cluster: str) -> Progress:
        """Next offsets; what another Kafka cluster's events gave is deleted first, since its offsets mean nothing here."""
        with redis_errors(self.url):
            found = self.connection.hgetall(self._prefix + b"at")
            if found.pop(b"cluster", None) != cluster.encode():
                for key in self.connection.scan_iter(match=_literal(self._prefix) + b"*", count=1000):
                    self.connection.unlink(key)
                self.connection.hset(self._prefix + b"at", "cluster", cluster)
                return {}
        pairs = ((field.decode().rsplit(":", 1), int(value)) for field, value in found.items())
        return {(topic, int(partition)): offset for (topic, partition), offset in pairs}

    def load(self, counters: Counters, keys: Keys) -> None:
        """Fill the counters with these states, in one round trip. CheckpointError for foreign bytes."""
        names = list(self._names(keys))
        with redis_errors(self.url):
            values = self.connection.mget(names) if names else []
        counters.load(keys, values)

    def commit(
        self,
        before: Mapping[Partition, int],
        after: Mapping[Partition, int],
        counters: Counters,
        keys: Keys,
        cluster: str,
    ) -> bool:
        """Store these states and the offsets `after`, if the stored ones are `before` (one that it lacks: none is stored).

        False: they aren't; nothing was written, and offsets and states must be read again. **If it raises:** all of it was
        written or nothing; the offsets tell.
        """
        moves: list[Any] = ["cluster", cluster, ""]
        for partition in self.partitions:
            moves += [f"{partition[0]}:{partition[1]}", before.get(partition, ""), after.get(partition, "")]
        keeps = [
            _KEEP_LIST_S if name == LISTS else _KEEP_S
            for name, keys_k in keys.items()
            for _ in range(len(keys_k))
        ]
        found = zip(self._names(keys), counters.dump(keys), keeps, strict=True)
        kept = [(name, state, keep_s) for name, state, keep_s in found if state is not None]
        with redis_errors(self.url):
            names = [self._prefix + b"at", *(name for name, _, _ in kept)]
            states = [*(state for _, state, _ in kept), *(keep_s for _, _, keep_s in kept)]
            return bool(self._commit(keys=names, args=[len(self.partitions) + 1, *moves, *states]))

    def key(self, entity: str, key: int) -> bytes:
        """Redis' key of an entity's state."""
        return next(iter(self._names({entity: np.array([key], dtype=np.int64)})))

    def _names(self, keys: Keys) -> Iterator[bytes]:
        """One a key, in order."""
        for entity, keys_k in keys.items():
            head = self._prefix + (_SHORT.get(entity) or b"e" + struct.pack("<I", table_id(entity)) + b":")
            data = keys_k.astype("<i8").tobytes()
            yield from (head + data[at : at + 8] for at in range(0, len(data), 8))


def _literal(prefix: bytes) -> bytes:
    """Redis' glob characters escaped."""
    return b"".join(b"\\" + bytes((c,)) if c in b"*?[]^-\\" else bytes((c,)) for c in prefix)
