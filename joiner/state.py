"""What the joiner remembers of one Kafka key: small entries, of which an event reads and writes only those that it touches.

A request goes through four phases:

    WAITING   only engagements that name it are here (orphans)
    OPEN      impressions are here; it closes at `close_ms`
    CLOSED    emitted; a tombstone with labels and ids, for corrections and duplicates, until close + late horizon
    THIN      only its name, time and close time, for as long again: what still comes is `after_close` or `too_late`

| entry of | key | until |
|---|---|---|
| `Head` | – | the key's last request is forgotten |
| `Request` | request id | it is forgotten |
| `Impression` | request id, digest | the close, or the end of the correction horizon |
| `Engagement`, then `Trace` | request id, event id | the request is THIN; afterwards only what is pending |
| `Tally` | request id, candidate | the request is THIN |
| `Scope` | session, or 0 for the user | its last request is forgotten; only with the next-request rule |
| due list | time in ms | that time |

Events are kept as they came (`raw`): a sample is built from them when its request closes, a dead letter carries them. The
engagements of a request are a chain, each naming the one before, so that one more costs the same however many there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from msgspec import Struct, field  # gc=False: no entry can refer to itself, and many are remembered

NEVER = 1 << 63
"""Later than every watermark; the end of input is `END`."""
END = (1 << 63) - 1

WAITING, OPEN, CLOSED, THIN = range(4)


class Origin(Struct, array_like=True, frozen=True, gc=False):
    """Where a record came from."""

    topic: str
    partition: int
    offset: int


class Page(Struct, array_like=True, frozen=True, gc=False):
    """What the rules ask of an impression."""

    time_ms: int
    digest: int  # xxh3-64 of the record; equal = the same event again
    schema: int
    session_id: int
    surface: str
    items: bytes  # candidates in shown order, 8 bytes little-endian each
    num_distinct: int  # of the candidates
    copies: int = 1


class Impression(Struct, array_like=True, gc=False):
    """An impression event: candidates shown for a request."""

    origin: Origin
    request_id: str
    page: Page
    spans: list[int]  # of `canonical` or `raw`, see joiner/spans.py
    raw: bytes
    canonical: bytes = b""  # what protobuf would have written, if that is not `raw`

    @property
    def time_ms(self) -> int:
        return self.page.time_ms

    @property
    def data(self) -> bytes:
        """The record that `spans` points into."""
        return self.canonical or self.raw


class Engagement(Struct, array_like=True, gc=False, tag=0):
    """An engagement event on an item of a request; as an entry: neither folded, corrected nor refused yet."""

    origin: Origin
    request_id: str
    event_id: int
    item_id: int
    action: str
    value: float
    time_ms: int
    raw: bytes
    copies: int = 1
    joins_ms: int = NEVER  # before the close: when it takes effect; NEVER = it does not, as things are
    row: int = -1  # of its item on the page that first showed it; -1: it is not shown
    previous: int = 0  # event id of the engagement of the same request that came before; 0 = the first


class Trace(Struct, array_like=True, gc=False, tag=1):
    """What is left of an engagement that was folded, corrected or refused, so that a copy of it is known."""

    event_id: int
    previous: int
    gone: bool = False  # given up and forgotten: a copy is a new engagement


class Request(Struct, array_like=True, gc=False):
    """One request in whatever phase."""

    phase: int = WAITING
    due_ms: int = NEVER  # when its own next step is due; its engagements have their own times
    time_ms: int = NEVER  # smallest time of its impressions
    session_id: int = 0  # this and `schema`: the opening impression's
    schema: int = 0
    late: bool = False  # came behind the watermark: it stands in no scope
    window_ms: int = 0
    next_ms: int = NEVER  # time of the next request in its scope
    close_ms: int = NEVER
    reason: int = 0  # of the close
    terminal_ms: int = NEVER  # smallest time at which an engagement with a terminal action joins
    joined_ms: list[int] = field(
        default_factory=list
    )  # smallest times at which engagements join, up to the threshold
    pages: list[Page] = field(
        default_factory=list
    )  # by (time, digest). CLOSED: the sample's, while corrections carry features
    waiting: list[int] = field(
        default_factory=list
    )  # WAITING, OPEN: ids of engagements that do not join as things are
    num_orphans: int = 0  # those of them whose item is not shown
    num_events: int = 0  # distinct engagements
    num_pending: int = 0  # of them
    last_event: int = 0  # id of the newest: the beginning of the chain
    scope: int | None = None  # the `Scope` that it stands in
    header: bytes = b""  # CLOSED: the sample's, with its length in front
    items: bytes = b""  # CLOSED: the sample's candidates
    digests: bytes = (
        b""  # CLOSED, THIN: of its impressions, also of those that came too late: copies are duplicates
    )
    tallied: list[int] = field(default_factory=list)  # CLOSED: candidates that have a `Tally`
    num_shown: int = 0  # until the close: distinct candidates
    num_bytes: int = (
        0  # of the budget (joiner/budget.py): until the close its pages, always its pending engagements
    )


class Tally(Struct, array_like=True, gc=False):
    """The labels of one candidate so far, one of each per label of the schema."""

    values: list[float]
    newest: list[
        tuple[int, int]
    ]  # (time, event id) of the newest engagement that counts, (0, 0) = none; empty: no max or last


class Scope(Struct, array_like=True, gc=False):
    """Requests that end each other's windows: a session's, or all of the user's."""

    times: bytearray = field(
        default_factory=bytearray
    )  # ms, 8 bytes each, ascending: of all that are remembered
    open: list[tuple[int, str]] = field(
        default_factory=list
    )  # (time, request id), ascending: of the open ones


