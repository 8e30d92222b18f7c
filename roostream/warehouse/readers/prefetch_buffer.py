"""What a trainer's worker has of the splits that come, and what it asks for next; pure.

    expect ──► splits in order ──► wanted: (split, position), the one that is waited for first ──► controller
                                        │                                        holders ◄────────────┘
    take ◄── units here, in order ◄── came ◄── fetch: one unit of a split whose reader is known, while there is room

A unit is taken in only under the grant that was told last, and only where it goes on: what a late twin sends is refused, and what
comes is in the order of its split however often it had to be asked for.
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
    """A unit to be asked for: of `split` from `position`, at `address`."""

    split: TableSplit
    position: int
    grant: int
    address: str


class _Here(NamedTuple):
    start: int
    piece: Piece
    num_bytes: int


class PrefetchBuffer:
    """Not thread-safe."""

    def __init__(self, *, max_units: int, max_bytes: int) -> None:
        self.max_units, self.max_bytes = max_units, max_bytes
        self.counts: Counter[str] = Counter()
        self._expected: list[TableSplit] = []
        self._at_once = 1
        self._waiting: TableSplit | None = None  # of which rows were asked for and are not here
        self._next: dict[int, int] = {}  # number of a split → position behind what is here of it
        self._here: dict[int, deque[_Here]] = {}
        self._holders: dict[int, tuple[int, str]] = {}  # → grant, address
        self._fetching: set[int] = set()

    # Of whoever trains

    def expect(self, splits: Sequence[TableSplit], positions: Mapping[int, int], at_once: int) -> None:
        """See `SessionRows`."""
        self._expected, self._at_once = list(splits), at_once
        known = {split.number for split in (*splits, *([self._waiting] if self._waiting else ()))}
        for of_split in (self._next, self._here):
            for number in of_split.keys() - known:
                of_split.pop(number)
        for split in splits:
            self._next.setdefault(
                split.number, min(max(positions.get(split.partition, split.at), split.at), split.behind)
            )

    def take(self, split: TableSplit, position: int) -> Piece | None:
        """The unit that goes on there; None: it isn't here, and is what is waited for from now on."""
        here = self._here.get(split.number) or deque()
        while here and here[0].piece.end <= position:
            here.popleft()
        if here and here[0].start <= position:
            self._waiting = None
            return _behind(here.popleft().piece, position)
        if here or self._next.get(split.number) != position:  # it began anew
            here.clear()
            self._next[split.number] = position
        self._waiting = split
        return None

    def is_here(self, split: TableSplit, position: int) -> bool:
        """`take` would give it."""
        here = self._here.get(split.number)
        return bool(here) and any(it.start <= position < it.piece.end for it in here or ())

    # Of whoever fetches

    def wanted(self, in_flight: int) -> list[tuple[int, int]]:
        """(split, position) of what is not here to its end, the first first."""
        return [(split.number, self._next[split.number]) for split in self._in_turn(in_flight)]

    def told(self, holders: Sequence[Lease], addresses: Mapping[str, str]) -> None:
        """Who reads what now."""
        self._holders = {
            its.split: (its.grant, addresses[its.reader]) for its in holders if addresses.get(its.reader)
        }

    def fetch(self, in_flight: int) -> Fetch | None:
        """The next unit to be asked for; `came` or `failed` must follow. None: none that there is room for."""
        for split in self._in_turn(in_flight):
            number = split.number
            holder = self._holders.get(number)
            if holder is None or number in self._fetching:
                continue
            if self._has_room or (split is self._waiting and not self._here.get(number)):
                self._fetching.add(number)
                return Fetch(split, self._next[number], *holder)
        return None

    def came(self, fetch: Fetch, piece: Piece, num_bytes: int) -> bool:
        """False: it is refused, since its lease is another reader's by now, or it doesn't go on from what is here."""
        number = fetch.split.number
        self._fetching.discard(number)
        is_held = self._holders.get(number, (0, ""))[0] == fetch.grant
        goes_on = self._next.get(number) == fetch.position < piece.end <= fetch.split.behind
        if not (is_held and goes_on):
            self.counts["refused"] += 1
            return False
        self._here.setdefault(number, deque()).append(_Here(fetch.position, piece, num_bytes))
        self._next[number] = piece.end
        self.counts["units"] += 1
        self.counts["requests"] += piece.num_rows
        self.counts["bytes"] += num_bytes
        return True

    def failed(self, fetch: Fetch, *, lost: bool) -> None:
        """It didn't come; `lost`: that reader isn't asked for it under this grant again."""
        self._fetching.discard(fetch.split.number)
        if lost and self._holders.get(fetch.split.number, (0, ""))[0] == fetch.grant:
            del self._holders[fetch.split.number]

    def knows(self, address: str) -> bool:
        """It reads something that is wanted."""
        return any(at == address for _, at in self._holders.values())

    @property
    def waits(self) -> bool:
        """Rows were asked for and are not here."""
        return self._waiting is not None

    @property
    def fullness(self) -> float:
        """Of the buffer, of 1."""
        units, num_bytes = self.held
        return min(max(units / self.max_units, num_bytes / self.max_bytes), 1.0)

    @property
    def held(self) -> tuple[int, int]:
        """Units here, and their bytes."""
        its = [here for of_split in self._here.values() for here in of_split]
        return len(its), sum(here.num_bytes for here in its)

    @property
    def _has_room(self) -> bool:
        units, num_bytes = self.held
        return units + len(self._fetching) < self.max_units and num_bytes < self.max_bytes

    def _in_turn(self, in_flight: int) -> list[TableSplit]:
        first = [self._waiting] if self._waiting else []
        its = [*first, *(split for split in self._expected if split is not self._waiting)]
        return [split for split in its if self._next[split.number] < split.behind][
            : max(in_flight, self._at_once)
        ]


def _behind(piece: Piece, position: int) -> Piece:
    """What of it lies at `position` and behind."""
    before = int(np.searchsorted(piece.at_R, position))
    return piece.parted(before)[1] if before else piece
