"""Online features in Redis: keys, values, and the script that writes them.

    <prefix>features:at             hash: topic:partition → next offset, and `cluster` → Kafka's cluster id
    <prefix>features:i:<8 bytes>    state of an item; `u` of a user, `l` of a shown list, `d` ids of counted
                                    events, `e<4 bytes of the name>` of other entities (roostream/online/)

A commit writes the new states of a batch together with its end offsets, if the stored offsets are still those
at which the batch started. Therefore a restart, a second updater or an emptied Redis can neither lose an
event nor count it twice.

No command has more than MAX_KEYS keys or about MAX_BYTES, so that Redis is never blocked for long. A batch
that does not fit into one command is written in pieces:

    1 stage    <prefix>features:redo:<token>:<n>    the states of each piece, which nobody reads yet
    2 commit   offsets, and `pending` = the token, in one script; from here on the batch is applied
    3 apply    each piece, in a script that checks `pending`: an updater that was replaced writes nothing
    4 finish   `pending` is cleared, the staged pieces are deleted

A crash before 2 leaves the old states; after it, the next `offsets` applies the staged pieces again. A piece
holds whole states, so applying it twice changes nothing.

Memory with the built-in counters: 171 bytes an item and at most 25 kB a user (16 a click of the history, 48
for each of 512 items). The ids of the counted events take at most 4 kB of a user. Entities without events
expire after 30 days, lists after two, the ids of counted events after six hours. Declared counters add what
docs/schema.md says; no state exceeds 256 KiB.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np
import redis

from roostream.online.counters import LISTS, SEEN, Counters, Keys
from roostream.runtime.kafka.topics import DEFAULT_PARTITIONS, EVENTS, Partition, Progress, all_partitions
from roostream.runtime.redis_client import redis_errors
from roostream.schema.ids import table_id

log = logging.getLogger("roostream.features")

_KEEP_S = 30 * 86_400  # expiry of entities without events, which bounds memory
_KEEP_LIST_S = 2 * 86_400  # after a day of event time, engagements no longer use the fields of their list
# The ids of counted events are used for an hour of event time; an updater that was away for five hours still
# finds them.
_KEEP_SEEN_S = 6 * 3600
_KEEP = {LISTS: _KEEP_LIST_S, SEEN: _KEEP_SEEN_S}
_SHORT = {"item": b"i:", "user": b"u:", LISTS: b"l:", SEEN: b"d:"}
_KEEP_STAGED_S = 7 * 86_400  # pieces that a crash left behind
MAX_KEYS, MAX_BYTES = 1000, 512 << 10  # of one command: about 2 ms of Redis
_MAX_READ_KEYS = 2048
_PENDING = b"pending"

# ARGV: number of fields n; n times (field, value before, value after or ''); then of a small batch the states
# and their times to live, of a large one the token.
_CHECK_AND_MOVE = """
if (redis.call('HGET', KEYS[1], 'pending') or '') ~= '' then return 0 end
local n = tonumber(ARGV[1])
for i = 2, 3 * n + 1, 3 do
  if (redis.call('HGET', KEYS[1], ARGV[i]) or '') ~= ARGV[i + 1] then return 0 end
end
for i = 2, 3 * n + 1, 3 do
  if ARGV[i + 2] ~= '' then redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 2]) end
end
"""
_COMMIT = (
    _CHECK_AND_MOVE
    + """
local m = #KEYS - 1
for k = 1, m do redis.call('SET', KEYS[k + 1], ARGV[3 * n + 1 + k], 'EX', ARGV[3 * n + 1 + m + k]) end
return 1
"""
)
_COMMIT_STAGED = (
    _CHECK_AND_MOVE
    + """
