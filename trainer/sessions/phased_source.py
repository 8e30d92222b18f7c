"""Switches between the stream and a warehouse session, as the controller decides at each restore."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from roostream.runtime.kafka.consumer import PartitionLag
from roostream.runtime.kafka.topics import Partition, Progress
from roostream.runtime.work_unit import TableInput
from trainer.batch_source import BatchSource, NewestIds
from trainer.chunks import Chunk


class PhasedSource:
    """A `BatchSource`. It starts with the stream, which stays open."""

    def __init__(self, stream: BatchSource, open_session: Callable[[TableInput], BatchSource]) -> None:
        """`open_session` raises as `assign`."""
        self.stream, self.open_session = stream, open_session
        self.current = stream

    def poll(self, max_requests: int, timeout_s: float, partition: Partition | None = None) -> Chunk | None:
        return self.current.poll(max_requests, timeout_s, partition)

    def rest(self, max_requests: int) -> Chunk | None:
        return self.current.rest(max_requests)

    def seek(self, at: Progress) -> None:
        self.current.seek(at)

    def assign(self, numbers: Collection[int], session: TableInput | None = None) -> None:
        opened = self.open_session(session) if session else self.stream
        if self.current is not self.stream:
            self.current.close()
        self.current = opened
        self.current.assign(numbers)

    def bound(self, ends: Progress) -> None:
        self.current.bound(ends)

    @property
    def ended(self) -> bool:
        return self.current.ended

    def newest_ids(self, trained: Progress) -> Mapping[Partition, NewestIds]:
        return self.current.newest_ids(trained)

    def positions(self) -> Progress:
        return self.current.positions()

    def lag(self) -> dict[Partition, PartitionLag]:
        return self.current.lag()

    @property
    def num_lost(self) -> int:
        return self.current.num_lost

    def close(self) -> None:
        if self.current is not self.stream:
            self.current.close()
        self.stream.close()
