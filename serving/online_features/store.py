"""Online features in Redis: keys, values, and the script that writes them.

    <prefix>features:at             hash: topic:partition → next offset, `cluster` → Kafka's cluster id,
                                    `topics` → ids of the event topics,
                                    `epoch:topic:partition` → next offset and the leader epoch of the record
                                    before it, and `commits:<n>` → number of commits of updater n
    <prefix>features:updaters       the highest number of updaters that there ever were
    <prefix>features:i:<8 bytes>    state of an item; `u` of a user, `l` of a shown list, `d` ids of counted
                                    events, `e<4 bytes of the name>` of other entities (roostream/online/)
    <prefix>features:i<n>:<8 bytes> what updater n > 0 counted of the item; also of other entities

A commit writes the new states of a batch together with its end offsets, if the stored offsets and the number
of the updater's commits are still those at which the batch started. Therefore a restart, a second updater of
the same number or an emptied Redis can neither lose an event nor count it twice.

Several updaters share the partitions. All events of a user are in one partition, so only one of them writes
the user's state. Of items and other entities without a user, each keeps a state of its own, and a reader
merges them. Another number of updaters may be started at any time: partitions move with their offsets, and
states that nobody writes any more are still read until they expire. Updater 0 alone deletes states.

No command has more than MAX_KEYS keys or about MAX_BYTES, so that Redis is never blocked for long. A batch
that does not fit into one command is written in pieces:

    1 stage    <prefix>features:redo:<token>:<n>    the states of each piece, which nobody reads yet
    2 commit   offsets, and `pending:<n>` = the token, in one script; from here on the batch is applied
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

import contextlib
import itertools
import logging
import secrets
import struct
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

import msgspec
import numpy as np
import redis

from roostream.errors import CheckpointError, ConfigError, UnavailableError
from roostream.online.counters import LISTS, SEEN, Counters, Keys, shared_keys
from roostream.runtime.kafka.topics import DEFAULT_PARTITIONS, EVENTS, Partition, Progress, all_partitions
from roostream.runtime.redis_client import redis_errors
from roostream.schema.ids import table_id
from serving.online_features.config import MAX_UPDATERS

log = logging.getLogger("roostream.features")

_KEEP_S = 30 * 86_400  # expiry of entities without events, which bounds memory
_KEEP_LIST_S = 2 * 86_400  # after a day of event time, engagements no longer use the fields of their list
# The ids of counted events are used for an hour of event time; an updater that was away for five hours still
# finds them.
_KEEP_SEEN_S = 6 * 3600
_KEEP = {LISTS: _KEEP_LIST_S, SEEN: _KEEP_SEEN_S}
_SHORT = {"item": b"i", "user": b"u", LISTS: b"l", SEEN: b"d"}
_KEEP_STAGED_S = 7 * 86_400  # pieces that a crash left behind
MAX_KEYS, MAX_BYTES = 1000, 512 << 10  # of one command: about 2 ms of Redis
_MAX_READ_KEYS = 2048
_PENDING = b"pending"

# ARGV: number of fields n; n times (field, value before, value after or ''); then of a small batch the states
# and their times to live, of a large one the token.
_CHECK_AND_MOVE = """
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
redis.call('HSET', KEYS[1], ARGV[3 * n + 2], ARGV[3 * n + 3])
return 1
"""
)
# ARGV: the updater's field `pending`, the token, and of _APPLY the states and their times to live.
_APPLY = """
if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then return 0 end
local m = #KEYS - 1
for k = 1, m do redis.call('SET', KEYS[k + 1], ARGV[2 + k], 'EX', ARGV[2 + m + k]) end
return 1
"""
_FINISH = """
if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], '')
return 1
"""
# ARGV: the value that the field `cluster` must have; its next value in a new hash, or '' = no change.
_DELETE = """
if redis.call('HGET', KEYS[1], 'cluster') ~= ARGV[1] then return 0 end
for k = 2, #KEYS do redis.call('UNLINK', KEYS[k]) end
if ARGV[2] ~= '' then
  redis.call('UNLINK', KEYS[1])
  redis.call('HSET', KEYS[1], 'cluster', ARGV[2])
