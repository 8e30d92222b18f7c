"""The core of a reader program: reads leased splits and keeps their rows, in a bounded buffer, until workers
fetch them (Zhao et al., §III: a DPP worker without state).

Rows are read as a worker would read them itself, so the batches are equal bit for bit. A piece is kept until
the next piece of its split is requested, so a lost answer can be repeated.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from roostream.errors import CheckpointError, ConfigError, FencedError, RoostreamError
from roostream.runtime.clock import Clock
from roostream.runtime.rpc.transport import Header
from roostream.warehouse.readers.leases import Lease
from roostream.warehouse.readers.piece_frames import encode_piece, total_bytes
from roostream.warehouse.sessions.session import TableSplit
from roostream.warehouse.sessions.session_rows import LocalSessionRows, Piece

_WAIT_SLICE_S = 0.5  # a waiter checks its condition this often


class EncodedPiece(NamedTuple):
    """Rows of a split from position `start` to `end`, encoded for sending."""

    start: int
    end: int
    header: Header
    arrays: list[np.ndarray]


@dataclasses.dataclass(kw_only=True, eq=False)
class _LeasedSplit:
    lease: Lease
    split: TableSplit
    read_to: int
    pieces: deque[EncodedPiece] = dataclasses.field(default_factory=deque)
    num_waiters: int = 0
    error: RoostreamError | None = None


@dataclasses.dataclass(kw_only=True)
class ReaderCounts:
    """Counters since the start."""

    pieces: int = 0
    requests: int = 0
    sent_bytes: int = 0
    splits: int = 0  # leases accepted
    busy_s: float = 0.0  # time spent reading


class SplitReader:
    """Reads one session after the other. `step` is called by one thread, the other methods by any."""

    def __init__(self, clock: Clock, *, max_bytes: int, max_pieces: int, max_requests_s: int = 0) -> None:
        self.clock, self.max_requests_s = clock, max_requests_s
        self.max_bytes, self.max_pieces = max_bytes, max_pieces
        self.counts = ReaderCounts()
        self._rows: LocalSessionRows | None = None
        self._schema_digest = ""
        self._held: dict[int, _LeasedSplit] = {}
        self._changed = threading.Condition()
        self._not_before_s = 0.0

    def start_session(self, rows: LocalSessionRows | None, schema_digest: str = "") -> None:
        """Read this session from now on (None: none); forget all splits."""
        with self._changed:
            self._rows, self._schema_digest, self._held = rows, schema_digest, {}
            self._changed.notify_all()

    def set_leases(self, leases: Sequence[Lease]) -> None:
        """Read these splits, in this order, and no others. Pieces of a lease that is unchanged are kept."""
        with self._changed:
            assert self._rows is not None
            splits = self._rows.session.order.splits
            before, self._held = self._held, {}
            for lease in leases:
                known = before.get(lease.split)
                if known is not None and known.lease.grant == lease.grant:
                    self._held[lease.split] = known
                elif lease.split < len(splits):
                    self._held[lease.split] = _LeasedSplit(
                        lease=lease, split=splits[lease.split], read_to=lease.position
                    )
                    self.counts.splits += 1
            self._changed.notify_all()

    @property
    def has_room(self) -> bool:
        """Whether the buffer has room for one more piece."""
        pieces = [piece for held in self._held.values() for piece in held.pieces]
        num_bytes = sum(total_bytes(piece.arrays) for piece in pieces)
        return len(pieces) < self.max_pieces and num_bytes < self.max_bytes

    @property
    def has_leases(self) -> bool:
        """Whether it has any lease."""
        with self._changed:
            return bool(self._held)

    def num_free_slots(self, max_splits: int) -> int:
        """How many more leases it could work on."""
        with self._changed:
            return self._num_free(max_splits)

    def wait_free_slot(self, max_splits: int, timeout_s: float) -> None:
        """Wait until it could work on one more lease, or until the timeout."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_free(max_splits), timeout_s)

    def _num_free(self, max_splits: int) -> int:
        unread = sum(held.read_to < held.split.end_position for held in self._held.values())
        return max(max_splits - unread, 0) if self.has_room or not self._held else 0

    def step(self, timeout_s: float) -> bool:
        """Read the next rows that there is room for; wait for leases or room if there are none.

        Returns False if nothing was read.

        Raises:
            UnavailableError: the table cannot be read now; call again.
        """
        with self._changed:
            self._changed.wait_for(self._next, timeout_s)
            held, rows, schema_digest = self._next(), self._rows, self._schema_digest
            if held is None or rows is None:
                return False
            position = held.read_to
        began_s = self.clock.monotonic_s()
        try:
            piece = rows.piece(held.split, position)
        except (CheckpointError, ConfigError) as error:
            with self._changed:
                held.error = error
                self._changed.notify_all()
            return False
        pieces = [
            EncodedPiece(start, part.end, *encode_piece(part, schema_digest))
            for start, part in _parts(piece, position, rows.session.spec.batch_requests)
        ]
        self._throttle(piece.num_rows, began_s)
        with self._changed:
            if held.read_to == position:
                held.pieces += pieces
                held.read_to = piece.end
            self.counts.busy_s += self.clock.monotonic_s() - began_s
            self._changed.notify_all()
        return True

    def _next(self) -> _LeasedSplit | None:
        """Choose the split to read next: the first one that is not read completely, if the buffer has room.

        Without room: a split that a worker waits for and of which nothing is buffered.
        """
        unread = [
            held
            for held in self._held.values()
            if held.read_to < held.split.end_position and held.error is None
        ]
        awaited = next((held for held in unread if held.num_waiters and not held.pieces), None)
        return awaited or (unread[0] if unread and self.has_room else None)

    def _throttle(self, num_rows: int, began_s: float) -> None:
        if self.max_requests_s:
            self._not_before_s = max(self._not_before_s, began_s) + num_rows / self.max_requests_s
            self.clock.sleep(max(self._not_before_s - self.clock.monotonic_s(), 0.0))

    def next_piece(self, split: int, grant: int, position: int, timeout_s: float) -> EncodedPiece | None:
        """The piece of a split that begins at `position`, None if it is not read yet. Earlier pieces are
        dropped.

        Raises:
            FencedError: this reader does not have that lease, or not any more.
            CheckpointError: a file is damaged; the message names it.
        """
        ends_s = self.clock.monotonic_s() + timeout_s
        asking: _LeasedSplit | None = None  # set once: two waiters that wake each other would never sleep
        with self._changed:
            try:
                while True:
                    held = self._leased_split(split, grant)
                    encoded, left_s = self._piece_at(held, position), ends_s - self.clock.monotonic_s()
                    if encoded is not None:
                        self.counts.pieces += 1
                        self.counts.requests += len(encoded.arrays[0])
                        self.counts.sent_bytes += total_bytes(encoded.arrays)
                    if encoded is not None or left_s <= 0:
                        return encoded
                    if asking is None:
                        asking = held
                        held.num_waiters += 1
                        self._changed.notify_all()
                    self._changed.wait(min(left_s, _WAIT_SLICE_S))
            finally:
                if asking is not None:
                    asking.num_waiters -= 1

    def _leased_split(self, split: int, grant: int) -> _LeasedSplit:
        """Raises as `next_piece`."""
        held = self._held.get(split)
        if held is None or held.lease.grant != grant:
            raise FencedError(
                f"expected a current lease of split {split}, got grant {grant}: ask the controller"
            )
        if held.error is not None:
            raise held.error
        return held

    def _piece_at(self, held: _LeasedSplit, position: int) -> EncodedPiece | None:
        while held.pieces and held.pieces[0].end <= position:
            held.pieces.popleft()
            self._changed.notify_all()
        begins = held.pieces[0].start if held.pieces else held.read_to
        if begins != position:  # the worker restarted from another position
            held.pieces.clear()
            held.read_to = position
        return held.pieces[0] if held.pieces else None

    def report(self) -> dict[str, float]:
        """Counts since the start, and what is held now."""
        with self._changed:
            pieces = [piece for held in self._held.values() for piece in held.pieces]
            now = {"held_splits": len(self._held), "held_pieces": len(pieces)}
        held_bytes = sum(total_bytes(piece.arrays) for piece in pieces)
        return {**dataclasses.asdict(self.counts), **now, "held_bytes": held_bytes}


def _parts(piece: Piece, start: int, batch_requests: int) -> Iterator[tuple[int, Piece]]:
    """Cut a piece into pieces of at most `batch_requests` requests, each with the position where it begins. A
    piece without rows is one."""
    for row in range(0, max(piece.num_rows, 1), batch_requests):
        part = piece.between(row, min(row + batch_requests, piece.num_rows))
        yield start, part
        start = part.end
