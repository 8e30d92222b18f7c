"""Who reads which split: leases, and how far all is read. The core of a DPP master (Zhao et al., *Understanding Data Storage and
Ingestion for Large-Scale Deep Recommendation Model Training*, §III), pure.

    trainer worker ── its partitions' positions, units in flight ──► Leases ◄── a reader asks for work, or renews ── readers
                                                                       │
                          the next splits of each worker, in order, each leased to one reader at a time

A split is given in the order of all, and only within the units in flight of the worker that trains it, so what readers hold is
bounded. Nothing of a lease is kept anywhere: the cursor (partition → position) is all that a commit needs, and whoever is
restored from it begins without leases. A reader that is silent loses its leases; what it gives late is what another one gives,
since a split's rows depend on the split alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import NamedTuple

from warehouse.readers.splits import ReadOrder, TableSplit, dealt

LEASE_S = 3.0

Positions = Mapping[int, int]
"""Partition → position; one that isn't named is at its beginning."""


@dataclasses.dataclass(kw_only=True)
class _Lease:
    split: TableSplit
    reader: str
    until_s: float


class Consumer(NamedTuple):
    """A trainer's worker: what is its own, and how many splits may be under way for it."""

    partitions: tuple[int, ...]
    in_flight: int


class Leases:
    """Of one session and one incarnation. Times are seconds of one monotonic clock. Not thread-safe."""

    def __init__(self, order: ReadOrder, cursor: Positions | None = None, lease_s: float = LEASE_S) -> None:
        self.order, self.lease_s = order, lease_s
        self._at: dict[int, int] = {}
        self._consumers: dict[int, Consumer] = {}
        self._leases: dict[int, _Lease] = {}  # number of the split → who has it
        self.restore(cursor or {})

    def restore(self, cursor: Positions) -> None:
        """Go on from a commit: every lease is void, and no worker is known until it tells of itself."""
        self._at = {partition: min(cursor.get(partition, 0), rows) for partition, rows in self.order.rows.items()}
        self._consumers.clear()
        self._leases.clear()

    def cursor(self) -> dict[int, int]:
        return dict(self._at)

    @property
    def is_over(self) -> bool:
        """Everything is read and taken."""
        return all(self._at[partition] >= rows for partition, rows in self.order.rows.items())

    # Workers

    def deal(self, workers: int, in_flight: int) -> None:
        """So many workers, each with the partitions that are its own by number, and so many splits under way for each."""
        self._consumers = {w: Consumer(tuple(dealt(self.order.rows, w, workers)), in_flight) for w in range(workers)}
        self._release()

    def tell(self, worker: int, partitions: Collection[int], in_flight: int) -> None:
        """A worker's partitions, and its units in flight, as they are now."""
        self._consumers[worker] = Consumer(tuple(sorted(partitions)), in_flight)
        self._release()

    def took(self, partition: int, position: int) -> None:
        """Everything below is in the hands of the worker that trains this partition; what is told late changes nothing."""
        if partition in self._at:
            self._at[partition] = max(self._at[partition], min(position, self.order.rows[partition]))
            self._release()

    def done(self, split: TableSplit) -> None:
        self.took(split.partition, split.behind)

    def holders(self, worker: int, now_s: float) -> dict[int, str]:
        """Number of a split that is under way for this worker → the reader that has it."""
        self._expire(now_s)
        mine = {split.number for split in self._wanted_by(self._consumers.get(worker, Consumer((), 0)))}
        return {number: lease.reader for number, lease in self._leases.items() if number in mine}

    # Readers

    def lease(self, reader: str, now_s: float) -> TableSplit | None:
        """The first split that somebody waits for and nobody reads, for `lease_s` unless renewed. None: there is none now."""
        self._expire(now_s)
        free = [split for split in self._wanted() if split.number not in self._leases]
        if not free:
            return None
        self._leases[free[0].number] = _Lease(split=free[0], reader=reader, until_s=now_s + self.lease_s)
        return free[0]

    def renew(self, reader: str, now_s: float) -> list[TableSplit]:
        """The reader lives; the splits that are still its own. What else it holds it may forget."""
        self._expire(now_s)
        its = [lease for lease in self._leases.values() if lease.reader == reader]
        for lease in its:
            lease.until_s = now_s + self.lease_s
        return [lease.split for lease in its]

    def lost(self, reader: str) -> None:
        """It ends, or began anew: what it had is anybody's."""
        self._leases = {number: lease for number, lease in self._leases.items() if lease.reader != reader}

    @property
    def num_wanted(self) -> int:
        """Splits under way, or to be begun."""
        return len(self._wanted())

    # Inside

    def _wanted_by(self, consumer: Consumer) -> list[TableSplit]:
        return self.order.from_here({p: self._at[p] for p in consumer.partitions if p in self._at}, consumer.in_flight)

    def _wanted(self) -> list[TableSplit]:
        """Of each worker its next ones, in the order of all."""
        found = {split.number: split for consumer in self._consumers.values() for split in self._wanted_by(consumer)}
        return [found[number] for number in sorted(found)]

    def _release(self) -> None:
        """What nobody waits for any more is no lease."""
        wanted = {split.number for split in self._wanted()}
        self._leases = {number: lease for number, lease in self._leases.items() if number in wanted}

    def _expire(self, now_s: float) -> None:
        self._leases = {number: lease for number, lease in self._leases.items() if now_s < lease.until_s}
