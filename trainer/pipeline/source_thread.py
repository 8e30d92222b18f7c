"""Runs a source in its own thread, so that its handles are used from one thread only."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from trainer.batch_source import BatchSource, ForwardingSource

T = TypeVar("T")


class SourceThread(ForwardingSource):
    """A `BatchSource`. `submit` runs a function in the thread. Calls that read wait for it; `bound` and what
    reports progress use no handle and do not wait."""

    def __init__(self, open_source: Callable[[], BatchSource]) -> None:
        """`open_source` is called in the thread. If it raises, no thread is left behind."""
        self._closed = False
        self._executor = ThreadPoolExecutor(1, "source")
        self._ident = self._executor.submit(threading.get_ident).result()
        try:
            self.source = self.run(open_source)
        except BaseException:
            self._executor.shutdown()
            raise

    def submit(self, do: Callable[[], T]) -> Future[T]:
        """Run `do` in the thread, in the order of calls."""
        return self._executor.submit(do)

    def run(self, do: Callable[[], T]) -> T:
        return do() if threading.get_ident() == self._ident else self.submit(do).result()

    def close(self) -> None:
        """Close the source and end the thread. Idempotent."""
        if not self._closed:
            self._closed = True
            super().close()
            self._executor.shutdown()
