"""A source in a thread of its own: whoever calls it, its handles are used from there alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from roostream.runtime.kafka.consumer import PartitionLag
from roostream.runtime.kafka.topics import Partition, Progress
from roostream.runtime.work_unit import TableInput
from trainer.batch_source import BatchSource, Chunk, NewestIds

T = TypeVar("T")


class SourceThread:
    """See `BatchSource`. `submit` runs what reads ahead there; calls from outside wait until it has ended."""

    def __init__(self, open_source: Callable[[], BatchSource]) -> None:
        """`open_source` is called in the thread.

        Raises:
            RoostreamError: as `open_source`; no thread is left.
        """
        self._closed = False
        self._lane = ThreadPoolExecutor(1, "source")
        self._ident = self._lane.submit(threading.get_ident).result()
        try:
            self.source = self._here(open_source)
        except BaseException:
            self._lane.shutdown()
            raise

    def submit(self, do: Callable[[], T]) -> Future[T]:
        """In the order of calls."""
        return self._lane.submit(do)

    def poll(self, max_requests: int, timeout_s: float, partition: Partition | None = None) -> Chunk | None:
        return self._here(lambda: self.source.poll(max_requests, timeout_s, partition))

    def rest(self, max_requests: int) -> Chunk | None:
        return self._here(lambda: self.source.rest(max_requests))

    def seek(self, at: Progress) -> None:
        self._here(lambda: self.source.seek(at))

    def assign(self, numbers: Collection[int], session: TableInput | None = None) -> None:
        self._here(lambda: self.source.assign(numbers, session))

    def newest_ids(self, trained: Progress) -> Mapping[Partition, NewestIds]:
        return self._here(lambda: self.source.newest_ids(trained))

    def bound(self, ends: Progress) -> None:
        """Waits for no poll."""
        self.source.bound(ends)

    @property
    def ended(self) -> bool:
        return self.source.ended

    def positions(self) -> Progress:
        """Asks no handle: from whichever thread asks."""
        return self.source.positions()

    def lag(self) -> dict[Partition, PartitionLag]:
        return self.source.lag()

    @property
    def num_lost(self) -> int:
        return self.source.num_lost

    def close(self) -> None:
        """Also ends the thread. Idempotent."""
        if not self._closed:
            self._closed = True
            self._here(self.source.close)
            self._lane.shutdown()

    def _here(self, do: Callable[[], T]) -> T:
        return do() if threading.get_ident() == self._ident else self._lane.submit(do).result()
