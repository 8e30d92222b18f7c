"""A session of the warehouse, or the stream: whichever a worker was told when it was restored."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from roostream.runtime.kafka.consumer import PartitionLag
from roostream.runtime.kafka.topics import Partition, Progress
from roostream.runtime.work_unit import TableInput
from trainer.batch_source import BatchSource, Chunk, NewestIds


class PhasedSource:
    """See `BatchSource`; it begins with the stream, which stays open."""

    def __init__(self, stream: BatchSource, open_session: Callable[[TableInput], BatchSource]) -> None:
        """`open_session`: as `assign` raises."""
        self.stream, self.open_session = stream, open_session
        self.now = stream

    def poll(self, max_requests: int, timeout_s: float, partition: Partition | None = None) -> Chunk | None:
        return self.now.poll(max_requests, timeout_s, partition)

    def rest(self, max_requests: int) -> Chunk | None:
        return self.now.rest(max_requests)

    def seek(self, at: Progress) -> None:
        self.now.seek(at)

    def assign(self, numbers: Collection[int], session: TableInput | None = None) -> None:
        opened = self.open_session(session) if session else self.stream
        if self.now is not self.stream:
            self.now.close()
        self.now = opened
        self.now.assign(numbers)

    def bound(self, ends: Progress) -> None:
        self.now.bound(ends)

    @property
    def ended(self) -> bool:
        return self.now.ended

    def newest_ids(self, trained: Progress) -> Mapping[Partition, NewestIds]:
        return self.now.newest_ids(trained)

    def positions(self) -> Progress:
        return self.now.positions()

    def lag(self) -> dict[Partition, PartitionLag]:
        return self.now.lag()

    @property
    def num_lost(self) -> int:
        return self.now.num_lost

    def close(self) -> None:
        if self.now is not self.stream:
            self.now.close()
        self.stream.close()