end
return 1
"""
_RAISE_NUMBER = """
local known = redis.call('MGET', KEYS[1])[1] or '1'
if tonumber(known) < tonumber(ARGV[1]) then redis.call('SET', KEYS[1], ARGV[1]) end
"""

_ALL_AGAIN = "all online features are then counted again"  # if the key with the offsets is deleted
_DELETED = "deleted by "  # begins the field `cluster` while all states are deleted

StoredState: TypeAlias = tuple[bytes, bytes, int]
"""Redis key, state, time to live in s."""
UpdaterStates: TypeAlias = list[list[bytes | None]]
"""The states of some `Keys`, None = not stored: first one for each key; then, of each updater but the first,
one for each of `shared_keys`."""


class FeatureStore:
    """Raises UnavailableError while Redis is away. `read` is thread-safe. One `FeatureUpdater` uses the other
    methods: number `index` of `num_updaters`, which owns `partitions`."""

    def __init__(
        self,
        connection: redis.Redis,
        url: str,
        prefix: str,
        num_partitions: int = DEFAULT_PARTITIONS,
        *,
        index: int = 0,
        num_updaters: int = 1,
        max_keys: int = MAX_KEYS,
        replace_other_cluster: bool = False,
    ) -> None:
        """`replace_other_cluster`: delete the states of another Kafka cluster, and begin with the events of
        this one."""
        self.connection, self.url, self.max_keys = connection, url, max_keys
        self.replace_other_cluster = replace_other_cluster
        self.index, self.num_updaters = index, num_updaters
        self.partitions = tuple(
            p for p in all_partitions(EVENTS, num_partitions) if p[1] % num_updaters == index
        )
        self._num_read = 1  # updaters whose states are read
        self._num_commits = ""  # of this updater, as stored
        self._epochs: dict[Partition, bytes] = {}  # the fields `epoch:…`, as stored
        self._prefix = f"{prefix}features:".encode()
        self._at, self._updaters = self._prefix + b"at", self._prefix + b"updaters"
        self._commits, self._pending = f"commits:{index}", _PENDING + b":%d" % index
        self._delete: Any = connection.register_script(_DELETE)
        self._raise_number: Any = connection.register_script(_RAISE_NUMBER)
        self._commit: Any = connection.register_script(_COMMIT)
        self._commit_staged: Any = connection.register_script(_COMMIT_STAGED)
        self._apply: Any = connection.register_script(_APPLY)
        self._finish: Any = connection.register_script(_FINISH)

    def offsets(self, cluster: str, topic_ids: str = "") -> Progress:
        """Next offsets of the owned partitions. Commits that were interrupted are completed first, also of
        other updaters. States from another Kafka cluster are useless, because its offsets do not apply:
        updater 0 deletes them if `replace_other_cluster`. The same holds for topics that were created again,
        which have other `topic_ids`; "" = not known.

        Raises:
            UnavailableError: Redis is away, or updater 0 has not begun with this cluster yet; call again.
            CheckpointError: a value in Redis is damaged; the error names its key. Nothing was changed.
            ConfigError: the states belong to another Kafka cluster or other topics. Nothing was changed.
        """
        with redis_errors(self.url), self._damage(self._at, _ALL_AGAIN):
            self._warn_if_states_are_evicted()
            found = self.connection.hgetall(self._at)
            stored = found.get(b"cluster", b"").decode("utf-8", "replace")
            stored_ids = found.get(b"topics", b"").decode()
            is_other = stored != cluster or bool(topic_ids and stored_ids and topic_ids != stored_ids)
            is_in_use = bool(stored) and not stored.startswith(_DELETED)
            if is_other and is_in_use and not self.index and not self.replace_other_cluster:
                if stored == cluster:
                    raise ConfigError(
                        "expected the event topics from whose events the online features in Redis at "
                        f"{self.url} were counted, got topics that were created again; delete the features "
                        "by the setting replace_other_cluster = true"
                    )
                raise ConfigError(
                    f"expected Kafka cluster {stored}, from whose events the online features in Redis at "
                    f"{self.url} were counted, got cluster {cluster}; correct `bootstrap` or `redis`, set "
                    "another `prefix`, or delete them by the setting replace_other_cluster = true"
                )
            self._number_of_updaters(*self.connection.mget([self._updaters]))
            self._raise_number(keys=[self._updaters], args=[self.num_updaters])
            pending = {field: token for field, token in found.items() if field.startswith(_PENDING) and token}
            if not is_other and not all(self._complete(*commit) for commit in pending.items()):
                log.error(
                    "the staged states of a commit are gone from Redis at %s; all online features are "
                    "deleted and filled again from the first event",
                    self.url,
                )
                self.connection.hset(self._at, "cluster", "")  # no updater commits until all is deleted
                is_other = True
            if is_other:
                if not self._start_anew(cluster):
                    return self.offsets(cluster, topic_ids)
                found, stored_ids = {}, ""
            if topic_ids and not stored_ids:
                self.connection.hset(self._at, "topics", topic_ids)
            self._num_commits = found.get(self._commits.encode(), b"").decode()
            int(self._num_commits or 0)
            fields = {p: _field(p).encode() for p in self.partitions}
            self._epochs = {p: found.get(b"epoch:" + field, b"") for p, field in fields.items()}
            return {p: int(found[field]) for p, field in fields.items() if field in found}

    @contextlib.contextmanager
    def _damage(self, name: bytes, consequence: str) -> Iterator[None]:
        """Around the parsing of a value of Redis. Raises CheckpointError: it is not what an updater wrote."""
        try:
            yield
        except (ValueError, msgspec.MsgspecError) as error:
            raise CheckpointError(
                f"the key {name.decode()} in Redis at {self.url} is damaged ({error}); "
                f"delete it: {consequence}"
            ) from None

    def _number_of_updaters(self, value: bytes | None) -> int:
        """The highest number of updaters that there ever were. Raises CheckpointError."""
        text = b"1" if value is None else value
        if text.isdigit() and 1 <= int(text) <= MAX_UPDATERS:
            return int(text)
        raise CheckpointError(
            f"expected a number from 1 to {MAX_UPDATERS} in the key {self._updaters.decode()} in Redis at "
            f"{self.url}, got {text[:20]!r}; set it to the highest number of updaters that there ever were"
        )

    def _warn_if_states_are_evicted(self) -> None:
        """Warn if Redis deletes keys when its memory is full. A deleted state counts from zero again, so
        features become wrong without an error."""
        try:
            memory = self.connection.info("memory")
        except redis.ResponseError:  # not permitted: the access rules of older versions lack +info
            return
        policy = memory.get("maxmemory_policy", "noeviction")
        if memory.get("maxmemory") and policy != "noeviction":
            log.warning(
                "Redis at %s has maxmemory-policy %s, which silently deletes online features when memory is "
                "full; set maxmemory-policy noeviction",
                self.url,
                policy,
            )

    def leader_epochs(self, at: Progress) -> dict[Partition, int]:
        """The leader epochs that were stored with these offsets; see `RecordConsumer.leader_epochs`."""
        with self._damage(self._at, _ALL_AGAIN):
            stored = {p: map(int, text.split(b":")) for p, text in self._epochs.items() if text}
            return {p: epoch for p, (offset, epoch) in stored.items() if at.get(p) == offset}

    def load(self, counters: Counters, keys: Keys) -> None:
        """Load this updater's states into `counters`, in one round trip. Raises CheckpointError for invalid
        bytes; it names their key."""
        names = self._names(keys, self.index)
        with redis_errors(self.url):
            values = self._mget(names)
        try:
            counters.load(keys, values)
        except CheckpointError:
            single = [{name: keys_k[i : i + 1]} for name, keys_k in keys.items() for i in range(len(keys_k))]
            for name, key, value in zip(names, single, values, strict=True):
                try:
                    counters.load(key, [value])
                except CheckpointError as error:
                    raise CheckpointError(f"the key {name!r} in Redis at {self.url}: {error}") from None
            raise

    def read(self, keys: Sequence[Keys]) -> list[UpdaterStates]:
        """The stored states of each `Keys`, in one round trip; in two once there are more updaters. Raises
        CheckpointError: the number of updaters is damaged."""
        while True:
            count = self._num_read
            names = [
                [self._names(shared_keys(of_one) if n else of_one, n) for n in range(count)]
                for of_one in keys
            ]
            distinct: dict[bytes, None] = {}
            for some in itertools.chain.from_iterable(names):
                distinct |= dict.fromkeys(some)
            distinct[self._updaters] = None
            with redis_errors(self.url):
                value_of = dict(zip(distinct, self._mget(list(distinct)), strict=True))
            self._num_read = max(count, self._number_of_updaters(value_of[self._updaters]))
            if self._num_read == count:
                return [[[value_of[name] for name in some] for some in of_keys] for of_keys in names]

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
        leader_epochs: Mapping[Partition, int] = MappingProxyType({}),
    ) -> bool:
        """Store these states and the offsets `after`, if the stored offsets equal `before` (a missing
        partition: none stored). `leader_epochs`: of the records before `after`, as far as they are known.

        Returns False if they differ, or if another updater has taken over; offsets and states must be read
        again. **If it raises:** everything or nothing is committed; `offsets` shows which, and completes it.
        """
        num_commits = str(int(self._num_commits or 0) + 1)
        fields: list[Any] = ["cluster", cluster, "", self._pending, "", ""]
        fields += [self._commits, self._num_commits, num_commits]
        epochs = {p: b"%d:%d" % (after[p], epoch) for p, epoch in leader_epochs.items() if p in after}
        for p in self.partitions:
            fields += [_field(p), before.get(p, ""), after.get(p, "")]
            fields += [f"epoch:{_field(p)}", self._epochs.get(p, b""), epochs.get(p, b"")]
        moves = [len(fields) // 3, *fields]
        keeps = [_KEEP.get(name, _KEEP_S) for name, keys_k in keys.items() for _ in range(len(keys_k))]
        found = zip(self._names(keys, self.index), counters.dump(keys), keeps, strict=True)
        states = [(name, state, keep_s) for name, state, keep_s in found if state is not None]
        pieces = list(_pieces(states, self.max_keys))
        with redis_errors(self.url):
            if len(pieces) > 1:
                is_committed = self._commit_pieces(moves, pieces)
            else:
                args = [*moves, *_values(states)]
                is_committed = bool(self._commit(keys=[self._at, *_keys(states)], args=args))
        if is_committed:
            self._num_commits = num_commits
            self._epochs |= epochs
        return is_committed

    def _commit_pieces(self, moves: Sequence[Any], pieces: Sequence[Sequence[StoredState]]) -> bool:
        """Steps 1 to 4."""
        token = f"{secrets.token_hex(8)}:{len(pieces)}".encode()
        staged = self._staged(token)
        try:
            for name, piece in zip(staged, pieces, strict=True):
                self.connection.set(name, msgspec.msgpack.encode(piece), ex=_KEEP_STAGED_S)
        except redis.ResponseError:  # no memory: pieces of each try would take what becomes free
            self._unlink(staged)
            raise
        if not self._commit_staged(keys=[self._at], args=[*moves, self._pending, token]):
            self._unlink(staged)
            return False
        return self._apply_pieces(self._pending, token, pieces)

    def _complete(self, field: bytes, token: bytes) -> bool:
        """Steps 3 and 4 of a commit that was interrupted. False: its pieces are gone."""
        pieces = []
        for name in self._staged(token):
            (data,) = self.connection.mget([name])
            if data is None:
                return self.connection.hget(self._at, field) != token  # another updater has completed it
            pieces.append(msgspec.msgpack.decode(data, type=list[StoredState]))
        self._apply_pieces(field, token, pieces)
        return True

    def _apply_pieces(self, field: bytes, token: bytes, pieces: Sequence[Sequence[StoredState]]) -> bool:
        """Steps 3 and 4. False: another updater has completed the commit."""
        for piece in pieces:
            if not self._apply(keys=[self._at, *_keys(piece)], args=[field, token, *_values(piece)]):
                return False
        is_finished = bool(self._finish(keys=[self._at], args=[field, token]))
        self._unlink(self._staged(token))
        return is_finished

    def _staged(self, token: bytes) -> list[bytes]:
        """The keys of the staged pieces. The token ends with their number."""
        count = int(token.rpartition(b":")[2])
        return [self._prefix + b"redo:%s:%d" % (token.partition(b":")[0], n) for n in range(count)]

    def _start_anew(self, cluster: str) -> bool:
        """Delete all states. False: another process has begun to do so. Raises UnavailableError: that is
        updater 0's task."""
        if self.index:
            raise UnavailableError(
                f"Redis at {self.url} has no online features of this Kafka cluster yet; updater 0 begins "
                "with them, so it must run too"
            )
        # While `cluster` is this token, nobody commits. A process that begins later replaces the token.
        token = f"{_DELETED}{secrets.token_hex(8)}"
        self.connection.hset(self._at, "cluster", token)
        names = self.connection.scan_iter(match=_literal(self._prefix) + b"*", count=1000)
        states = (name for name in names if name not in (self._at, self._updaters))
        while some := list(itertools.islice(states, MAX_KEYS)):
            self._delete(keys=[self._at, *some], args=[token, ""])
        return bool(self._delete(keys=[self._at], args=[token, cluster]))

    def _unlink(self, names: Sequence[bytes]) -> None:
        for name in names:
            self.connection.unlink(name)

    def key(self, entity: str, key: int) -> bytes:
        """Redis key of an entity's state that this updater writes."""
        return self._names({entity: np.array([key], dtype=np.int64)}, self.index)[0]

    def _names(self, keys: Keys, index: int) -> list[bytes]:
        """Redis keys of updater `index`, in order."""
        shared = shared_keys(keys) if index else {}
        names: list[bytes] = []
        for entity, keys_k in keys.items():
            head = self._prefix + (_SHORT.get(entity) or b"e" + struct.pack("<I", table_id(entity)))
            head += b"%d:" % index if entity in shared else b":"
            data = keys_k.astype("<i8").tobytes()
            names += [head + data[at : at + 8] for at in range(0, len(data), 8)]
        return names


def _field(partition: Partition) -> str:
    return f"{partition[0]}:{partition[1]}"


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
    """A glob pattern of Redis that matches exactly this prefix."""
    return b"".join(b"\\" + bytes((c,)) if c in b"*?[]^-\\" else bytes((c,)) for c in prefix)
