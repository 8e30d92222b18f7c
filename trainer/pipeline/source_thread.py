"""Runs a source in its own thread, so that its handles are used from one thread only."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from roostream.runtime.kafka.consumer import PartitionLag
from roostream.runtime.kafka.topics import Partition, Progress
from roostream.runtime.work_unit import TableInput
from trainer.batch_source import BatchSource, NewestIds
from trainer.chunks import Chunk

T = TypeVar("T")


class SourceThread:
    """A `BatchSource`. `submit` runs a function in the thread; other calls wait for it."""

    def __init__(self, open_source: Callable[[], BatchSource]) -> None:
        """`open_source` is called in the thread.

        Raises:
            RoostreamError: as `open_source`; no thread is left behind.
        """
        self._closed = False
        self._executor = ThreadPoolExecutor(1, "source")
        self._ident = self._executor.submit(threading.get_ident).result()
        try:
            self.source = self._run(open_source)
        except BaseException:
            self._executor.shutdown()
            raise

    def submit(self, do: Callable[[], T]) -> Future[T]:
        """Run `do` in the thread, in the order of calls."""
        return self._executor.submit(do)

    def poll(self, max_requests: int, timeout_s: float, partition: Partition | None = None) -> Chunk | None:
        return self._run(lambda: self.source.poll(max_requests, timeout_s, partition))

    def rest(self, max_requests: int) -> Chunk | None:
        return self._run(lambda: self.source.rest(max_requests))

    def seek(self, at: Progress) -> None:
        self._run(lambda: self.source.seek(at))

    def assign(self, numbers: Collection[int], session: TableInput | None = None) -> None:
        self._run(lambda: self.source.assign(numbers, session))

    def newest_ids(self, trained: Progress) -> Mapping[Partition, NewestIds]:
        return self._run(lambda: self.source.newest_ids(trained))

    def bound(self, ends: Progress) -> None:
        """Does not wait for a running poll."""
        self.source.bound(ends)

    @property
    def ended(self) -> bool:
        return self.source.ended

    def positions(self) -> Progress:
        """Uses no handle; any thread."""
        return self.source.positions()

    def lag(self) -> dict[Partition, PartitionLag]:
        return self.source.lag()

    @property
    def num_lost(self) -> int:
        return self.source.num_lost

    def close(self) -> None:
        """Close the source and end the thread. Idempotent."""
        if not self._closed:
            self._closed = True
            self._run(self.source.close)
            self._executor.shutdown()

    def _run(self, do: Callable[[], T]) -> T:
        return do() if threading.get_ident() == self._ident else self._executor.submit(do).result()
