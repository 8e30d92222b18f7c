"""Online features in Redis: keys, values, and the script that writes them.

    <prefix>features:at             hash: topic:partition → next offset, and `cluster` → Kafka's cluster id
    <prefix>features:i:<8 bytes>    state of an item; `u` of a user, `l` of a shown list, `d` ids of counted
                                    events, `e<4 bytes of the name>` of other entities (roostream/online/)

A commit writes the new states of a batch together with its end offsets, if the stored offsets are still those
at which the batch started. Therefore a restart, a second updater or an emptied Redis can neither lose an
event nor count it twice.

Memory with the built-in counters: 171 bytes an item, at most 25 kB a user (16 a click of the history, 48 for
each of 512 items), and at most 4 kB of a user for the ids of the counted events. Entities without events
expire after 30 days, lists after two, the ids of counted events after six hours. Declared counters add what
docs/schema.md says; no state exceeds 256 KiB.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import redis

from roostream.online.counters import LISTS, SEEN, Counters, Keys
from roostream.runtime.kafka.topics import DEFAULT_PARTITIONS, EVENTS, Partition, Progress, all_partitions
from roostream.runtime.redis_client import redis_errors
from roostream.schema.ids import table_id

_KEEP_S = 30 * 86_400  # expiry of entities without events, which bounds memory
_KEEP_LIST_S = 2 * 86_400  # after a day of event time, engagements no longer use the fields of their list
# The ids of counted events are used for an hour of event time; an updater that was away for five hours still
# finds them.
_KEEP_SEEN_S = 6 * 3600
_KEEP = {LISTS: _KEEP_LIST_S, SEEN: _KEEP_SEEN_S}
_SHORT = {"item": b"i:", "user": b"u:", LISTS: b"l:", SEEN: b"d:"}
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
    """Raises UnavailableError while Redis is away. Thread-safe; only one program commits
    (`FeatureUpdater`)."""

    def __init__(
        self, connection: redis.Redis, url: str, prefix: str, num_partitions: int = DEFAULT_PARTITIONS
    ) -> None:
        self.connection, self.url = connection, url
        self.partitions = all_partitions(EVENTS, num_partitions)
        self._prefix = f"{prefix}features:".encode()
        self._commit: Any = connection.register_script(_COMMIT)

    def offsets(self, cluster: str) -> Progress:
        """Next offsets. States from another Kafka cluster are deleted first, because its offsets do not
        apply."""
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
        """Load these states into `counters`, in one round trip. Raises CheckpointError for invalid bytes."""
        (values,) = self.read([keys])
        counters.load(keys, values)

    def read(self, keys: Sequence[Keys]) -> list[list[bytes | None]]:
        """The stored states of each `Keys`, in one round trip; None = not stored."""
        names = [list(self._names(its_keys)) for its_keys in keys]
        distinct = list(dict.fromkeys(itertools.chain.from_iterable(names)))
        with redis_errors(self.url):
            found = self.connection.mget(distinct) if distinct else []
        value_of = dict(zip(distinct, found, strict=True))
        return [[value_of[name] for name in its_names] for its_names in names]

    def commit(
        self,
        before: Mapping[Partition, int],
        after: Mapping[Partition, int],
        counters: Counters,
        keys: Keys,
        cluster: str,
    ) -> bool:
        """Store these states and the offsets `after`, if the stored offsets equal `before` (a missing
        partition: none stored).

        Returns False if they differ; nothing was written, and offsets and states must be read again. **If it
        raises:** everything or nothing was written; the stored offsets show which.
        """
        moves: list[Any] = ["cluster", cluster, ""]
        for partition in self.partitions:
            moves += [f"{partition[0]}:{partition[1]}", before.get(partition, ""), after.get(partition, "")]
        keeps = [_KEEP.get(name, _KEEP_S) for name, keys_k in keys.items() for _ in range(len(keys_k))]
        found = zip(self._names(keys), counters.dump(keys), keeps, strict=True)
        kept = [(name, state, keep_s) for name, state, keep_s in found if state is not None]
        with redis_errors(self.url):
            names = [self._prefix + b"at", *(name for name, _, _ in kept)]
            states = [*(state for _, state, _ in kept), *(keep_s for _, _, keep_s in kept)]
            return bool(self._commit(keys=names, args=[len(self.partitions) + 1, *moves, *states]))

    def key(self, entity: str, key: int) -> bytes:
        """Redis key of an entity's state."""
        return next(iter(self._names({entity: np.array([key], dtype=np.int64)})))

    def _names(self, keys: Keys) -> Iterator[bytes]:
        """Redis keys, in order."""
        for entity, keys_k in keys.items():
            head = self._prefix + (_SHORT.get(entity) or b"e" + struct.pack("<I", table_id(entity)) + b":")
            data = keys_k.astype("<i8").tobytes()
            yield from (head + data[at : at + 8] for at in range(0, len(data), 8))


def _literal(prefix: bytes) -> bytes:
    """Escape glob characters of Redis."""
    return b"".join(b"\\" + bytes((c,)) if c in b"*?[]^-\\" else bytes((c,)) for c in prefix)
