"""A reader: extract, transform, batch, and keep until it is fetched (Zhao et al., §III: a DPP worker without state).

    leases ──► splits held ──► row groups by `LocalSessionRows` ──► units of `batch_requests` ──► bounded buffer ──► who asks

Rows are read as a worker reads them for itself, so batches are equal bit for bit. A unit is kept until the next
one of its split is asked for: an answer that is lost is given again. Nothing else is remembered, and nothing of it outlives it.
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
from roostream.warehouse.readers.piece_frames import encode_piece, num_bytes
from roostream.warehouse.sessions.session import TableSplit
from roostream.warehouse.sessions.session_rows import LocalSessionRows, Piece

_SLICE_S = 0.5  # a wait within it looks anew


class Unit(NamedTuple):
    """Rows of a split from `start` up to `end`, as they are sent."""

    start: int
    end: int
    header: Header
    arrays: list[np.ndarray]


@dataclasses.dataclass(kw_only=True, eq=False)
class _HeldSplit:
    lease: Lease
    split: TableSplit
    read_to: int
    units: deque[Unit] = dataclasses.field(default_factory=deque)
    num_asking: int = 0
    error: RoostreamError | None = None


@dataclasses.dataclass(kw_only=True)
class ReaderCounts:
    """Since the start."""

    units: int = 0
    requests: int = 0
    sent_bytes: int = 0
    splits: int = 0  # leases that were taken
    busy_s: float = 0.0  # reading


class SplitReader:
    """Of one session after the other. `step` is called by one thread, all else by any."""

    def __init__(self, clock: Clock, *, max_bytes: int, max_units: int, max_requests_s: int = 0) -> None:
        self.clock, self.max_bytes, self.max_units, self.max_requests_s = (
            clock,
            max_bytes,
            max_units,
            max_requests_s,
        )
        self.counts = ReaderCounts()
        self._rows: LocalSessionRows | None = None
        self._schema_digest = ""
        self._held: dict[int, _HeldSplit] = {}
        self._changed = threading.Condition()
        self._not_before_s = 0.0

    # What it has

    def begin(self, rows: LocalSessionRows | None, schema_digest: str = "") -> None:
        """Of this session from now on (None: there is none); what was held is forgotten."""
        with self._changed:
            self._rows, self._schema_digest, self._held = rows, schema_digest, {}
            self._changed.notify_all()

    def hold(self, leases: Sequence[Lease]) -> None:
        """These splits, in this order, and no others. What is kept of a lease stays while it is the same."""
        with self._changed:
            assert self._rows is not None
            splits = self._rows.session.order.splits
            before, self._held = self._held, {}
            for lease in leases:
                known = before.get(lease.split)
                if known is not None and known.lease.grant == lease.grant:
                    self._held[lease.split] = known
                elif lease.split < len(splits):
                    self._held[lease.split] = _HeldSplit(
                        lease=lease, split=splits[lease.split], read_to=lease.position
                    )
                    self.counts.splits += 1
            self._changed.notify_all()

    @property
    def has_room(self) -> bool:
        """For a unit more."""
        units = [unit for held in self._held.values() for unit in held.units]
        return len(units) < self.max_units and sum(num_bytes(unit.arrays) for unit in units) < self.max_bytes

    @property
    def holds_any(self) -> bool:
        """A lease."""
        with self._changed:
            return bool(self._held)

    def free(self, max_splits: int) -> int:
        """So many leases more would be read."""
        with self._changed:
            return self._free(max_splits)

    def wait_free(self, max_splits: int, timeout_s: float) -> None:
        """Until a lease more would be read, or so long."""
        with self._changed:
            self._changed.wait_for(lambda: self._free(max_splits), timeout_s)

    def _free(self, max_splits: int) -> int:
        unread = sum(held.read_to < held.split.behind for held in self._held.values())
        return max(max_splits - unread, 0) if self.has_room or not self._held else 0

    # Reading

    def step(self, timeout_s: float) -> bool:
        """Read some rows that there is room for, or wait for that. False: nothing was to be read.

        Raises:
            UnavailableError: the table can't be read now; call again.
        """
        with self._changed:
            self._changed.wait_for(self._next, timeout_s)
            held, rows = self._next(), self._rows
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
        units = [
            Unit(start, part.end, *encode_piece(part, self._schema_digest))
            for start, part in self._parts(piece, position)
        ]
        self._spare(piece.num_rows, began_s)
        with self._changed:
            if held.read_to == position:
                held.units += units
                held.read_to = piece.end
            self.counts.busy_s += self.clock.monotonic_s() - began_s
            self._changed.notify_all()
        return True

    def _next(self) -> _HeldSplit | None:
        """The first that isn't read to its end, if there is room; or one that is asked for and of which nothing is here."""
        unread = [
            held for held in self._held.values() if held.read_to < held.split.behind and held.error is None
        ]
        asked = next((held for held in unread if held.num_asking and not held.units), None)
        return asked or (unread[0] if unread and self.has_room else None)

    def _parts(self, piece: Piece, start: int) -> Iterator[tuple[int, Piece]]:
        """One at least, also of a piece without rows."""
        assert self._rows is not None
        most = self._rows.session.spec.batch_requests
        for row in range(0, max(piece.num_rows, 1), most):
            part = piece.between(row, min(row + most, piece.num_rows))
            yield start, part
            start = part.end

    def _spare(self, num_rows: int, began_s: float) -> None:
        if self.max_requests_s:
            self._not_before_s = max(self._not_before_s, began_s) + num_rows / self.max_requests_s
            self.clock.sleep(max(self._not_before_s - self.clock.monotonic_s(), 0.0))

    # Giving

    def unit(self, split: int, grant: int, position: int, timeout_s: float) -> Unit | None:
        """That of the split which begins at `position`; those before it are not asked for again. None: it isn't there yet.

        Raises:
            FencedError: this reader doesn't have that lease (any more). CheckpointError: a file is damaged; names it.
        """
        ends_s = self.clock.monotonic_s() + timeout_s
        asking: _HeldSplit | None = None  # told once: two who wait and tell each other would never sleep
        with self._changed:
            try:
                while True:
                    held = self._held_by(split, grant)
                    unit, left_s = self._unit_at(held, position), ends_s - self.clock.monotonic_s()
                    if unit is not None:
                        self.counts.units += 1
                        self.counts.requests += len(unit.arrays[0])
                        self.counts.sent_bytes += num_bytes(unit.arrays)
                    if unit is not None or left_s <= 0:
                        return unit
                    if asking is None:
                        asking = held
                        held.num_asking += 1
                        self._changed.notify_all()
                    self._changed.wait(min(left_s, _SLICE_S))
            finally:
                if asking is not None:
                    asking.num_asking -= 1

    def _held_by(self, split: int, grant: int) -> _HeldSplit:
        """Raises as `unit`."""
        held = self._held.get(split)
        if held is None or held.lease.grant != grant:
            raise FencedError(
                f"expected a lease of split {split} that this reader has, got grant {grant}: ask the controller"
            )
        if held.error is not None:
            raise held.error
        return held

    def _unit_at(self, held: _HeldSplit, position: int) -> Unit | None:
        while held.units and held.units[0].end <= position:
            held.units.popleft()
            self._changed.notify_all()
        begins = held.units[0].start if held.units else held.read_to
        if begins != position:  # whoever asks began anew
            held.units.clear()
            held.read_to = position
        return held.units[0] if held.units else None

    def shown(self) -> dict[str, float]:
        """Numbers by the names that they are exported under."""
        with self._changed:
            units = [unit for held in self._held.values() for unit in held.units]
            now = {"held_splits": len(self._held), "held_units": len(units)}
        held_bytes = sum(num_bytes(unit.arrays) for unit in units)
        return {**dataclasses.asdict(self.counts), **now, "held_bytes": held_bytes}