class Head(Struct, array_like=True, gc=False):
    """Counts over the requests of the key."""

    num_requests: int = 0
    num_open: int = 0
    num_orphans: int = 0


K = TypeVar("K", contravariant=True)
V = TypeVar("V")


class Table(Protocol[K, V]):
    """Entries of one kind. A dict is one. A value that was got and changed has to be set again: only that writes it."""

    def get(self, key: K, /) -> V | None: ...
    def __setitem__(self, key: K, value: V, /) -> None: ...
    def __delitem__(self, key: K, /) -> None: ...


class JoinState(Protocol):
    """All entries of one key. `join.py` reads and writes them through this alone."""

    @property
    def head(self) -> Head:
        """Changes of it need no setting."""

    @property
    def requests(self) -> Table[str, Request]: ...
    @property
    def impressions(self) -> Table[tuple[str, int], Impression]: ...
    @property
    def scopes(self) -> Table[int, Scope]: ...

    @property
    def due(self) -> Table[int, list[tuple[str, int]]]:
        """What is to be looked at when the watermark reaches a time: (request id, event id), event id 0 = the request itself.
        What has moved since is passed over then."""

    def events_of(self, request_id: str, /) -> Table[int, Engagement | Trace]:
        """A request's, by event id. Asked for where there is one, or is about to be."""

    def chain(self, request_id: str, request: Request, /) -> Sequence[Engagement | Trace]:
        """All of them, newest first; one that comes again after it was forgotten keeps its place."""

    def forget_events(self, request_id: str, request: Request, /) -> None:
        """None of them is left."""

    def tally_of(self, request_id: str, candidate: int, /) -> Tally | None: ...
    def set_tallies(self, request_id: str, tallies: dict[int, Tally], /) -> None:
        """By candidate; those of other candidates stay. The mapping is the state's from here on."""

    def forget_tallies(self, request_id: str, candidates: Sequence[int], /) -> None:
        """All that the request has."""


class MemoryState(Struct, array_like=True, gc=False):
    """A `JoinState` of dicts: the local engine's, and that of tests."""

    head: Head = field(default_factory=Head)
    requests: dict[str, Request] = field(default_factory=dict)
    impressions: dict[tuple[str, int], Impression] = field(default_factory=dict)
    events: dict[str, dict[int, Engagement | Trace]] = field(default_factory=dict)
    tallies: dict[str, dict[int, Tally]] = field(default_factory=dict)
    scopes: dict[int, Scope] = field(default_factory=dict)
    due: dict[int, list[tuple[str, int]]] = field(default_factory=dict)

    def events_of(self, request_id: str, /) -> dict[int, Engagement | Trace]:
        events = self.events.get(request_id)
        if events is None:
            events = self.events[request_id] = {}
        return events

    def chain(self, request_id: str, request: Request, /) -> Sequence[Engagement | Trace]:
        return [*reversed(self.events[request_id].values())] if request.last_event else ()

    def forget_events(self, request_id: str, request: Request, /) -> None:
        self.events.pop(request_id, None)

    def tally_of(self, request_id: str, candidate: int, /) -> Tally | None:
        return self.tallies.get(request_id, {}).get(candidate)

    def set_tallies(self, request_id: str, tallies: dict[int, Tally], /) -> None:
        if self.tallies.setdefault(request_id, tallies) is not tallies:
            self.tallies[request_id].update(tallies)

    def forget_tallies(self, request_id: str, candidates: Sequence[int], /) -> None:
        self.tallies.pop(request_id, None)


def index_of(packed: bytes, entry: bytes) -> int:
    """Place of an 8-byte entry in a packed column; -1 if it is not there."""
    at = packed.find(entry)
    while at >= 0:
        if not at & 7:
            return at >> 3
        at = packed.find(entry, at + 1)
    return -1
