"""Buffer of pieces that a worker has fetched from readers, and what it requests next. No I/O here.

    expect ──► splits in order ──► wanted: (split, position), the most urgent first ──► controller
                                        │                              lease holders ◄─────┘
    take ◄── buffered pieces ◄── receive ◄── next_fetch: one piece of a split whose reader is known, if there
    is room

A piece is accepted only under the newest grant that the controller has named, and only if it continues what
is buffered. So a late duplicate is rejected, and the pieces of a split arrive in order however often they had
to be requested.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from roostream.warehouse.readers.leases import Lease
from roostream.warehouse.sessions.session import TableSplit
from roostream.warehouse.sessions.session_rows import Piece


class Fetch(NamedTuple):
    """One piece to request: of `split` from `position`, at `address`."""

    split: TableSplit
    position: int
    grant: int
    address: str


class _Buffered(NamedTuple):
    start: int
    piece: Piece
    num_bytes: int


class PrefetchBuffer:
    """Not thread-safe."""

    def __init__(self, *, max_pieces: int, max_bytes: int) -> None:
        self.max_pieces, self.max_bytes = max_pieces, max_bytes
        self.counts: Counter[str] = Counter()
        self._expected: list[TableSplit] = []
        self._at_once = 1
        self._urgent: TableSplit | None = None  # `take` found nothing of it
        self._next: dict[int, int] = {}  # split → position after what is buffered of it
        self._buffered: dict[int, deque[_Buffered]] = {}
        self._holders: dict[int, tuple[int, str]] = {}  # split → (grant, address)
        self._fetching: set[int] = set()

    def expect(self, splits: Sequence[TableSplit], positions: Mapping[int, int], at_once: int) -> None:
        """As `SessionRows.expect`."""
        self._expected, self._at_once = list(splits), at_once
        known = {split.number for split in (*splits, *([self._urgent] if self._urgent else ()))}
        for of_split in (self._next, self._buffered):
            for number in of_split.keys() - known:
                of_split.pop(number)
        for split in splits:
            self._next.setdefault(
                split.number, min(max(positions.get(split.partition, split.at), split.at), split.end_position)
            )

    def take(self, split: TableSplit, position: int) -> Piece | None:
        """The piece that continues at this position. None: it is not buffered, and becomes the most urgent
        one."""
        here = self._buffered.get(split.number) or deque()
        while here and here[0].piece.end <= position:
            here.popleft()
        if here and here[0].start <= position:
            self._urgent = None
            return _rest(here.popleft().piece, position)
        if here or self._next.get(split.number) != position:  # the caller restarted from another position
            here.clear()
            self._next[split.number] = position
        self._urgent = split
        return None

    def is_buffered(self, split: TableSplit, position: int) -> bool:
        """Whether `take` would return a piece."""
        here = self._buffered.get(split.number)
        return bool(here) and any(piece.start <= position < piece.piece.end for piece in here or ())

    def wanted(self, in_flight: int) -> list[tuple[int, int]]:
        """(split, position) of what is not completely buffered, the most urgent first."""
        return [(split.number, self._next[split.number]) for split in self._by_urgency(in_flight)]

    def set_holders(self, holders: Sequence[Lease], addresses: Mapping[str, str]) -> None:
        """Note which reader holds which lease now."""
        self._holders = {
            lease.split: (lease.grant, addresses[lease.reader])
            for lease in holders
            if addresses.get(lease.reader)
        }

    def next_fetch(self, in_flight: int) -> Fetch | None:
        """The next piece to request, None if there is none or no room. `receive` or `failed` must follow."""
        for split in self._by_urgency(in_flight):
            number = split.number
            holder = self._holders.get(number)
            if holder is None or number in self._fetching:
                continue
            if self._has_room or (split is self._urgent and not self._buffered.get(number)):
                self._fetching.add(number)
                return Fetch(split, self._next[number], *holder)
        return None

    def receive(self, fetch: Fetch, piece: Piece, num_bytes: int) -> bool:
        """Buffer a piece. False: rejected, because another reader holds the lease by now, or the piece does
        not continue what is buffered."""
        number = fetch.split.number
        self._fetching.discard(number)
        has_lease = self._holders.get(number, (0, ""))[0] == fetch.grant
        continues = self._next.get(number) == fetch.position < piece.end <= fetch.split.end_position
        if not (has_lease and continues):
            self.counts["refused"] += 1
            return False
        self._buffered.setdefault(number, deque()).append(_Buffered(fetch.position, piece, num_bytes))
        self._next[number] = piece.end
        self.counts["pieces"] += 1
        self.counts["requests"] += piece.num_rows
        self.counts["bytes"] += num_bytes
        return True

    def failed(self, fetch: Fetch, *, lost: bool) -> None:
        """Note that a piece did not arrive. `lost`: do not ask that reader under this grant again."""
        self._fetching.discard(fetch.split.number)
        if lost and self._holders.get(fetch.split.number, (0, ""))[0] == fetch.grant:
            del self._holders[fetch.split.number]

    def uses(self, address: str) -> bool:
        """Whether a reader at this address holds a lease of something that is wanted."""
        return any(at == address for _, at in self._holders.values())

    @property
    def is_starved(self) -> bool:
        """Whether `take` has found nothing since the last piece."""
        return self._urgent is not None

    @property
    def fullness(self) -> float:
        """Share of the buffer in use, 0..1."""
        num_pieces, num_bytes = self.size
        return min(max(num_pieces / self.max_pieces, num_bytes / self.max_bytes), 1.0)

    @property
    def size(self) -> tuple[int, int]:
        """(pieces, bytes) in the buffer."""
        pieces = [piece for of_split in self._buffered.values() for piece in of_split]
        return len(pieces), sum(piece.num_bytes for piece in pieces)

    @property
    def _has_room(self) -> bool:
        num_pieces, num_bytes = self.size
        return num_pieces + len(self._fetching) < self.max_pieces and num_bytes < self.max_bytes

    def _by_urgency(self, in_flight: int) -> list[TableSplit]:
        first = [self._urgent] if self._urgent else []
        splits = [*first, *(split for split in self._expected if split is not self._urgent)]
        return [split for split in splits if self._next[split.number] < split.end_position][
            : max(in_flight, self._at_once)
        ]


def _rest(piece: Piece, position: int) -> Piece:
    before = int(np.searchsorted(piece.at_R, position))
    return piece.split_at(before)[1] if before else piece
