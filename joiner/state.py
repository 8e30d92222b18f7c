"""State of the join for one Kafka key: what is stored, and how it is kept in memory (local engine) or as
bytes (Flink).

State is a map of small entries, so that an event reads and writes only the entries it needs:

| entry | key | kept until |
|---|---|---|
| `KeyCounts` | – | the last request of the key is forgotten |
| `Request` | request id | it is forgotten |
| `Impression` | request id, digest | the close, or the end of the correction horizon |
| `Engagement`, then `SeenEngagement` | request id, event id | the request expires; later only pending ones |
| `LabelAggregate` | request id, candidate | the request expires |
| `RequestScope` | session, or 0 for the user | its last request is forgotten; next-request rule only |
| due list | time in ms | that time |

A request has four phases:

    WAITING   only engagements that name the request have arrived
    OPEN      impressions have arrived; the request closes at `close_ms`
    CLOSED    the sample was emitted; labels and ids are kept for corrections, until close + late horizon
    EXPIRED   only id and times are kept, for as long again: later events are dead letters

Events are stored unchanged (`raw`), because samples and dead letters copy their bytes. The engagements of a
request form a linked list, so that adding one costs the same however many there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import msgspec
from msgspec import Struct, field  # gc=False: entries contain no cycles, and there are many of them

from roostream.errors import CheckpointError

NEVER = 1 << 63
"""Later than every watermark."""
END = (1 << 63) - 1
"""The watermark at the end of input."""

VERSION = 3
"""Version of the serialized state. Savepoints of other versions are refused (docs/decisions/0012)."""

WAITING, OPEN, CLOSED, EXPIRED = range(4)
PHASES = ("waiting", "open", "closed", "expired")
GONE = -1  # before a request is known, and after it is forgotten


class Origin(Struct, array_like=True, frozen=True, gc=False):
    """Kafka position of a record."""

    topic: str
    partition: int
    offset: int


class Page(Struct, array_like=True, frozen=True, gc=False):
    """The part of an impression that the join rules need. A request is shown in one or more pages."""

    time_ms: int
    digest: int  # xxh3-64 of the record; an equal digest is a duplicate
    schema: int  # fingerprint
    session_id: int
    surface: str
    items: bytes  # candidate ids in shown order, 8 bytes little-endian each
    num_distinct: int  # distinct candidates
    copies: int = 1


class Impression(Struct, array_like=True, gc=False):
    """An impression event: candidates shown for a request."""

    origin: Origin
    request_id: str
    page: Page
    offsets: list[int]  # of the fields in `data`, see joiner/wire_offsets.py
    raw: bytes
    canonical: bytes = b""  # protobuf's own encoding of the message, if it differs from `raw`

    @property
    def time_ms(self) -> int:
        return self.page.time_ms

    @property
    def data(self) -> bytes:
        """The bytes that `offsets` refers to."""
        return self.canonical or self.raw


class Engagement(Struct, array_like=True, gc=False, tag=0):
    """An engagement event on an item of a request. As a state entry it is pending: neither joined, corrected
    nor refused."""

    origin: Origin
    request_id: str
    event_id: int
    item_id: int
    action: str
    value: float
    time_ms: int
    raw: bytes
    copies: int = 1
    # Before the close: when it takes effect; NEVER: with the pages known so far it does not
    joins_ms: int = NEVER
    row: int = -1  # of its item on the page that first showed it; -1: the item is not shown
    previous_id: int = 0  # event id of the previous engagement of the request; 0 = none


class SeenEngagement(Struct, array_like=True, gc=False, tag=1):
    """Marks an engagement that was joined, corrected or refused, so that duplicates of it are recognized."""

    event_id: int
    previous_id: int
    forgotten: bool = False  # refused and no longer counted: a copy is a new engagement


class Request(Struct, array_like=True, gc=False):
    """One request in any phase."""

    phase: int = WAITING
    due_ms: int = NEVER  # time of the request's own next step; engagements have their own due times
    time_ms: int = NEVER  # time of the opening page
    session_id: int = 0  # of the opening page
    schema: int = 0  # of the opening page
    late: bool = False  # opened behind the watermark; such a request is in no scope
    window_ms: int = 0
    next_ms: int = NEVER  # time of the next request in the same scope
    close_ms: int = NEVER
    reason: int = 0  # of the close
    terminal_ms: int = NEVER  # earliest time at which an engagement with a terminal action joins
    # Earliest join times of engagements, up to the threshold.
    joined_ms: list[int] = field(default_factory=list)
    # By (time, digest). CLOSED: kept while corrections have features.
    pages: list[Page] = field(default_factory=list)
    # WAITING, OPEN: ids of engagements that do not join so far
    waiting: list[int] = field(default_factory=list)
    num_orphans: int = 0  # engagements in `waiting` whose item is not shown
    num_events: int = 0  # distinct engagements
    num_pending: int = 0  # engagements that are not yet joined, corrected or refused
    newest_event: int = 0  # event id: head of the linked list of engagements
    scope: int | None = None  # id of the request's `RequestScope`
    header: bytes = b""  # CLOSED: the sample's header field, starting with its length
    items: bytes = b""  # CLOSED: candidate ids of the sample
    digests: bytes = b""  # CLOSED, EXPIRED: digests of all impressions, also of those that arrived too late
    aggregated: list[int] = field(default_factory=list)  # CLOSED: candidates that have a `LabelAggregate`
    num_shown: int = 0  # until the close: distinct candidates
    num_bytes: int = 0  # of the size budget: pending engagements, and until the close also pages


class LabelAggregate(Struct, array_like=True, gc=False):
    """Labels of one candidate so far; both lists have one entry a label of the schema."""

    values: list[float]
    # (time, event id) of the newest counted engagement, (0, 0) = none; empty: not needed
    newest: list[tuple[int, int]]


class RequestScope(Struct, array_like=True, gc=False):
    """Requests that close each other by the next-request rule: those of a session, or all of the user."""

    # ms, 8 bytes each, ascending: of all remembered requests
    times: bytearray = field(default_factory=bytearray)
    # (time, request id) of open requests, ascending
    open: list[tuple[int, str]] = field(default_factory=list)


class KeyCounts(Struct, array_like=True, gc=False):
    """Counts over all requests of the key."""

    num_requests: int = 0
    num_open: int = 0
    num_orphans: int = 0


K = TypeVar("K")
V = TypeVar("V")
K_contra = TypeVar("K_contra", contravariant=True)


class Table(Protocol[K_contra, V]):
    """Entries of one kind; a dict is one. A value that was changed must be set again: only setting writes
    it."""

    def get(self, key: K_contra, /) -> V | None: ...
    def __setitem__(self, key: K_contra, value: V, /) -> None: ...
    def __delitem__(self, key: K_contra, /) -> None: ...


class JoinState(Protocol):
    """All entries of one key. `Join` reads and writes state only through this interface."""

    @property
    def counts(self) -> KeyCounts:
        """Changes need no setting."""

    @property
    def requests(self) -> Table[str, Request]: ...
    @property
    def impressions(self) -> Table[tuple[str, int], Impression]: ...
    @property
    def scopes(self) -> Table[int, RequestScope]: ...

    @property
    def due(self) -> Table[int, list[tuple[str, int]]]:
        """Time → (request id, event id) to process when the watermark reaches it; event id 0 is the request
        itself. Entries that have moved to another time are ignored then."""

    def engagements_of(self, request_id: str, /) -> Table[int, Engagement | SeenEngagement]:
        """The engagements of a request by event id. Called only if there is one, or one is about to be
        added."""

    def engagement_list(self, request_id: str, request: Request, /) -> Sequence[Engagement | SeenEngagement]:
        """All engagements of a request, newest first. An engagement that was dropped and sent again keeps its
        position."""

    def drop_engagements(self, request_id: str, request: Request, /) -> None: ...

    def aggregate_of(self, request_id: str, candidate: int, /) -> LabelAggregate | None: ...
    def set_aggregates(self, request_id: str, aggregates: dict[int, LabelAggregate], /) -> None:
        """By candidate; other candidates keep theirs. The state owns the dict afterwards."""

    def drop_aggregates(self, request_id: str, candidates: Sequence[int], /) -> None:
        """Remove these aggregates of a request. `candidates`: all that have an aggregate."""


class MemoryState(Struct, array_like=True, gc=False):
    """A `JoinState` of dicts, for the local engine and tests."""

    counts: KeyCounts = field(default_factory=KeyCounts)
    requests: dict[str, Request] = field(default_factory=dict)
    impressions: dict[tuple[str, int], Impression] = field(default_factory=dict)
    engagements: dict[str, dict[int, Engagement | SeenEngagement]] = field(default_factory=dict)
    aggregates: dict[str, dict[int, LabelAggregate]] = field(default_factory=dict)
    scopes: dict[int, RequestScope] = field(default_factory=dict)
    due: dict[int, list[tuple[str, int]]] = field(default_factory=dict)

    def engagements_of(self, request_id: str, /) -> dict[int, Engagement | SeenEngagement]:
        engagements = self.engagements.get(request_id)
        if engagements is None:
            engagements = self.engagements[request_id] = {}
        return engagements

    def engagement_list(self, request_id: str, request: Request, /) -> Sequence[Engagement | SeenEngagement]:
        return [*reversed(self.engagements[request_id].values())] if request.newest_event else ()

    def drop_engagements(self, request_id: str, request: Request, /) -> None:
        self.engagements.pop(request_id, None)

    def aggregate_of(self, request_id: str, candidate: int, /) -> LabelAggregate | None:
        return self.aggregates.get(request_id, {}).get(candidate)

    def set_aggregates(self, request_id: str, aggregates: dict[int, LabelAggregate], /) -> None:
        if self.aggregates.setdefault(request_id, aggregates) is not aggregates:
            self.aggregates[request_id].update(aggregates)

    def drop_aggregates(self, request_id: str, candidates: Sequence[int], /) -> None:
        self.aggregates.pop(request_id, None)


# Serialized state: a version byte, then msgpack.

_VERSION = bytes((VERSION,))
_encode = msgspec.msgpack.Encoder().encode


def decoder(kind: type[V]) -> Callable[[bytes], V]:
    """Returns the decoder of one kind of entry.

    The decoder raises CheckpointError for bytes of another version, and for damaged ones.
    """
    decode_body = msgspec.msgpack.Decoder(kind).decode

    def decode_entry(data: bytes) -> V:
        if data[:1] != _VERSION:
            got = data[:1].hex() or "no bytes"
            remedy = "continue with the build that wrote it, or start without the savepoint"
            raise CheckpointError(f"expected joiner state of version {VERSION}, got {got}; {remedy}")
        try:
            return decode_body(memoryview(data)[1:])
        except msgspec.MsgspecError as error:
            raise CheckpointError(f"joiner state can't be decoded: {error}") from None

    return decode_entry


decode = decoder(MemoryState)


def encode(state: MemoryState) -> bytes:
    """All entries of a key, for snapshots of the local engine; inverse of `decode`."""
    return _VERSION + _encode(state)


class ByteMap(Protocol):
    """Name → bytes, of the current key; Flink's map state is one."""

    def get(self, key: str) -> bytes | None: ...
    def put(self, key: str, value: bytes) -> None: ...
    def remove(self, key: str) -> None: ...


