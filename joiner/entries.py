"""State as bytes: a version byte, then msgpack.

`Entries` is a `JoinState` over a map from names to bytes, as Flink keeps it: an entry is read and decoded when it is first asked
for, and written back if it was set. A `MemoryState` is encoded whole, for snapshots of the local engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from joiner.state import Engagement, Head, Impression, MemoryState, Request, Scope, Tally, Trace
from roostream.errors import CheckpointError

VERSION = 3
"""Savepoints of other versions are refused (docs/decisions/0012)."""

_VERSION = bytes((VERSION,))
_encode = msgspec.msgpack.Encoder().encode

K = TypeVar("K")
V = TypeVar("V")


class Store(Protocol):
    """Name → bytes, of the current key. Flink's map state is one."""

    def get(self, key: str) -> bytes | None: ...
    def put(self, key: str, value: bytes) -> None: ...
    def remove(self, key: str) -> None: ...


class _Table(Generic[K, V]):
    """The entries of one kind, as far as they were asked for since the last `forget`."""

    __slots__ = ("_decode", "_name", "changed", "known", "store")

    def __init__(self, store: Store, kind: type[V], name: Callable[[K], str]) -> None:
        self.store, self._name, self._decode = store, name, decoder(kind)
        self.known: dict[K, V | None] = {}
        self.changed: dict[K, None] = {}

    def get(self, key: K, /) -> V | None:
        if key in self.known:
            return self.known[key]
        data = self.store.get(self._name(key))
        value = self.known[key] = None if data is None else self._decode(data)
        return value

    def __setitem__(self, key: K, value: V, /) -> None:
        self.known[key] = value
        self.changed[key] = None

    def __delitem__(self, key: K, /) -> None:
        self.known[key] = None
        self.changed[key] = None

    def flush(self) -> None:
        for key in self.changed:
            value = self.known[key]
            if value is None:
                self.store.remove(self._name(key))
            else:
                self.store.put(self._name(key), _VERSION + _encode(value))

    def forget(self) -> None:
        if self.known:
            self.known.clear()
            self.changed.clear()


class _Events:
    """The engagements of one request."""

    __slots__ = ("request_id", "table")

    def __init__(self, table: _Table[tuple[str, int], Engagement | Trace], request_id: str) -> None:
        self.table, self.request_id = table, request_id

    def get(self, event_id: int, /) -> Engagement | Trace | None:
        return self.table.get((self.request_id, event_id))

    def __setitem__(self, event_id: int, event: Engagement | Trace, /) -> None:
        self.table[self.request_id, event_id] = event

    def __delitem__(self, event_id: int, /) -> None:
        del self.table[self.request_id, event_id]


class Entries:
    """Of one key at a time: `forget`, then a call of the join, then `flush`. A call that raised is undone by `forget`."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._head: Head | None = None
        self._head_was: bytes | None = None
        self.requests: _Table[str, Request] = _Table(store, Request, "r{}".format)
        self.impressions: _Table[tuple[str, int], Impression] = _Table(store, Impression, _named("i"))
        self._events: _Table[tuple[str, int], Engagement | Trace] = _Table(
            store,
            Engagement | Trace,  # type: ignore[arg-type]
            _named("e"),
        )
        self._tallies: _Table[tuple[str, int], Tally] = _Table(store, Tally, _named("t"))
        self.scopes: _Table[int, Scope] = _Table(store, Scope, "s{}".format)
        self.due: _Table[int, list[tuple[str, int]]] = _Table(store, list[tuple[str, int]], "d{}".format)
        self._tables: list[_Table[Any, Any]] = [
            self.requests,
            self.impressions,
            self._events,
            self._tallies,
            self.scopes,
            self.due,
        ]

    @property
    def head(self) -> Head:
        if self._head is None:
            self._head_was = self.store.get("h")
            self._head = Head() if self._head_was is None else _decode_head(self._head_was)
        return self._head

    def events_of(self, request_id: str, /) -> _Events:
        return _Events(self._events, request_id)

    def chain(self, request_id: str, request: Request, /) -> list[Engagement | Trace]:
        """Each names the one before it, so that one more is written without a look at the others."""
        found, event_id = [], request.last_event
        while event_id:
            event = self._events.get((request_id, event_id))
            assert event is not None, f"engagement {event_id} of {request_id} is missing"
            found.append(event)
            event_id = event.previous
        return found

    def forget_events(self, request_id: str, request: Request, /) -> None:
        for event in self.chain(request_id, request):
            del self._events[request_id, event.event_id]

    def tally_of(self, request_id: str, candidate: int, /) -> Tally | None:
        return self._tallies.get((request_id, candidate))

    def set_tallies(self, request_id: str, tallies: dict[int, Tally], /) -> None:
        for candidate, tally in tallies.items():
            self._tallies[request_id, candidate] = tally

    def forget_tallies(self, request_id: str, candidates: Sequence[int], /) -> None:
        for candidate in candidates:
            del self._tallies[request_id, candidate]

    def flush(self) -> None:
        """Write what has changed."""
        for table in self._tables:
            if table.changed:
                table.flush()
        if self._head is not None:
            data = _VERSION + _encode(self._head)
            if not self._head.num_requests:
                self.store.remove("h")
            elif data != self._head_was:
                self.store.put("h", data)

    def forget(self) -> None:
        """Before another key, or after a failure: nothing is known, nothing is to be written."""
        self._head = self._head_was = None
        for table in self._tables:
            table.forget()


def _named(kind: str) -> Callable[[tuple[str, int]], str]:
    """Names that no request id can forge: the number comes first and ends at the first dot."""
    return lambda key: f"{kind}{key[1]:x}.{key[0]}"


def decoder(kind: type[V]) -> Callable[[bytes], V]:
    """Bytes of `encode` → the value.

    The returned function raises CheckpointError for bytes of another version, and for damaged ones.
    """
    decode = msgspec.msgpack.Decoder(kind).decode

    def read(data: bytes) -> V:
        if data[:1] != _VERSION:
            got = data[:1].hex() or "no bytes"
            raise CheckpointError(
                f"expected joiner state of version {VERSION}, got {got}; go on with the build that wrote it, or start without it"
            )
        try:
            return decode(memoryview(data)[1:])
        except msgspec.MsgspecError as error:
            raise CheckpointError(f"joiner state can't be read: {error}") from None

    return read


_decode_head = decoder(Head)
decode = decoder(MemoryState)


def encode(state: MemoryState) -> bytes:
    """All entries of a key; `decode` reads it."""
    return _VERSION + _encode(state)