redis.call('HSET', KEYS[1], 'pending', ARGV[3 * n + 2])
return 1
"""
)
_APPLY = """
if redis.call('HGET', KEYS[1], 'pending') ~= ARGV[1] then return 0 end
local m = #KEYS - 1
for k = 1, m do redis.call('SET', KEYS[k + 1], ARGV[1 + k], 'EX', ARGV[1 + m + k]) end
return 1
"""
_FINISH = """
if redis.call('HGET', KEYS[1], 'pending') ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'pending', '')
return 1
"""

StoredState: TypeAlias = tuple[bytes, bytes, int]
"""Redis key, state, time to live in s."""


class FeatureStore:
    """Raises UnavailableError while Redis is away. Thread-safe; only one program commits
    (`FeatureUpdater`)."""

    def __init__(
        self,
        connection: redis.Redis,
        url: str,
        prefix: str,
        num_partitions: int = DEFAULT_PARTITIONS,
        *,
        max_keys: int = MAX_KEYS,
    ) -> None:
        self.connection, self.url, self.max_keys = connection, url, max_keys
        self.partitions = all_partitions(EVENTS, num_partitions)
        self._prefix = f"{prefix}features:".encode()
        self._at = self._prefix + b"at"
        self._commit: Any = connection.register_script(_COMMIT)
        self._commit_staged: Any = connection.register_script(_COMMIT_STAGED)
        self._apply: Any = connection.register_script(_APPLY)
        self._finish: Any = connection.register_script(_FINISH)

    def offsets(self, cluster: str) -> Progress:
        """Next offsets. A commit that was interrupted is completed first. States from another Kafka cluster
        are deleted, because its offsets do not apply."""
        with redis_errors(self.url):
            found = self.connection.hgetall(self._at)
            is_other = found.pop(b"cluster", None) != cluster.encode()
            pending = b"" if is_other else found.pop(_PENDING, b"")
            if pending and not self._complete(pending):
                log.error(
                    "the staged states of a commit are gone from Redis at %s; all online features are "
                    "deleted and filled again from the first event",
                    self.url,
                )
                is_other = True
            if is_other:
                self._delete_all()
                self.connection.hset(self._at, "cluster", cluster)
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
            value_of = dict(zip(distinct, self._mget(distinct), strict=True))
        return [[value_of[name] for name in its_names] for its_names in names]

    def _mget(self, names: Sequence[bytes]) -> list[bytes | None]:
        """The values of any number of keys, in one round trip of bounded commands."""
        if len(names) <= _MAX_READ_KEYS:
            return self.connection.mget(names) if names else []
        pipeline = self.connection.pipeline(transaction=False)
        for start in range(0, len(names), _MAX_READ_KEYS):
            pipeline.mget(names[start : start + _MAX_READ_KEYS])
        return list(itertools.chain.from_iterable(pipeline.execute()))

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

        Returns False if they differ, or if another updater has taken over; offsets and states must be read
        again. **If it raises:** everything or nothing is committed; `offsets` shows which, and completes it.
        """
        fields: list[Any] = ["cluster", cluster, ""]
        for partition in self.partitions:
            fields += [f"{partition[0]}:{partition[1]}", before.get(partition, ""), after.get(partition, "")]
        moves = [len(self.partitions) + 1, *fields]
        keeps = [_KEEP.get(name, _KEEP_S) for name, keys_k in keys.items() for _ in range(len(keys_k))]
        found = zip(self._names(keys), counters.dump(keys), keeps, strict=True)
        states = [(name, state, keep_s) for name, state, keep_s in found if state is not None]
        pieces = list(_pieces(states, self.max_keys))
        with redis_errors(self.url):
            if len(pieces) > 1:
                return self._commit_pieces(moves, pieces)
            return bool(self._commit(keys=[self._at, *_keys(states)], args=[*moves, *_values(states)]))

    def _commit_pieces(self, moves: Sequence[Any], pieces: Sequence[Sequence[StoredState]]) -> bool:
        """Steps 1 to 4."""
        token = f"{secrets.token_hex(8)}:{len(pieces)}".encode()
        staged = self._staged(token)
        for name, piece in zip(staged, pieces, strict=True):
            self.connection.set(name, msgspec.msgpack.encode(piece), ex=_KEEP_STAGED_S)
        if not self._commit_staged(keys=[self._at], args=[*moves, token]):
            self._unlink(staged)
            return False
        return self._apply_pieces(token, pieces)

    def _complete(self, token: bytes) -> bool:
        """Steps 3 and 4 of a commit that was interrupted. False: its pieces are gone."""
        pieces = []
        for name in self._staged(token):
            (data,) = self.connection.mget([name])
            if data is None:
                return self.connection.hget(self._at, _PENDING) != token  # another updater has completed it
            pieces.append(msgspec.msgpack.decode(data, type=list[StoredState]))
        self._apply_pieces(token, pieces)
        return True

    def _apply_pieces(self, token: bytes, pieces: Sequence[Sequence[StoredState]]) -> bool:
        """Steps 3 and 4. False: another updater has completed the commit."""
        for piece in pieces:
            if not self._apply(keys=[self._at, *_keys(piece)], args=[token, *_values(piece)]):
                return False
        is_finished = bool(self._finish(keys=[self._at], args=[token]))
        self._unlink(self._staged(token))
        return is_finished

    def _staged(self, token: bytes) -> list[bytes]:
        """The keys of the staged pieces. The token ends with their number."""
        count = int(token.rpartition(b":")[2])
        return [self._prefix + b"redo:%s:%d" % (token.partition(b":")[0], n) for n in range(count)]

    def _delete_all(self) -> None:
        names = self.connection.scan_iter(match=_literal(self._prefix) + b"*", count=1000)
        while some := list(itertools.islice(names, MAX_KEYS)):
            self.connection.unlink(*some)

    def _unlink(self, names: Sequence[bytes]) -> None:
        for name in names:
            self.connection.unlink(name)

    def key(self, entity: str, key: int) -> bytes:
        """Redis key of an entity's state."""
        return next(iter(self._names({entity: np.array([key], dtype=np.int64)})))

    def _names(self, keys: Keys) -> Iterator[bytes]:
        """Redis keys, in order."""
        for entity, keys_k in keys.items():
            head = self._prefix + (_SHORT.get(entity) or b"e" + struct.pack("<I", table_id(entity)) + b":")
            data = keys_k.astype("<i8").tobytes()
            yield from (head + data[at : at + 8] for at in range(0, len(data), 8))


def _pieces(states: Sequence[StoredState], max_keys: int) -> Iterator[list[StoredState]]:
    """The states in pieces of at most `max_keys` and, apart from single large states, MAX_BYTES."""
    piece: list[StoredState] = []
    num_bytes = 0
    for state in states:
        size = len(state[0]) + len(state[1])
        if piece and (len(piece) >= max_keys or num_bytes + size > MAX_BYTES):
            yield piece
            piece, num_bytes = [], 0
        piece.append(state)
        num_bytes += size
    if piece:
        yield piece


def _keys(states: Sequence[StoredState]) -> list[bytes]:
    return [name for name, _, _ in states]


def _values(states: Sequence[StoredState]) -> list[Any]:
    """The states, then their times to live."""
    return [*(state for _, state, _ in states), *(keep_s for _, _, keep_s in states)]


def _literal(prefix: bytes) -> bytes:
    """Escape glob characters of Redis."""
    return b"".join(b"\\" + bytes((c,)) if c in b"*?[]^-\\" else bytes((c,)) for c in prefix)