class _SerializedTable(Generic[K, V]):
    """Entries of one kind, with a cache of those used since the last `reset`."""

    __slots__ = ("_decode", "_name", "cached", "changed", "store")

    def __init__(self, store: ByteMap, kind: type[V], name: Callable[[K], str]) -> None:
        self.store, self._name, self._decode = store, name, decoder(kind)
        self.cached: dict[K, V | None] = {}
        self.changed: dict[K, None] = {}

    def get(self, key: K, /) -> V | None:
        if key in self.cached:
            return self.cached[key]
        data = self.store.get(self._name(key))
        value = self.cached[key] = None if data is None else self._decode(data)
        return value

    def __setitem__(self, key: K, value: V, /) -> None:
        self.cached[key] = value
        self.changed[key] = None

    def __delitem__(self, key: K, /) -> None:
        self.cached[key] = None
        self.changed[key] = None

    def flush(self) -> None:
        for key in self.changed:
            value = self.cached[key]
            if value is None:
                self.store.remove(self._name(key))
            else:
                self.store.put(self._name(key), _VERSION + _encode(value))

    def reset(self) -> None:
        if self.cached:
            self.cached.clear()
            self.changed.clear()


class _RequestEngagements:
    """The engagements of one request."""

    __slots__ = ("request_id", "table")

    def __init__(
        self, table: _SerializedTable[tuple[str, int], Engagement | SeenEngagement], request_id: str
    ) -> None:
        self.table, self.request_id = table, request_id

    def get(self, event_id: int, /) -> Engagement | SeenEngagement | None:
        return self.table.get((self.request_id, event_id))

    def __setitem__(self, event_id: int, engagement: Engagement | SeenEngagement, /) -> None:
        self.table[self.request_id, event_id] = engagement

    def __delitem__(self, event_id: int, /) -> None:
        del self.table[self.request_id, event_id]


