"""Which part of a historical range each worker has: a pure function of what is committed.

The range of every source is divided into the same number of parts, of `unit_records` at most; the parts of one number are an
*epoch*. All sources are in the same epoch, so that none is trained far ahead of the others, and none is left over at the end.

    committed offsets ──► epoch ──► of each source, what is left of its part ──► a worker's sources are its units
          ▲                                                                               │
          └──── a commit, which is due as soon as every worker says that its units are trained

There is no list of what is done: a unit is done when the offsets of a manifest say so. So nothing is handed out twice by mistake,
whoever dies: what a lost worker had is, after the next RESTORE, what whoever has its sources then is given.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from roostream.runtime.work_unit import Epoch, WorkUnit

Done = Mapping[str, int]
"""Source → everything below it is committed; a source that isn't named has nothing."""


class UnitAllocator:
    """Of one historical range. Epochs are numbered from 1; the one behind the last means that all of it is committed."""

    def __init__(self, whole: Sequence[WorkUnit], unit_records: int) -> None:
        self.whole = {unit.source: unit for unit in whole}
        self.num_epochs = max((-(-len(unit) // unit_records) for unit in whole), default=0)
        self.done: Done = {}

    def committed(self, done: Done) -> None:
        """This is what the newest commit says; also after a RESTORE, which may go back."""
        self.done = dict(done)

    @property
    def number(self) -> int:
        """Of the epoch in which the furthest-behind source is."""
        return min((self._number(unit) for unit in self.whole.values()), default=1)

    @property
    def is_over(self) -> bool:
        """Everything is committed."""
        return self.number > self.num_epochs

    def epoch(self, sources: Iterable[str]) -> Epoch:
        """What whoever has these sources may read until the next commit; a unit that is done already is empty."""
        number = min(self.number, self.num_epochs)
        return Epoch(
            number,
            tuple(self._left(self.whole[source], number) for source in sources if source in self.whole),
        )

    @property
    def num_records(self) -> int:
        return sum(map(len, self.whole.values()))

    @property
    def num_left(self) -> int:
        """Of these, not committed."""
        return sum(len(unit.after(self.done.get(unit.source, 0))) for unit in self.whole.values())

    def _number(self, unit: WorkUnit) -> int:
        """The first epoch of which something isn't committed."""
        at = self.done.get(unit.source, 0)
        first, behind = 1, self.num_epochs + 1
        while first < behind:
            middle = (first + behind) // 2
            part = unit.part(middle - 1, self.num_epochs)
            first, behind = (middle + 1, behind) if at >= part.end else (first, middle)
        return first

    def _left(self, unit: WorkUnit, number: int) -> WorkUnit:
        if not self.num_epochs:
            return unit.after(unit.end)
        return unit.part(number - 1, self.num_epochs).after(self.done.get(unit.source, 0))
