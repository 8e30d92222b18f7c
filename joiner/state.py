"""What the joiner remembers of one Kafka key, and its bytes.

Events are kept as they came (`raw`): a sample is built from them when its request closes, a dead letter carries them.
A request goes through four phases:

    WAITING   only engagements that name it are here (orphans)
    OPEN      impressions are here; it closes at `close_at`
    CLOSED    emitted; a tombstone with labels and ids, for corrections and duplicates, until close + late horizon
    THIN      only its name, time and close time, for as long again: what still comes is `after_close` or `too_late`
"""

from __future__ import annotations

import msgspec
from msgspec import Struct, field

from roo.errors import CheckpointError

VERSION = 1
NEVER = 1 << 63
"""Later than every watermark; the end of input is `END`."""
END = (1 << 63) - 1
START = -(1 << 63)

WAITING, OPEN, CLOSED, THIN = range(4)


class Origin(Struct, array_like=True, frozen=True):
    """Where a record came from."""

    topic: str
    partition: int
    offset: int


class Impression(Struct, array_like=True):
    """An impression event: candidates shown for a request."""

    origin: Origin
    request_id: str
    session_id: int
    surface: str
    time_ms: int
    schema: int
    has_ro: bool
    digest: int  # xxh3-64 of `raw`; equal = the same event again
    item_ids: list[int]
    raw: bytes
    copies: int = 1


class Engagement(Struct, array_like=True):
    """An engagement event on an item of a request."""

    origin: Origin
    request_id: str
    event_id: int
    item_id: int
    action: str
    value: float
    time_ms: int
    raw: bytes
    copies: int = 1


class Folded(Struct, array_like=True):
    """An engagement that is part of a sample or of a correction of it."""

    event_id: int
    candidate: int  # index into the tombstone's item_ids
    action: str
    value: float
    time_ms: int  # no sooner than its item was shown


class Tombstone(Struct, array_like=True):
    """A closed request. THIN keeps only close_ms and digests."""

    close_ms: int
    reason: int = 0  # of the close
    header: bytes = b""  # the sample's, serialized
    window_ms: int = 0
    item_ids: list[int] = field(default_factory=list)
    folded: list[Folded] = field(default_factory=list)  # in (time, event id) order
    digests: list[int] = field(default_factory=list)  # of its impressions, also those that came too late: copies are duplicates


class Request(Struct, array_like=True):
    """One request in whatever phase."""

    phase: int = WAITING
    due_ms: int = NEVER  # when something is next to be done about it
    time_ms: int = NEVER  # smallest time of its impressions
    session_id: int = 0
    late: bool = False  # came behind the watermark
    impressions: list[Impression] = field(default_factory=list)  # CLOSED: the sample's, while corrections carry features
    pending: dict[int, Engagement] = field(default_factory=dict)  # by event id: neither folded, corrected nor refused yet
    refused: list[int] = field(default_factory=list)  # ids of engagements that became dead letters
    tombstone: Tombstone | None = None


class State(Struct, array_like=True):
    """All requests of one key, by request id."""

    requests: dict[str, Request] = field(default_factory=dict)

    @property
    def due_ms(self) -> int:
        """The one timer that this key needs; NEVER if none."""
        return min((r.due_ms for r in self.requests.values()), default=NEVER)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(State)


def encode(state: State) -> bytes:
    """A version byte, then msgpack."""
    return bytes((VERSION,)) + _encoder.encode(state)


def decode(data: bytes | None) -> State:
    """The state of a key; a new one for None.

    Raises:
        CheckpointError: bytes of another version, or damaged ones.
    """
    if data is None:
        return State()
    if data[:1] != bytes((VERSION,)):
        raise CheckpointError(
            f"expected joiner state of version {VERSION}, got {data[:1].hex() or 'no bytes'}; restore an older build"
        )
    try:
        return _decoder.decode(memoryview(data)[1:])
    except msgspec.MsgspecError as error:
        raise CheckpointError(f"joiner state can't be read: {error}") from None
