"""How far a worker may read: to the ends of its work units while history is trained, and without bounds on
the stream.

The controller's commands name the work units of the current epoch: START begins with them, COMMIT adds the
next ones. A unit's end is an offset, and the last record before it may be slightly below: transactions leave
markers that consumers never see. So a worker that has trained everything reports the end itself, not the
position after its last record.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roostream.runtime.kafka.topics import Progress
from roostream.runtime.work_unit import STREAM, Epoch, partition_of
from trainer.loop import TrainLoop


class ReadBounds:
    """Bounds of one worker. Only the loop's thread may change them; any thread may read."""

    def __init__(self, loop: TrainLoop) -> None:
        self.loop, self._config = loop, loop.config
        self.epoch = STREAM
        self.phased = False  # the controller separates history from the stream

    def clear(self) -> None:
        """Forget the bounds, because everything is being restored."""
        self.extend(None)

    def begin(self, epoch: Mapping[str, Any] | None) -> None:
        """Apply the epoch of a START command. History is trained in larger batches."""
        self.extend(epoch)
        self.loop.config = self._config.in_phase(initial=self.is_initial)

    def extend(self, epoch: Mapping[str, Any] | None) -> None:
        """Apply the epoch of a COMMIT command: the units that may be read now."""
        before, self.epoch, self.phased = self._ends, Epoch.of(epoch), epoch is not None
        if self._ends != before:
            self.loop.source.bound(self._ends)

    @property
    def is_initial(self) -> bool:
        """Whether history is trained."""
        return self.epoch.number > 0

    @property
    def is_trained(self) -> bool:
        """Whether all units are trained, so that there is nothing to do before the next commit."""
        if not self.is_initial or not self.loop.source.ended:
            return not self.epoch.units and self.is_initial
        trained = self.loop.partitions.progress
        return all(trained.get(partition, 0) >= at for partition, at in self.loop.source.positions().items())

    def prepare_cut(self) -> None:
        """Move finished units to their ends. At the end of a session, load the sample ids that
        the stream must not train again. Raises UnavailableError: the warehouse cannot be read now; call
        again."""
        if self.is_trained:
            trained = self.loop.partitions.progress
            trained.update({p: max(trained[p], end) for p, end in self._ends.items() if p in trained})
        if not self.is_initial:
            return
        self.loop.feed.pause()
        for partition, newest in self.loop.source.newest_ids(self.loop.partitions.progress).items():
            self.loop.partitions.set_seen_ids(partition, *newest)

    @property
    def _ends(self) -> Progress:
        """End offset of each unit's partition."""
        return {partition_of(unit.source): unit.end for unit in self.epoch.units}

    def report(self) -> dict[str, Any]:
        """Fields of a heartbeat's report; {} on the stream."""
        return {"epoch_trained": self.epoch.number if self.is_trained else 0} if self.is_initial else {}
