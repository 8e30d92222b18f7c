"""How far a worker may read, as the controller hands it out: to the ends of its units while history is trained, else on.

A unit's end is an offset, and the last record before it may lie a little below it: transactions leave markers that no reader
sees. So a worker that has trained everything says so by the end itself, not by where its last record was.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roostream.runtime.kafka.topics import Progress
from roostream.runtime.work_unit import STREAM, Epoch, partition_of
from trainer.loop import TrainLoop


class ReadBounds:
    """Of one worker. The loop's thread, but for what only reads."""

    def __init__(self, loop: TrainLoop) -> None:
        self.loop, self._config = loop, loop.config
        self.epoch = STREAM
        self.phased = False  # somebody tells history from the stream

    def clear(self) -> None:
        """Everything is restored: it isn't known."""
        self.extend(None)

    def begin(self, told: Mapping[str, Any] | None) -> None:
        """START: history is trained in larger batches."""
        self.extend(told)
        self.loop.config = self._config.in_phase(initial=self.is_initial)

    def extend(self, told: Mapping[str, Any] | None) -> None:
        """COMMIT: what was handed out is trained, or part of it is; this is what may be read now."""
        before, self.epoch, self.phased = self._ends, Epoch.of(told), told is not None
        if self._ends != before:
            self.loop.source.bound(self._ends)

    @property
    def is_initial(self) -> bool:
        """History is trained."""
        return self.epoch.number > 0

    @property
    def is_trained(self) -> bool:
        """Everything handed out is: there is nothing to do before the next commit."""
        if not self.is_initial or not self.loop.source.ended:
            return not self.epoch.units and self.is_initial
        trained = self.loop.own.progress
        return all(trained.get(partition, 0) >= at for partition, at in self.loop.source.positions().items())

    def settle(self) -> None:
        """For a cut: what is trained to its end is at its end, and at that of a session what the stream must not train again is
        known.

        Raises:
            UnavailableError: the warehouse can't be read now; call again.
        """
        if self.is_trained:
            trained = self.loop.own.progress
            trained.update({p: max(trained[p], end) for p, end in self._ends.items() if p in trained})
        if not self.is_initial:
            return
        self.loop.feed.pause()
        for partition, newest in self.loop.source.newest_ids(self.loop.own.progress).items():
            self.loop.own.know(partition, *newest)

    @property
    def _ends(self) -> Progress:
        return {partition_of(unit.source): unit.end for unit in self.epoch.units}

    def report(self) -> dict[str, Any]:
        """What beats carry of it; nothing where history isn't told from the stream."""
        return {"epoch_trained": self.epoch.number if self.is_trained else 0} if self.is_initial else {}