class SerializedState:
    """A `JoinState` over a map of bytes: an entry is decoded when it is first used, and written back by
    `flush` if it was set.

    For one key at a time: `reset`, one call of the join, `flush`. `reset` also undoes a call that raised.
    """

    def __init__(self, store: ByteMap) -> None:
        self.store = store
        self._counts: KeyCounts | None = None
        self._stored_counts: bytes | None = None
        self.requests: _SerializedTable[str, Request] = _SerializedTable(store, Request, "r{}".format)
        self.impressions: _SerializedTable[tuple[str, int], Impression] = _SerializedTable(
            store, Impression, _name("i")
        )
        self._engagements: _SerializedTable[tuple[str, int], Engagement | SeenEngagement] = _SerializedTable(
            store,
            Engagement | SeenEngagement,  # type: ignore[arg-type]
            _name("e"),
        )
        self._aggregates: _SerializedTable[tuple[str, int], LabelAggregate] = _SerializedTable(
            store, LabelAggregate, _name("t")
        )
        self.scopes: _SerializedTable[int, RequestScope] = _SerializedTable(store, RequestScope, "s{}".format)
        self.due: _SerializedTable[int, list[tuple[str, int]]] = _SerializedTable(
            store, list[tuple[str, int]], "d{}".format
        )
        self._tables: list[_SerializedTable[Any, Any]] = [
            self.requests,
            self.impressions,
            self._engagements,
            self._aggregates,
            self.scopes,
            self.due,
        ]

    @property
    def counts(self) -> KeyCounts:
        if self._counts is None:
            self._stored_counts = self.store.get("h")
            self._counts = KeyCounts() if self._stored_counts is None else _decode_counts(self._stored_counts)
        return self._counts

    def engagements_of(self, request_id: str, /) -> _RequestEngagements:
        return _RequestEngagements(self._engagements, request_id)

    def engagement_list(self, request_id: str, request: Request, /) -> list[Engagement | SeenEngagement]:
        found, event_id = [], request.newest_event
        while event_id:
            engagement = self._engagements.get((request_id, event_id))
            assert engagement is not None, f"engagement {event_id} of {request_id} is missing"
            found.append(engagement)
            event_id = engagement.previous_id
        return found

    def drop_engagements(self, request_id: str, request: Request, /) -> None:
        for engagement in self.engagement_list(request_id, request):
            del self._engagements[request_id, engagement.event_id]

    def aggregate_of(self, request_id: str, candidate: int, /) -> LabelAggregate | None:
        return self._aggregates.get((request_id, candidate))

    def set_aggregates(self, request_id: str, aggregates: dict[int, LabelAggregate], /) -> None:
        for candidate, aggregate in aggregates.items():
            self._aggregates[request_id, candidate] = aggregate

    def drop_aggregates(self, request_id: str, candidates: Sequence[int], /) -> None:
        for candidate in candidates:
            del self._aggregates[request_id, candidate]

    def flush(self) -> None:
        """Write all changed entries."""
        for table in self._tables:
            if table.changed:
                table.flush()
        if self._counts is not None:
            data = _VERSION + _encode(self._counts)
            if not self._counts.num_requests:
                self.store.remove("h")
            elif data != self._stored_counts:
                self.store.put("h", data)

    def reset(self) -> None:
        """Drop all cached entries, before another key or after a failure."""
        self._counts = self._stored_counts = None
        for table in self._tables:
            table.reset()


_decode_counts = decoder(KeyCounts)


def _name(kind: str) -> Callable[[tuple[str, int]], str]:
    """Names of entries with two keys. The number comes first and ends at the first dot, so no request id can
    forge a name."""
    return lambda key: f"{kind}{key[1]:x}.{key[0]}"


def index_of(packed: bytes, entry: bytes) -> int:
    """Index of an 8-byte entry in a packed column; -1 if it is absent."""
    at = packed.find(entry)
    while at >= 0:
        if not at & 7:
            return at >> 3
        at = packed.find(entry, at + 1)
    return -1
